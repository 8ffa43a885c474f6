"""A run that loses workers ends by itself, with the weights and the record it would have had."""

import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import dying
import pytest
import torch
import torch.distributed as dist
from commands import MEGABATCH, last_json, megabatch
from dying import died, disturbed
from torch import nn
from waiting import PATIENCE_SECONDS

from megabatch.elastic import heeding, supervisor
from megabatch.elastic.heeding import HeedingStore
from megabatch.elastic.rounds import agree
from megabatch.elastic.severing import sever
from megabatch.elastic.supervisor import Losses
from megabatch.errors import RunFailed, UserError, WorkerFailed
from megabatch.launch import run_local
from megabatch.runs import checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run on one worker, undisturbed: its summary, steps and evaluations."""
    folder = tmp_path_factory.mktemp("whole")
    summary = dying.undisturbed(folder)
    return summary, dying.steps_of(folder / "run"), dying.evaluations_of(folder / "run")


def same(found, folder, whole):
    """Every image once and in its order, the same evaluations, the same bits."""
    summary, steps, evaluations = whole
    assert dying.steps_of(folder / "run") == steps
    assert dying.evaluations_of(folder / "run") == evaluations
    assert found.weights_sha256 == summary.weights_sha256
    assert (found.best_top1, found.median_top1) == (summary.best_top1, summary.median_top1)
    return True


# The other moments, and chance, are in tests/systems.
@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("before a step", 0),
        ("after a step", 2),
        pytest.param("before a step", 2, marks=pytest.mark.systems),
        pytest.param("after a step", 0, marks=pytest.mark.systems),
    ],
)
def test_a_killed_worker_costs_its_step_and_nothing_else(moment, rank, whole, tmp_path, capfd):
    death = (moment, rank, 4)
    found = disturbed(tmp_path, death)
    assert died(tmp_path, death)
    assert same(found, tmp_path, whole)
    assert found.world == 3
    said = capfd.readouterr().err
    assert f"worker {rank} of 3 ended by SIGKILL: loss 1 of 3, replaced" in said
    assert "Traceback" not in said


def test_what_was_due_after_a_step_is_done_once(whole, tmp_path):
    """In an evaluation one is lost, and in its repetition another."""
    deaths = [("as it evaluates", 1, 1), ("evaluated", 0, 1)]
    found = disturbed(tmp_path, *deaths)
    assert died(tmp_path, *deaths)
    assert same(found, tmp_path, whole)


class Counting(nn.Module):
    """Counts its passes, and what it counted is in what it says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.passes += 1
        return self.body(x) * (1 + self.passes / 100)


@pytest.mark.parametrize(
    "death",
    [("before a step", 0, 4), ("as buffers are exchanged", 2, 4), ("buffers exchanged", 0, 4)],
    ids=lambda death: death[0],
)
def test_buffers_of_a_callers_net_are_as_if_nobody_had_been_lost(death, tmp_path):
    """Those who are left have passes behind them in that step, which is taken again."""
    config = replace(dying.CONFIG, ema=0.0)
    whole = dying.undisturbed(tmp_path / "whole", config, Counting())
    found = disturbed(tmp_path, death, config=config, how=signal.SIGKILL, make=Counting)
    assert died(tmp_path, death)
    assert found.weights_sha256 == whole.weights_sha256
    assert (found.top1, found.loss) == (whole.top1, whole.loss)


@pytest.mark.systems
def test_one_is_lost_while_the_others_regroup_and_the_newcomer_too(whole, tmp_path):
    deaths = [("before a step", 1, 3), ("as it copies the state", 0, 1), ("before a step", 2, 1)]
    found = disturbed(tmp_path, *deaths, workers=3, most=9)
    assert died(tmp_path, *deaths)
    assert same(found, tmp_path, whole)


def test_the_best_is_kept_though_its_writer_is_lost(tmp_path):
    """The last of the best, which no later one could stand for."""
    config = replace(dying.CONFIG, keep_best=True)
    dying.undisturbed(tmp_path / "whole", config)
    kept = checkpoint.newest(tmp_path / "whole" / "run" / "best")
    tops = [top1 for _, top1 in dying.evaluations_of(tmp_path / "whole" / "run")]
    better = sum(top1 > max([0.0, *tops[:place]]) for place, top1 in enumerate(tops))
    death = ("as it writes the best", 0, better)
    disturbed(tmp_path, death, config=config)
    assert died(tmp_path, death)
    found = checkpoint.newest(tmp_path / "run" / "best")
    assert found is not None and found.name == kept.name
    weights = [(one / checkpoint.WEIGHTS).read_bytes() for one in (found, kept)]
    assert weights[0] == weights[1]


def test_a_loss_in_the_last_moment_leaves_the_speed_of_the_run(whole, tmp_path):
    death = ("at the last barrier", 1, 1)
    found = disturbed(tmp_path, death)
    assert died(tmp_path, death)
    assert same(found, tmp_path, whole)
    assert found.images_per_second >= found.seen / found.seconds > 0


