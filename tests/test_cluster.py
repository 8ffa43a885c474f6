"""Who a worker is by each launcher's variables, where it meets the others, and torchrun itself."""

import json
import os
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import megabatch
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_ports
from waiting import PATIENCE_SECONDS

from megabatch.cluster import Cluster
from megabatch.errors import UserError, WorkerFailed
from megabatch.launch import run_local
from megabatch.workers.place import LAUNCHERS, grid_of, place_by, under_launcher

BIN = Path(sys.executable).parent


# ---------------------------------------------------------------- who a worker is


def torchrun(rank, world, local_rank, local_world):
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{world}",
        "LOCAL_RANK": f"{local_rank}",
        "LOCAL_WORLD_SIZE": f"{local_world}",
    }


def srun(rank, world, local_rank, tasks_per_node):
    return {
        "SLURM_PROCID": f"{rank}",
        "SLURM_NTASKS": f"{world}",
        "SLURM_STEP_NUM_TASKS": f"{world}",
        "SLURM_LOCALID": f"{local_rank}",
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
    }


def open_mpi(rank, world, local_rank, local_world):
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{world}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{local_rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{local_world}",
    }


def hydra(rank, world, local_rank, local_world):
    return {
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{world}",
        "MPI_LOCALRANKID": f"{local_rank}",
        "MPI_LOCALNRANKS": f"{local_world}",
    }


# A batch script is told of a first task, but no step has been started.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

PLACES = {
    "torchrun": (torchrun(5, 8, 1, 4), (5, 8, 1, 4)),
    "torchrun, one worker": (torchrun(0, 1, 0, 1), (0, 1, 0, 1)),
    "rank and world by hand": ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2)),
    "srun": (srun(3, 4, 1, "2(x2)"), (3, 4, 1, 2)),
    "srun, one node": (srun(3, 4, 3, "4"), (3, 4, 3, 4)),
    "srun, uneven nodes": (srun(9, 11, 1, "4(x2),3"), (9, 11, 1, 4)),
    "srun --mpi=pmi2": (
        srun(3, 4, 1, "2(x2)") | {"PMI_RANK": "3", "PMI_SIZE": "4"},
        (3, 4, 1, 2),
    ),
    "Open MPI": (open_mpi(2, 6, 2, 3), (2, 6, 2, 3)),
    "MPICH": (hydra(2, 6, 2, 3), (2, 6, 2, 3)),
    "MPICH, old": ({"PMI_RANK": "2", "PMI_SIZE": "6"}, (2, 6, 2, 6)),
    # Their daemons are tasks of a step, one a node, and hand on what srun told them.
    "mpirun in a Slurm job": (srun(1, 2, 0, "1(x2)") | open_mpi(3, 4, 0, 1), (3, 4, 0, 1)),
    "mpiexec in a Slurm job": (srun(0, 2, 0, "1(x2)") | hydra(2, 4, 2, 3), (2, 4, 2, 3)),
    "torchrun in a Slurm step": (srun(1, 2, 0, "1(x2)") | torchrun(5, 8, 1, 4), (5, 8, 1, 4)),
}


@pytest.mark.parametrize(("environ", "place"), PLACES.values(), ids=PLACES.keys())
def test_each_launcher_says_who_a_worker_is(environ, place):
    found = place_by(environ)
    assert (found.rank, found.world, found.local_rank, found.local_world) == place
    assert under_launcher(environ)


@pytest.mark.parametrize("environ", [{}, BATCH_SCRIPT, {"RANK": "3"}], ids=["", "batch", "rank"])
def test_without_a_launcher_a_process_is_alone(environ):
    found = place_by(environ)
    assert (found.rank, found.world, found.local_rank, found.local_world) == (0, 1, 0, 1)
    assert not under_launcher(environ)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_slurms_count_of_tasks_by_node(tasks):
    runs = [(count, len(list(run))) for count, run in groupby(tasks)]
    written = ",".join(f"{count}(x{n})" if n > 1 else f"{count}" for count, n in runs)
    place = place_by(srun(0, sum(tasks), 0, written))
    assert place.local_world == tasks[0]
    y, x = grid_of(place, None)
    assert y * x == sum(tasks)
    if len(set(tasks)) == 1:
        assert (y, x) == (len(tasks), tasks[0])


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (torchrun("one", 2, 0, 2), "RANK is 'one', not a number"),
        (srun(0, 2, 0, "2(x"), r"SLURM_STEP_TASKS_PER_NODE is '2\(x', not a number"),
        (open_mpi(-1, 2, 0, 2), "OMPI_COMM_WORLD_RANK is '-1', not a number"),
        (hydra(2, 2, 0, 2), "PMI_RANK is 2 but PMI_SIZE is 2: ranks count from 0"),
    ],
)
def test_variables_that_make_no_sense_are_named(environ, sentence):
    with pytest.raises(UserError, match=sentence):
        place_by(environ)


