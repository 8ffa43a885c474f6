"""Faults: a rank that dies, stops, hangs or disagrees ends the others, who say whose fault it is.

Times are short here; the pulse beats eight times in SILENT seconds.
"""

import math
import multiprocessing
import os
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from ports import free_ports
from ranks import run_ranks
from test_train import CONFIG
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import PATIENCE_SECONDS, until

from megabatch import between_steps
from megabatch.cluster import Cluster
from megabatch.errors import RunFailed
from megabatch.launch import run_local
from megabatch.sync import heartbeat
from megabatch.sync.ddp import GradSync
from megabatch.sync.heartbeat import Heartbeat, Progress
from megabatch.sync.lanes import Reduction
from megabatch.sync.meeting import Disagreement, Meeting
from megabatch.sync.segment import Segment
from megabatch.training import train

SILENT, LATE, WORLD, STEPS = 3.0, 5.0, 3, 4


@contextmanager
def workers(folder, target, *arguments, **environ):
    """Three processes that call target(rank, *arguments), as if some launcher had started them;
    what they say lies in the folder, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "megabatch.training"])
    processes = []
    for rank in range(WORLD):
        its = {"RANK": str(rank), "LOCAL_RANK": str(rank), **environ}
        process = context.Process(target=work, args=(its, folder / str(rank), target, *arguments))
        process.start()
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def work(environ, said, target, *arguments):
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    world = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ.update(environ, **world, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    target(int(environ["RANK"]), *arguments)


def ended(process, status):
    """Whether it ends by itself, and so."""
    process.join(PATIENCE_SECONDS)
    return process.exitcode == status


def bad_luck(segment, divide):
    raise OSError("bad luck")


def beaten(heartbeat):
    """Until a pulse has told all where this rank is: the second from now on began after the
    first."""
    count = heartbeat._count
    until(lambda: heartbeat._count > count + 1, "two pulses")


def strike_between_pulses(heartbeat, number):
    """By the thread that beats, before it speaks to the store: who is stopped while it does so
    keeps the store's file locked, and nobody can be told anything by it."""
    heartbeat._now = lambda: os.kill(os.getpid(), number)
    time.sleep(10 * PATIENCE_SECONDS)


def disturbed(rank, pipes, fault):
    """Train by DDP; in step 3 rank 1 meets its fault, and the others tell what they are told."""
    pipe = pipes[rank]
    cluster = Cluster.from_env(device="cpu")
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 6000))
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    # DDP agrees on buckets, but nothing agrees on what users write.
    wire = "fp16" if fault == "wire" and rank == 1 else "fp32"
    # Nobody else is late, whatever the machine is busy with.
    late = 10 * PATIENCE_SECONDS
    sync = GradSync(cluster, "torus", wire, silent_seconds=SILENT, late_seconds=late)
    sync.attach(model)
    try:
        for step in range(STEPS):
            if fault == "sleep" and step == 2:
                sync._sender.heartbeat._late = LATE
            if rank == 1 and step == 2:
                beaten(sync._sender.heartbeat)
                if fault == "sleep":
                    time.sleep(10 * PATIENCE_SECONDS)
                elif fault == "error":
                    Segment.finish = bad_luck  # in a lane, as a full disk or a broken driver would
                elif fault.startswith("SIG"):
                    strike_between_pulses(sync._sender.heartbeat, getattr(signal, fault))
            model(torch.ones(2, 50)).sum().backward()
        pipe.send("finished")
    except Exception as error:
        pipe.send(str(error))


def told(tmp_path, fault):
    """What the ranks that are left say before they end."""
    pipes, theirs = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(WORLD)), strict=True)
    store = str(tmp_path / "store")
    said = {}
    with workers(tmp_path, disturbed, theirs, fault, MEGABATCH_STORE=store) as processes:
        for rank in (0, 2):
            assert pipes[rank].poll(PATIENCE_SECONDS), f"rank {rank} hangs"
            said[rank] = pipes[rank].recv()
            assert ended(processes[rank], 0), f"rank {rank} spoke but does not end"
    return said


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_the_others_name_a_rank_that_dies_or_stops(tmp_path, fault):
    said = told(tmp_path, fault)
    for rank, message in said.items():
        assert "rank 1 has been silent for 3 s (dead or stopped), last at step 2, " in message
        # Where the one who tells it was: waiting in the step after.
        assert re.search(rf"rank {rank} was at step 3, bucket \d, \w+ on [xy]", message), message