def test_when_nobody_is_left_the_run_goes_on_from_its_checkpoint(whole, tmp_path, capfd):
    """All at one step, after the first checkpoint."""
    deaths = [("before a step", rank, 9) for rank in range(2)]
    found = disturbed(tmp_path, *deaths, workers=2)
    assert died(tmp_path, *deaths)
    assert same(found, tmp_path, whole)


def test_without_replacement_fewer_go_on(whole, tmp_path, capfd):
    deaths = [("before a step", 0, 3), ("after a step", 1, 4)]
    found = disturbed(tmp_path, *deaths, most=0, least=1)
    assert died(tmp_path, *deaths)
    assert same(found, tmp_path, whole)
    assert found.world == 1
    said = capfd.readouterr().err
    assert "worker 0 of 3 ended by SIGKILL: 2 go on" in said
    assert "worker 1 of 2 ended by SIGKILL: 1 goes on" in said


def test_one_loss_too_many_ends_the_run_with_its_name(tmp_path):
    deaths = [("before a step", 0, 2), ("before a step", 1, 3)]
    with pytest.raises(WorkerFailed, match=r"^worker 1 of 2 ended by SIGKILL$"):
        disturbed(tmp_path, *deaths, workers=2, most=1)
    assert died(tmp_path, *deaths)


@pytest.mark.parametrize("error", [LookupError("the cause"), RuntimeError("the cause")])
def test_a_worker_that_raises_ends_the_run_as_ever(error, tmp_path, capfd):
    with pytest.raises(WorkerFailed, match=r"^worker 1 of 2 failed:\n[\s\S]*Error: the cause\n$"):
        disturbed(tmp_path, ("before a step", 1, 2), workers=2, how=error)
    assert "replaced" not in capfd.readouterr().err


class Stillborn:
    """Whoever is sent one ends as it unpacks it."""

    def __reduce__(self):
        return os._exit, (5,)


def test_workers_that_cannot_begin_are_not_replaced_for_ever():
    words = r"^worker \d of 2 ended with status 5 before it had begun, as did others before it$"
    with pytest.raises(WorkerFailed, match=words):
        run_local(2, dying.train_dying, Stillborn(), losses=Losses(most=1000))


def test_a_users_mistake_ends_the_run_as_ever(tmp_path):
    with pytest.raises(UserError, match=r"^no$"):
        disturbed(tmp_path, ("before a step", 1, 2), workers=2, how=UserError("no"))


def spoil(folder):
    """The run's folder cannot be written any more, as on a full disk."""
    (folder / "run" / "environment.json").unlink()
    (folder / "run" / "environment.json").mkdir()


def test_a_disk_that_fails_at_a_loss_is_no_mistake_of_the_users(tmp_path):
    with pytest.raises(RunFailed, match=r"^the run folder .* cannot be written: Is a directory"):
        disturbed(tmp_path, ("before a step", 1, 3), how=spoil)


def test_a_stopped_worker_is_ended_and_replaced(whole, tmp_path, capfd):
    death = ("before a step", 1, 3)
    found = disturbed(tmp_path, death, silent=3.0, how=signal.SIGSTOP)
    assert same(found, tmp_path, whole)
    said = capfd.readouterr().err
    assert "worker 1 of 3 is silent for " in said
    assert "worker 1 of 3 ended by SIGKILL: loss 1 of 3, replaced" in said


def test_the_number_of_workers_changes_with_the_batch(whole, tmp_path):
    death = ("before a step", 1, 2)  # of the second stage: the first worker is alone before
    found = disturbed(tmp_path, death, workers=1, by_stage=(1, 3, 2))
    assert died(tmp_path, death)
    assert same(found, tmp_path, whole)
    assert found.world == 2


TRAIN = ["train", "digits", "--deterministic", "--json", "--epochs", "2"]


@pytest.mark.systems
def test_the_command_survives_a_kill_from_outside(tmp_path):
    """At a random step, whichever worker; the seed is printed where it fails."""
    seed = random.randrange(1000)
    chance = random.Random(seed)
    run, alone = tmp_path / "run", tmp_path / "alone"
    whole = last_json(megabatch(*TRAIN, "--workers", "1", "--out", alone))
    steps = dying.steps_of(alone)
    line = [*MEGABATCH, *TRAIN, "--workers", "3", "--out", str(run)]
    with dying.held(line, run, chance.randint(1, 15), len(steps)) as (training, workers):
        os.kill(chance.choice(workers), signal.SIGKILL)
    out, said = training.communicate(timeout=PATIENCE_SECONDS)
    assert training.returncode == 0, said
    assert "ended by SIGKILL: loss 1 of 3, replaced" in said
    found = json.loads(out.splitlines()[-1])
    assert found["weights_sha256"] == whole["weights_sha256"], f"seed {seed}"
    assert dying.steps_of(run) == steps


def say(pipe, kind, value=None):
    """As a worker does."""
    pipe.send_bytes(pickle.dumps((time.monotonic(), kind, value)))


def joined(pipe):
    """The first world of a worker that holds nothing."""
    say(pipe, "ready")
    say(pipe, "join", (None, None))
    while (heard := pickle.loads(pipe.recv_bytes()))[0] != "world":
        pass
    return heard[1]