@pytest.mark.parametrize("grid", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_a_grid_that_holds_the_workers_is_taken(grid):
    assert grid_of(place_by(torchrun(0, 6, 0, 6)), grid) == grid


@pytest.mark.parametrize("grid", [(1, 5), (2, 4), (6, 0), (-2, -3)])
def test_a_grid_that_does_not_hold_the_workers_is_refused(grid, monkeypatch):
    for name, value in torchrun(0, 6, 0, 6).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"not hold the 6 workers there are.* product is 6"):
        Cluster.from_env(grid=grid)


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="torch sees no GPU: use --device cpu"):
        Cluster.from_env(device="cuda")


# ---------------------------------------------------------------- where workers meet


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment of a worker whose launcher says nothing of where they meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "MEGABATCH_STORE", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in open_mpi(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_nowhere_to_meet(second_of_two):
    with pytest.raises(UserError, match="worker 1 of 2 but nothing says where they meet"):
        Cluster.from_env(device="cpu")


def test_a_file_in_a_folder_this_worker_does_not_see(second_of_two, tmp_path):
    second_of_two.setenv("MEGABATCH_STORE", str(tmp_path / "absent" / "store"))
    with pytest.raises(UserError, match="worker 1 of 2 and sees no such folder"):
        Cluster.from_env(device="cpu")


def test_a_file_that_cannot_be_written(second_of_two):
    second_of_two.setenv("MEGABATCH_STORE", "/dev/full")
    with pytest.raises(UserError, match="cannot meet by /dev/full: No space left on device: make"):
        Cluster.from_env(device="cpu")


def test_a_file_left_from_an_earlier_run_is_refused_at_once(second_of_two, tmp_path):
    path = tmp_path / "store"
    second_of_two.setenv("MEGABATCH_STORE", str(path))
    with pytest.raises(WorkerFailed, match="ended with status 9"):
        run_local(2, join_through_and_die, str(path))
    assert path.exists()
    with pytest.raises(UserError, match=r"worker 1 of 2 but .* is left from an earlier run"):
        Cluster.from_env(device="cpu")


def join_through_and_die(path):
    os.environ["MEGABATCH_STORE"] = path
    Cluster.from_env(device="cpu").barrier()
    os._exit(9)


def test_a_port_that_is_taken_is_named(second_of_two):
    second_of_two.setenv("OMPI_COMM_WORLD_RANK", "0")
    second_of_two.setenv("MASTER_ADDR", "127.0.0.1")
    with listener(range(20000, 30000)) as taken:
        port = taken.getsockname()[1]
        # The last four digits of a Slurm job's number choose the port where nothing else does.
        second_of_two.setenv("SLURM_JOB_ID", f"77{port - 20000:04}")
        with pytest.raises(UserError, match=rf"MASTER_PORT {port}: .*address already in use"):
            Cluster.from_env(device="cpu")


def listener(ports):
    """A socket that listens on one of these ports."""
    for port in ports:
        try:
            return socket.create_server(("0.0.0.0", port))
        except OSError:
            continue
    raise AssertionError("all ports are taken already")


def test_joining_leaves_the_launchers_variables_as_they_were():
    assert run_local(2, join_twice, free_ports(1)[0]) is True


def join_twice(port):
    """Whether a second call of from_env finds what the first did, on two nodes of one worker."""
    rank = int(os.environ["RANK"])
    for name in [*torchrun(0, 0, 0, 0), "MEGABATCH_STORE"]:
        del os.environ[name]
    os.environ.update(open_mpi(rank, 2, 0, 1), MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    once, again = Cluster.from_env(device="cpu"), Cluster.from_env(device="cpu")
    try:
        return once == again and (once.local_rank, once.grid) == (0, (2, 1))
    finally:
        once.leave()


# ---------------------------------------------------------------- torch.distributed was first


def found_in_a_group(environ, timeout_seconds=60):
    """Each worker's cluster or sentence where torch was initialised without any variable, which
    are then set to `environ`, a dict by rank."""
    rank, store = int(os.environ["RANK"]), dist.FileStore(os.environ["MEGABATCH_STORE"], 2)
    # Local workers inherit what their server was started under, another test's variables too.
    for name in ["MEGABATCH_STORE", *(name for row in LAUNCHERS for name in row)]:
        os.environ.pop(name, None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    os.environ.update(environ.get(rank, {}))
    if environ.get(rank) == ABSENT:
        found = "absent"
    else:
        try:
            cluster = Cluster.from_env(timeout_seconds=timeout_seconds)
            again = Cluster.from_env(timeout_seconds=timeout_seconds)
            assert cluster == again
            cluster.leave()  # whoever made the group ends it, not we
            assert dist.is_initialized()
            where = (cluster.rank, cluster.world, cluster.local_rank, cluster.local_world)
            found = (*where, cluster.grid, cluster.device.type)
        except UserError as error:
            found = str(error)
    both = [None, None]
    dist.all_gather_object(both, found)
    dist.destroy_process_group()
    return both


ABSENT = {"NOT_HERE": "1"}
ONE_HOST = [(0, 2, 0, 2, (1, 2), "cpu"), (1, 2, 1, 2, (1, 2), "cpu")]
TWO_HOSTS = [(0, 2, 0, 1, (2, 1), "cpu"), (1, 2, 0, 1, (2, 1), "cpu")]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ONE_HOST),  # mp.spawn
        ({0: torchrun(0, 2, 0, 1), 1: torchrun(1, 2, 0, 1)}, TWO_HOSTS),
        # Variables of only one of them, or of another worker's, tell nothing.
        ({0: torchrun(0, 2, 0, 1)}, ONE_HOST),
        ({0: torchrun(0, 2, 0, 1), 1: torchrun(0, 2, 0, 1)}, ONE_HOST),
        ({0: {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}}, ONE_HOST),  # Lightning's
        # A job of one task inside which somebody started two workers.
        ({rank: srun(0, 1, 0, "1") for rank in range(2)}, ONE_HOST),
    ],
)
def test_a_process_group_that_is_there_says_who_a_worker_is(environ, found):
    assert run_local(2, found_in_a_group, environ) == found