def test_the_others_name_a_rank_that_lives_but_does_not_come(tmp_path):
    said = told(tmp_path, "sleep")
    for message in said.values():
        assert "rank 1 lives but let the others wait for 5 s, last at step 2, bucket " in message


def test_a_rank_that_disagrees_on_what_is_sent_ends_all(tmp_path):
    said = told(tmp_path, "wire")
    for message in said.values():
        words = "says bucket 0 has 311100 x torch.float32, on the wire torch"
        assert re.search(rf"rank 1 {words}.float16, .* but rank 0 {words}.float32, ", message)


def test_an_error_that_no_silent_rank_explains_is_told_too(tmp_path):
    for message in told(tmp_path, "error").values():
        assert "rank 1 met an error though all ranks live: bad luck" in message


def failed_at_once(cluster):
    """What a sum ends with whose error is there before anybody watches over it."""
    store = Meeting(cluster, "a test").keys("heartbeat")
    heartbeat._LEAVING_SECONDS = 10 * PATIENCE_SECONDS  # time to tell
    with Heartbeat(cluster, store, SILENT) as watching:
        reduction = Reduction(1)
        watching.accuse("rank 0 says so")
        watching.failed(reduction, ConnectionError("closed by the peer"))
        watching.expect(reduction)
        with pytest.raises(RuntimeError) as failed:
            reduction.wait()
    return str(failed.value)


def test_an_error_that_comes_before_its_sum_is_watched_is_explained_too():
    for said in run_ranks(failed_at_once, 2):
        assert said.startswith("rank 0 says so; ")


class Told:
    """A supervisor's word, given when the test says so."""

    @contextmanager
    def telling(self, call):
        self.lost = call
        yield


def left_by_another(cluster, supervised):
    """How a sum of the first worker's ends when the other has closed its end."""
    link = Told() if supervised else None
    heartbeat.supervised = lambda: link
    heartbeat._LEAVING_SECONDS = 10 * PATIENCE_SECONDS  # time to tell
    store = Meeting(cluster, "a test").keys("heartbeat")
    watching = Heartbeat(cluster, store, SILENT)
    if cluster.rank == 1:
        watching.close()
        return None
    reduction, began = Reduction(1), watching._count
    watching.expect(reduction)
    if supervised:  # more looks than it takes to accuse somebody, after half of SILENT
        until(lambda: watching._count > began + 8, "eight looks at the other")
        assert not reduction.over.is_set()
        link.lost()
    with pytest.raises(RuntimeError) as failed:
        reduction.wait()
    return str(failed.value)


@pytest.mark.parametrize("supervised", [False, True])
def test_who_left_because_of_a_loss_is_not_accused_before_the_supervisor_has_told_of_it(supervised):
    said, _ = run_ranks(left_by_another, 2, supervised)
    wanted = "another rank was lost" if supervised else "rank 1 closed its end at step 0, others go"
    assert said.startswith(wanted)


class Gone:
    """A store that nobody holds any more."""

    def clone(self):
        return self

    def set_timeout(self, seconds):
        pass

    def set(self, key, value):
        raise ConnectionError("the store is gone")


def test_a_heartbeat_that_cannot_begin_is_told_of_no_loss(monkeypatch):
    link = Told()
    monkeypatch.setattr(heartbeat, "supervised", lambda: link)
    with pytest.raises(ConnectionError, match="gone"):
        Heartbeat(Cluster(0, 2, 0, 2, torch.device("cpu"), (1, 2)), Gone())
    assert not hasattr(link, "lost")


def compared(cluster):
    meeting = Meeting(cluster, "a test")
    meeting.compare("same", "bucket 0 has 8 floats")
    try:
        meeting.compare("other", f"bucket 0 has {8 + cluster.rank} floats")
    except Disagreement as error:
        return str(error)


def test_ranks_that_disagree_are_told_who_says_what():
    assert run_ranks(compared, 2) == [
        None,
        "rank 1 says bucket 0 has 9 floats, but rank 0 says bucket 0 has 8 floats",
    ]


def test_progress_compares_by_how_far_a_run_is():
    later = Progress(2, 1, 4, "all_reduce on y")
    assert Progress(1, 3, 90, "all_gather on x") < Progress(2, 0, 5, "computing") < later
    assert Progress(2, 1, 3, "reduce_scatter on x") < later
    assert str(later) == "step 2, bucket 1, all_reduce on y"


# --- a run of the trainer -----------------------------------------------------------------------