def stuck_with_the_dead(pipe):
    """In the first world one dies when they meet, and the other waits for it where nothing reaches
    it."""
    world = joined(pipe)
    if world.number == 0 and world.rank == 1:
        os._exit(1)
    while world.number == 0:
        time.sleep(0.05)
        say(pipe, "pulse")
    say(pipe, "met")
    say(pipe, "result", world.number)


def stopped_at_first(pipe, marker):
    """Stands still before it has said a word, once."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    say(pipe, "result", joined(pipe).number)


def starting(target, *arguments):
    """What starts such workers for a supervisor."""
    context = multiprocessing.get_context("forkserver")

    def start():
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments))
        with theirs:
            process.start()
        return process, ours

    return start


def test_who_waits_for_a_connection_with_the_dead_is_not_waited_for_long(monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "_MEET_SECONDS", 0.3)
    with supervisor.Supervisor(starting(stuck_with_the_dead), 2, Losses(most=3)) as watching:
        assert watching.run() == 1
    assert "worker 0 of 2 is stuck: it is ended" in capfd.readouterr().err


def test_a_worker_that_is_stopped_as_it_starts_is_not_waited_for_long(tmp_path, capfd):
    """As long as for any other that stands still; one that loads may take its time."""
    start = starting(stopped_at_first, tmp_path / "stopped")
    with supervisor.Supervisor(start, 1, Losses(most=3, silent_seconds=0.5)) as watching:
        assert watching.run() == 0
    assert re.search(r"worker 0 of 1 is silent for \d+ s: it is ended", capfd.readouterr().err)


# By which of its waits for another's address: its own is known by then, but it was not connected.
@pytest.mark.parametrize(
    "deaths",
    [
        [("as it is connected", 0, 1)],
        [("as it is connected", 2, 7)],
        pytest.param(
            [("before a step", 2, 3), ("as it is connected", 1, 7, 1)], marks=pytest.mark.systems
        ),
    ],
    ids=["as they meet", "in a later group", "in a later group of another world"],
)
def test_who_waits_for_a_connection_with_the_dead_comes_out_by_itself(
    deaths, whole, tmp_path, capfd
):
    assert same(disturbed(tmp_path, *deaths, workers=3), tmp_path, whole)
    assert died(tmp_path, *deaths)
    assert "stuck" not in capfd.readouterr().err


def test_a_store_that_heeds_losses_is_a_store(tmp_path, monkeypatch):
    """Also behind a prefix and as a clone, as torch uses it from C++."""
    whole = HeedingStore(dist.FileStore(str(tmp_path / "store"), 1))
    store = dist.PrefixStore("a", whole)
    store.set("key", "value")
    other = store.clone()
    assert other.get("key") == b"value"
    assert (other.add("count", 2), store.add("count", 3)) == (2, 5)
    assert store.compare_set("key", "value", "new") == b"new"
    assert other.compare_set("key", "value", "newer") == b"new"
    assert store.multi_get(["key", "count"]) == [b"new", b"5"]
    assert (store.check(["key"]), store.check(["key", "none"])) == (True, False)
    with pytest.raises(Exception, match="nobody wrote a/none"):
        store.wait(["none"], timedelta(seconds=0.05))
    monkeypatch.setattr(heeding, "world_is_lost", lambda: True)
    store.wait(["key"])
    with pytest.raises(Exception, match="a worker was lost"):
        store.get("none")


def test_workers_of_a_round_find_a_word_of_their_own_among_what_others_left():
    """Rounds of changing sizes in one store; some die in the middle of finding it."""
    store, used = Shared(), set()
    for world, dead in ((3, None), (3, 1), (2, None), (4, 0), (4, None)):
        with ThreadPoolExecutor(world) as pool:
            ranks = [rank for rank in range(world) if rank != dead]
            asked = [
                pool.submit(agree, store, rank, world, PATIENCE_SECONDS if dead is None else 0.5)
                for rank in ranks
            ]
            if dead is not None:
                for one in asked:
                    with pytest.raises(TimeoutError, match="did not come"):
                        one.result()
                continue
            (word,) = {one.result() for one in asked}
        assert word not in used
        used.add(word)


class Shared(dict):
    """A store among threads."""

    set = dict.__setitem__

    def get(self, key):
        return self[key].encode()

    def check(self, keys):
        return all(key in self for key in keys)


SEVERED = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()[0]
    print("end" if connection.recv(1) == b"" else "byte", flush=True)
"""


def test_only_connections_with_the_named_processes_are_shut():

    peers = [
        subprocess.Popen([sys.executable, "-c", SEVERED], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ports = [int(peer.stdout.readline()) for peer in peers]
    mine = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    sever([peers[0].pid])
    assert peers[0].communicate(timeout=PATIENCE_SECONDS)[0] == "end\n"
    assert mine[0].recv(1) == b""
    mine[1].send(b"x")
    assert peers[1].communicate(timeout=PATIENCE_SECONDS)[0] == "byte\n"
    for one in mine:
        one.close()