def test_variables_of_another_number_of_workers_are_refused():
    sentences = run_local(2, found_in_a_group, {0: torchrun(0, 4, 0, 4), 1: torchrun(3, 4, 3, 4)})
    assert sentences == [
        f"torch.distributed has this process as worker {rank} of 2, but WORLD_SIZE is 4 (and RANK "
        f"{3 * rank}): unset them, or initialise it by them"
        for rank in range(2)
    ]


def test_a_worker_that_never_asks_is_named():
    sentence, _ = run_local(2, found_in_a_group, {1: ABSENT}, 0.5)
    assert "worker 0 of 2 asks for the cluster, but worker 1 did not in 0.5 s" in sentence


@pytest.mark.parametrize(
    ("backend", "device", "sentence"),
    [
        ("gloo", "cuda", "device cuda is summed on by nccl, but torch.distributed was initialised"),
        ("gloo", "mps", "there is no device 'mps': "),
        ("fake", "auto", "device cpu is summed on by gloo, .* with fake: initialise it with gloo"),
    ],
)
def test_a_backend_that_does_not_fit_the_device(backend, device, sentence):
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore as Store
    else:
        from torch.distributed import HashStore as Store
    dist.init_process_group(backend, store=Store(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=sentence):
            Cluster.from_env(device=device)
    finally:
        dist.destroy_process_group()


def test_a_group_needs_torch_to_be_initialised():
    with pytest.raises(UserError, match=r"but torch.distributed is not initialised"):
        Cluster.from_env(group=object())


# ---------------------------------------------------------------- torchrun itself

TRAIN = ["train", "digits", "--epochs", "0.3", "--deterministic", "--device", "cpu", "--json"]


def test_under_torchrun_the_same_line_gives_the_same_weights(tmp_path):
    workers = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "megabatch.cli"]
    environ = {name: value for name, value in os.environ.items() if name not in torchrun(*"0000")}
    together = subprocess.run(
        [*workers, *TRAIN, "--out", tmp_path / "two"],
        capture_output=True,
        text=True,
        env={**environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=PATIENCE_SECONDS,
    )
    alone = megabatch(*TRAIN, "--workers", "1", "--out", tmp_path / "one")
    assert (alone.returncode, together.returncode) == (0, 0), together.stderr
    # On standard output over all ranks: one sentence and the summary.
    one, two = (json.loads(run.stdout.split("\n", 1)[1]) for run in (alone, together))
    assert (one["world"], two["world"]) == (1, 2)
    assert one["weights_sha256"] == two["weights_sha256"]