class Stopping(nn.Sequential):
    """A net that stops its process on one rank, in the pass with that number (0: the first that
    does not train)."""

    def __init__(self, rank, at):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.rank, self.at, self.passes = rank, at, 0

    def forward(self, images):
        self.passes += 1
        reached = self.passes == self.at if self.training else self.at == 0
        if os.environ["RANK"] == str(self.rank) and reached:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(images)


PATIENCE = 3.0
RUN = replace(CONFIG, batch=48, stages=(), epochs=0.5, patience=PATIENCE)
PATHS = {
    "backend": ({"plan": "backend"}, r"backend: all_reduce"),
    "tree": ({"deterministic": True}, r"tree: all_(to_all|gather)"),
    "planned": ({"plan": "torus:ring"}, r"\w+ on [xy]+"),
}


def stopping(config, rank, at):
    train(config, Stopping(rank, at), quiet=True)


@pytest.mark.parametrize("path", PATHS)
def test_a_run_names_the_rank_that_stops_with_step_bucket_and_phase(path):
    changes, phase = PATHS[path]
    with pytest.raises(RunFailed) as failed:
        run_local(3, stopping, replace(RUN, **changes), 1, 5)
    assert re.match(
        rf"rank 1 has been silent for 3 s \(dead or stopped\), last at step \d, bucket \d, .*; "
        rf"rank [02] was at step 5, bucket \d, {phase}",
        str(failed.value),
    ), str(failed.value)


def trains(rank, config, who, at):
    heartbeat._LEAVING_SECONDS = 0.0  # for the interpreter to end by itself: it cannot
    stopping(config, who, at)


def rank_1_is_named(place, processes, phase):
    """By both others, who end."""
    for rank in (0, 2):
        assert ended(processes[rank], 1)
        said = (place / str(rank)).read_text()
        assert re.search(
            r"rank 1 has been silent for 3 s \(dead or stopped\), last at step \d.*; rank "
            rf"{rank} was at step \d, bucket \d, {phase}",
            said,
        ), said


def test_a_rank_that_stops_in_an_evaluation_is_named_before_the_others_end(tmp_path):
    """Nothing can call back who waits in a collective of the backend: the process ends, by itself
    and in words."""
    config, store = replace(RUN, eval_every=0.2), str(tmp_path / "store")
    with workers(tmp_path, trains, config, 1, 0, MEGABATCH_STORE=store) as processes:
        rank_1_is_named(tmp_path, processes, "the end of an evaluation")


class Recomputed(Stopping):
    """Has statistics, and stops as they are computed anew."""

    def __init__(self, rank):
        super().__init__(rank, -1)
        self.insert(1, nn.BatchNorm1d(64))

    def forward(self, images):
        anew = self.training and not torch.is_grad_enabled()
        if os.environ["RANK"] == str(self.rank) and anew:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(images)


class Ruined(Stopping):
    """Its third pass has no finite loss."""

    def forward(self, images):
        return super().forward(images) * (math.nan if self.passes == 3 else 1)


def stops_in_statistics(rank):
    heartbeat._LEAVING_SECONDS = 0.0
    train(replace(RUN, eval_every=0.2, bn_recompute=96), Recomputed(1), quiet=True)


def stops_in_diagnosis(rank):
    heartbeat._LEAVING_SECONDS = 0.0
    whole = between_steps.diagnosis

    def diagnosis(*arguments):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*arguments)

    between_steps.diagnosis = diagnosis
    train(RUN, Ruined(0, -1), quiet=True)


BETWEEN_STEPS = {
    "the end of batch norm's statistics": stops_in_statistics,
    "the diagnosis": stops_in_diagnosis,
}


@pytest.mark.parametrize(("phase", "target"), BETWEEN_STEPS.items(), ids=BETWEEN_STEPS)
def test_a_rank_that_stops_between_two_steps_is_named(phase, target, tmp_path):
    with workers(tmp_path, target, MEGABATCH_STORE=str(tmp_path / "store")) as processes:
        rank_1_is_named(tmp_path, processes, phase)


def test_a_stopped_rank_that_holds_the_store_ends_the_others_too(tmp_path):
    config = replace(RUN, deterministic=True)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    with workers(tmp_path, trains, config, 0, 5, **where) as processes:
        for rank in (1, 2):
            assert ended(processes[rank], 1)
            said = (tmp_path / str(rank)).read_text()
            assert "the store has not answered for 3 s (rank 0 holds it" in said
            assert f"rank {rank} was at step 5, bucket 0, tree: all_to_all" in said
