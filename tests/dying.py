"""Runs whose workers die at named moments, by a real SIGKILL; each moment comes once a run.

train_dying(config, folder, deaths) is the work of one worker. A death is (moment, rank, count) or
(moment, rank, count, world): the worker that has this rank when it comes to the moment for the
count-th time in its world (the run's so-manieth, or any) kills itself, unless somebody did before.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from waiting import gone, until

from megabatch import between_steps, training
from megabatch.batch import Stage
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, LearningRate, OptimizerConfig
from megabatch.elastic.heeding import HeedingStore
from megabatch.elastic.processes import children
from megabatch.elastic.supervisor import Losses
from megabatch.elastic.worlds import join_others
from megabatch.launch import run_local
from megabatch.runs import checkpoint
from megabatch.runs.folder import RunFolder
from megabatch.sync.own_buffers import OwnBuffers

# Two switches of the batch, uneven numbers of micro-batches, averaged weights, an evaluation in
# the middle of the run and a checkpoint before it.
CONFIG = Config(
    name="dying",
    epochs=1.5,
    batch=80,
    micro=16,
    span=8,
    stages=(Stage(0.5, 112, 0.85), Stage(1, 176)),
    ema=0.9,
    deterministic=True,
    data=Data(source="synthetic", images=1000, shift=1, val_share=0.2),
    lr=LearningRate(reference=16, warmup=0.3),
    optimizer=OptimizerConfig(weight_decay=1e-4, unadapted_rate=0.1, momentum_correction=True),
    eval_every=0.7,
    save_every=0.4,
)

HANGS = 0
"""the worker lives, but does nothing"""

# A moment -> the name that is wrapped, where it is, and whether death comes after it.
MOMENTS = {
    "as it meets the others": (Cluster, "from_env", False),
    "as it is connected": (HeedingStore, "wait", False),
    "as it opens the images": (training, "open_sources", False),
    "as it copies the state": (training, "copied", False),
    "before a step": (training, "train_step", False),
    "after a step": (training, "train_step", True),
    "as buffers are exchanged": (OwnBuffers, "_exchange", False),
    "buffers exchanged": (OwnBuffers, "_exchange", True),
    "as it evaluates": (between_steps, "score", False),
    "evaluated": (between_steps, "score", True),
    "as it saves": (RunFolder, "save", False),
    "as it writes a checkpoint": (checkpoint, "write_snapshot", False),
    "as it writes the best": (checkpoint, "write_alone", False),
    "at the last barrier": (Cluster, "barrier", False),
    "past the last barrier": (Cluster, "barrier", True),
}


def train_dying(config, folder, deaths, how=signal.SIGKILL, make=None):
    """As megabatch train's own worker, or with the module that `make` makes."""
    folder = Path(folder)
    for death in deaths:
        _arm(folder, death, how)
    _note_belongings(folder)
    cluster = join_others(device="cpu")
    try:
        net = None if make is None else make()
        return training.train(config, net, cluster=cluster, out=folder / "run", quiet=True)
    finally:
        cluster.leave()


def _arm(folder, death, how):
    moment, rank, count, *worlds = death
    where, name, after = MOMENTS[moment]
    whole, calls = getattr(where, name), {}

    def armed(*arguments, **keywords):
        world = os.environ["MEGABATCH_STORE"]
        calls[world] = calls.get(world, 0) + 1
        mine = int(os.environ["RANK"]) == rank and calls[world] == count
        mine = mine and (not worlds or Path(world).name == f"{worlds[0]}")
        result = whole(*arguments, **keywords) if after else None
        if mine and _first(folder / str(death)):
            if isinstance(how, BaseException):
                raise how
            if callable(how):
                how(folder)
            if how == HANGS:
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL if callable(how) else how)
        return result if after else whole(*arguments, **keywords)

    setattr(where, name, armed)


def _note_belongings(folder):
    """At the first step of each world: what this process has."""
    whole, worlds = training.train_step, set()

    def noting(*arguments, **keywords):
        world = os.environ["MEGABATCH_STORE"]
        if world not in worlds:
            worlds.add(world)
            counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
            with (folder / f"belongings-{os.getpid()}").open("a") as file:
                file.write(json.dumps(counts) + "\n")
        return whole(*arguments, **keywords)

    training.train_step = noting


def belongings(folder):
    """(open files, threads) at the first step of each world, for the worker that saw most."""
    notes = [path.read_text().splitlines() for path in folder.glob("belongings-*")]
    return [json.loads(line) for line in max(notes, key=len)]


def _first(marker):
    with contextlib.suppress(FileExistsError):
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        return True
    return False


def disturbed(folder, *deaths, workers=3, most=3, least=None, silent=30.0, **options):
    """The summary of a run with these deaths; the folder holds a file for each that was died."""
    losses = Losses(most, least, silent)
    config = options.pop("config", CONFIG)
    by_stage = options.pop("by_stage", ())
    call = (config, str(folder), deaths, *options.values())
    return run_local(workers, train_dying, *call, losses=losses, by_stage=by_stage)


def died(folder, *deaths):
    return all((folder / str(death)).exists() for death in deaths)


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run):
    """(step, images seen after it) of each line that a run wrote of its steps."""
    return [(one["step"], one["seen"]) for one in records(run) if one["kind"] == "train"]


def evaluations_of(run):
    return [(one["seen"], one["top1"]) for one in records(run) if one["kind"] == "evaluation"]


def undisturbed(folder, config=CONFIG, net=None):
    alone = Cluster.from_env(device="cpu")
    return training.train(replace(config), net, cluster=alone, out=folder / "run", quiet=True)


def workers_of(supervisor):
    """The processes that were forked for it, those that have ended left out."""
    return sorted(worker for server in children(supervisor) for worker in children(server))


@contextlib.contextmanager
def held(line, run, first, last, environ=None):
    """The command that trains in folder `run`, and its workers, while they stand still: from step
    `first` on, before they come to step `last`. Nothing goes on without the one that is stopped; a
    run that was faster than whoever looked is begun again."""
    assert first + 1 < last, f"no run can be held from step {first} on and before step {last}"
    while True:
        command = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        workers = workers_of(command.pid) if await_steps(run, first, command) else []
        for worker in workers[-1:]:
            os.kill(worker, signal.SIGSTOP)
        # Of what was summed already the first worker may still be writing.
        if workers and _written(run) + 1 < last:
            break
        command.kill()
        for worker in workers[-1:]:  # stopped, it does not hear that the command is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        command.communicate()
        gone(workers)  # whoever still writes there
        shutil.rmtree(run, ignore_errors=True)
    try:
        yield command, workers
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[-1], signal.SIGCONT)


def await_steps(run, count, process):
    """Until a run has written so many steps; False if it ended before."""
    until(lambda: _written(run) >= count or process.poll() is not None, f"step {count} of {run}")
    return process.poll() is None


def _written(run):
    """Steps that a run has told of, perhaps while it writes of another."""
    with contextlib.suppress(OSError):
        return (run / "metrics.jsonl").read_text().count('"kind": "train"')
    return 0
