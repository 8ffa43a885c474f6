"""Lifetimes: whoever starts threads, connections, process groups or hooks ends them by close()."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import dismiss, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import PATIENCE_SECONDS

from megabatch.plans import TORUS, through
from megabatch.sync.ddp import GradSync
from megabatch.sync.execute import Pipeline
from megabatch.sync.heartbeat import Heartbeat
from megabatch.sync.lanes import Closed
from megabatch.sync.meeting import Disagreement, Meeting
from megabatch.sync.senders import Lane, Planned

RING, BACKEND = through(TORUS, "ring"), through(TORUS, "backend")


def make_pipeline(cluster):
    with Pipeline(cluster) as pipeline:
        for plan in (RING, BACKEND):
            tensor = torch.full((100,), 1.0 + cluster.rank)
            pipeline.sum(plan, tensor)
            assert tensor.eq(3).all()
    pipeline.close()
    with pytest.raises(Closed, match="closed"):
        pipeline.sum(RING, tensor)


def make_heartbeat(cluster):
    with Heartbeat(cluster, Meeting(cluster, "a heartbeat").keys("heartbeat")) as heartbeat:
        pass
    heartbeat.close()


def make_planned(cluster):
    with Planned(cluster, "torus:backend", "fp32", [8]) as planned:
        total = torch.ones(8)
        planned.send(total, 0)
        planned.wait()
        assert total.eq(2).all()
    planned.close()


def make_grad_sync(cluster):
    model = DistributedDataParallel(nn.Linear(3, 3))
    for plan in ("torus", "hierarchical:backend"):  # one after another on one module
        with GradSync(cluster, plan) as sync:
            sync.attach(model)
            model(torch.ones(1, 3)).sum().backward()
            assert sync.steps == 1
        sync.close()
    model.zero_grad()
    model(torch.full((1, 3), 1.0 + cluster.rank)).sum().backward()  # DDP's own again
    assert model.module.weight.grad.eq(1.5).all()


def forget_grad_sync(cluster):
    """As a script does that tries one net after another."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    GradSync(cluster, "torus:backend").attach(model)
    model(torch.ones(1, 3)).sum().backward()
    del model
    gc.collect()


def make_lane(cluster):
    lane = Lane(cluster)
    lane.send(lambda on_phase: dist.all_reduce(torch.ones(1), group=lane.cluster.group), 0)
    lane.wait()
    lane.close()
    lane.close()


MAKERS = {
    make.__name__: make
    for make in (
        make_pipeline,
        make_heartbeat,
        make_planned,
        make_grad_sync,
        forget_grad_sync,
        make_lane,
    )
}


def belongings():
    """What a process has."""
    return {
        "Python's threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def ten_times(cluster, name):
    """What there is more of than before."""
    MAKERS[name](cluster)  # what torch itself keeps is made
    before, deadline = belongings(), time.monotonic() + PATIENCE_SECONDS / 4
    for _ in range(10):
        MAKERS[name](cluster)
    while True:
        after = belongings()
        more = [what for what in after if after[what] > before[what]]
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.05)  # a thread that was told to end is listed for a moment


@pytest.mark.parametrize("name", MAKERS)
def test_ten_of_each_leave_nothing_behind(name):
    assert run_ranks(ten_times, 2, name) == [[], []]


def lane_of_one(cluster):
    """Process groups that are left of a lane which the other worker does not make."""
    before = belongings()["process groups"]
    with pytest.raises(Disagreement, match="every worker makes the same parts"):
        if cluster.rank == 0:
            Lane(cluster)
        else:
            cluster.apart().leave()
            Meeting(cluster, "something else")
    Lane(cluster).close()  # who fails leaves a group to whoever makes or leaves one later
    return belongings()["process groups"] - before


def test_a_lane_that_cannot_be_made_leaves_nothing():
    assert run_ranks(lane_of_one, 2) == [0, 0]


def closed_too_early(cluster):
    """Rank 1 closes before a sum that rank 0 has begun; rank 0 is not left waiting at its close."""
    pipeline = Pipeline(cluster)
    if cluster.rank == 0:
        reduction = pipeline.submit(RING, torch.ones(10))
        pipeline.close()
        with pytest.raises(Closed, match="closed before this sum was there"):
            reduction.wait()
    pipeline.close()
    dist.barrier()
    # Other pipelines are none the worse for it.
    with Pipeline(cluster) as another:
        tensor = torch.ones(10)
        another.sum(RING, tensor)
        return tensor.tolist()


def test_a_pipeline_that_is_closed_too_early_ends_its_sums_and_no_others():
    assert run_ranks(closed_too_early, 2) == [[2.0] * 10] * 2
    # What rank 0 waited for is waited for by the backend still, which closes the connection in the
    # end.
    dismiss()


# Of a user: it ends while a sum of it waits for another worker.
ENDS = """
import os, sys, time
from pathlib import Path
import torch
from megabatch.cluster import Cluster
from megabatch.plans import TORUS, through
from megabatch.sync.execute import Pipeline

class Late:
    '''Deleted when no thread may go on any more but the one that ends the interpreter.'''
    def __init__(self, lanes, ending, sleep):
        self.lanes, self.ending, self.sleep = lanes, ending, sleep
    def __del__(self):
        self.ending.touch()
        while any(lane._thread.is_alive() for lane in self.lanes):
            self.sleep(0.01)

cluster, ending = Cluster.from_env(device="cpu"), Path(sys.argv[2])
pipeline, plan = Pipeline(cluster), through(TORUS, sys.argv[1])
pipeline.prepare(plan)
cluster.barrier()
if cluster.rank == 1:
    while not ending.exists():
        time.sleep(0.01)
    os._exit(0)
pipeline.submit(plan, torch.ones(10))
late = Late(pipeline._lanes, ending, time.sleep)
sys.exit(1)
"""


@pytest.mark.parametrize("wiring", ["ring", pytest.param("backend", marks=pytest.mark.systems)])
def test_a_script_that_ends_while_it_waits_for_another_worker_is_not_aborted(wiring, tmp_path):
    """A lane that comes out of gloo when the interpreter has begun to end takes the process along,
    by SIGABRT: it comes out before."""
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        environ = {name: str(value) for name, value in place.items()}
        environ |= {"MEGABATCH_STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"}
        line = [sys.executable, "-c", ENDS, wiring, str(tmp_path / "ending")]
        ranks.append(subprocess.Popen(line, env=os.environ | environ, stderr=subprocess.PIPE))
    said = [rank.communicate(timeout=PATIENCE_SECONDS)[1].decode() for rank in ranks]
    assert ([rank.returncode for rank in ranks], said) == ([1, 0], ["", ""])
