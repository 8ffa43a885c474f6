"""The workers of a run: joined from torchrun's, Slurm's or MPI's variables, or started on this
machine.

One worker needs no process group. The same training code runs under every launcher, on gloo and
NCCL.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

from megabatch.config import RunFailed, UserError

if TYPE_CHECKING:
    import torch

# Imported once in the server that workers are forked from: four workers start in under a second.
# Imports only; neither CUDA nor OpenMP survives a fork, so no tensor is touched there.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.optim", "megabatch.training"]


T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """Who this worker is among how many. The grid (y rows of x workers) is logical: it need not be
    the machine's nodes."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    grid: tuple[int, int]

    @classmethod
    def from_env(
        cls, grid: tuple[int, int] | None = None, device: str = "auto", timeout_seconds: float = 600
    ) -> Cluster:
        """Join the workers that torchrun, srun, mpirun or megabatch itself started; alone
        otherwise."""
        import torch
        import torch.distributed as dist

        place = _place(os.environ)
        grid = _grid(place, grid)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            if not torch.cuda.is_available():
                raise UserError("device cuda was asked for but torch sees no GPU: use --device cpu")
            gpus = torch.cuda.device_count()
            # NCCL takes two workers on one GPU only if it believes them to be on two hosts.
            if place.local_world > gpus and "NCCL_HOSTID" not in os.environ:
                raise UserError(
                    f"{place.local_world} workers want a GPU each but this host has {gpus}: "
                    f"start {gpus} (--workers {gpus}), or use --device cpu"
                )
            torch.cuda.set_device(place.local_rank % gpus)
            chosen = torch.device("cuda", torch.cuda.current_device())
        else:
            chosen = torch.device("cpu")
        if place.world > 1 and not dist.is_initialized():
            _meet(place, "nccl" if chosen.type == "cuda" else "gloo", timeout_seconds)
        return cls(place.rank, place.world, place.local_rank, place.local_world, chosen, grid)

    @property
    def first(self) -> bool:
        """Whether this worker speaks for all: it prints, writes metrics and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.world > 1:
            dist.barrier()

    def agree(self, decide: Callable[[], T]) -> T:
        """What the first worker decides, on every worker; its UserError is raised on all of
        them."""
        if self.world == 1:
            return decide()
        import torch.distributed as dist

        said: list[Any] = [None, None]
        if self.first:
            try:
                said = [decide(), None]
            except UserError as error:
                said = [None, str(error)]
        dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise UserError(said[1])
        decision: T = said[0]
        return decision

    def leave(self) -> None:
        """End the process group; while an error is on its way out, leave that to the process's end.

        The others fail of closed connections. Closed too early, they would be heard before the
        worker whose error it was.
        """
        import torch.distributed as dist

        failing = sys.exc_info()[0] is not None
        if self.world > 1 and dist.is_initialized() and not failing:
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Place:
    rank: int
    world: int
    local_rank: int
    local_world: int


# How each launcher says rank, world and, where it does, local rank and local world. The first row
# that is there whole counts, so what runs innermost comes first: in a Slurm job mpirun and mpiexec
# start a daemon on each node by srun, and the workers inherit the daemons' variables beside their
# own. (A batch script has SLURM_PROCID too, but it is no step: nothing has been started yet.)
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun; local workers, below
    ("RANK", "WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH's and Intel's Hydra
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def _launcher(environ: Mapping[str, str]) -> tuple[str, ...]:
    return next((row for row in _LAUNCHERS if all(name in environ for name in row)), ())


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several workers, or says that it is
    alone."""
    return bool(_launcher(environ))


def _place(environ: Mapping[str, str]) -> _Place:
    names = _launcher(environ)
    if not names:
        return _Place(0, 1, 0, 1)
    figures = []
    for name in names:
        # Slurm writes tasks per node as "4(x2),3": the first figure is what a row holds.
        figure = re.match(r"\d+(?=\(x\d+\)|,|$)", environ[name])
        if figure is None:
            raise UserError(f"{name} is {environ[name]!r}, not a number")
        figures.append(int(figure[0]))
    rank, world = figures[:2]
    if rank >= world:
        raise UserError(f"{names[0]} is {rank} but {names[1]} is {world}: ranks count from 0")
    local_rank, local_world = figures[2:] or (rank, world)
    return _Place(rank, world, local_rank, local_world)


def _grid(place: _Place, asked: tuple[int, int] | None) -> tuple[int, int]:
    """The grid asked for, if it holds the workers; else a row a node, or one row."""
    if asked is None:
        rows, left = divmod(place.world, place.local_world)
        return (1, place.world) if left else (rows, place.local_world)
    y, x = asked
    if min(asked) < 1 or y * x != place.world:
        raise UserError(
            f"a grid of {y} x {x} does not hold the {place.world} workers there are: give a grid "
            f"whose product is {place.world}"
        )
    return asked


# --- where workers meet ------------------------------------------------------------------------


def _meet(place: _Place, backend: str, timeout_seconds: float) -> None:
    """Make the process group, through the file MEGABATCH_STORE or at MASTER_ADDR."""
    import torch.distributed as dist

    me = f"this is worker {place.rank} of {place.world}"
    store = None
    if path := os.environ.get("MEGABATCH_STORE"):
        store = _shared_file(path, place, me)
    elif "MASTER_ADDR" in os.environ:
        # Two Slurm jobs may share their first host.
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", 9500)) % 10000
        os.environ.setdefault("MASTER_PORT", str(port))
    else:
        raise UserError(
            f"{me} but nothing says where they meet: set MASTER_ADDR to the first host, or "
            f"MEGABATCH_STORE to a file all can reach"
        )
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except dist.DistNetworkError as error:
        address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
        raise UserError(
            f"{me} but they cannot meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}: "
            f"{str(error).splitlines()[0]}"
        ) from None


# What a worker writes into the shared file: the same when a process joins twice, never another's.
_MARK = uuid.uuid4().hex


def _shared_file(path: str, place: _Place, me: str) -> Any:
    """The store in a file. One that an earlier run left behind holds addresses of workers that are
    gone: it is refused, for dialling them fails only when the time is up."""
    import torch.distributed as dist

    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"MEGABATCH_STORE is {path}, but {me} and sees no such folder")
    store = dist.FileStore(path, place.world)  # type: ignore[attr-defined]
    if store.compare_set(f"megabatch {place.rank}", "", _MARK) != _MARK.encode():
        raise UserError(
            f"{me} but {path} knows another: it is left from an earlier run; set MEGABATCH_STORE "
            f"to a file that does not exist yet"
        )
    return store


# --- local workers -----------------------------------------------------------------------------


class WorkerFailed(RuntimeError):
    """A local worker failed; the message names it and holds its own words."""


def run_local(workers: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) in `workers` processes on this machine that can join by from_env.

    Returns what worker 0 returned. SIGTERM and SIGINT are passed on to the workers. When one fails
    the others are ended and its error is raised here: a UserError as such, anything else as
    WorkerFailed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[Any] = []
    pipes: list[Connection] = []
    with (
        tempfile.TemporaryDirectory(prefix="megabatch-") as folder,
        _pass_on_signals(processes),
        contextlib.ExitStack() as ending,
    ):
        ending.callback(_end, processes)
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            start = _Start(rank, workers, os.path.join(folder, "store"), os.getcwd())
            process = context.Process(target=_work, args=(start, theirs, function, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results = _results(processes, pipes)
        # They have only to leave: time to write what they still hold.
        for process in processes:
            process.join(timeout=5)
        return results[0]


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _results(processes: list[Any], pipes: list[Connection]) -> list[Any]:
    """Wait for every worker's result, or raise the failure that was first."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in results}
        said = [(*_said(pipe), waiting[pipe]) for pipe in wait(list(waiting))]  # type: ignore[index, arg-type]
        # When one fails the others fail of it. Of what is known now the earliest is the cause; one
        # that was killed could not say when, but it went before those it made fail.
        for _, kind, value, rank in sorted(said, key=lambda one: one[0]):
            who = f"worker {rank} of {len(processes)}"
            if kind == "end":
                processes[rank].join()
                code = processes[rank].exitcode
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                raise WorkerFailed(f"{who} ended {how}")
            if kind == "explained":
                raise RunFailed(value)
            if kind == "mistake":
                raise UserError(value)
            if kind == "failure":
                raise WorkerFailed(f"{who} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _said(pipe: Connection) -> tuple[float, str, Any]:
    try:
        when, kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return 0.0, "end", None
    return when, kind, value


@dataclass(frozen=True)
class _Start:
    rank: int
    workers: int
    store: str
    folder: str


def _work(
    start: _Start, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A forked worker begins where its server was started, perhaps long ago and elsewhere.
    os.chdir(start.folder)
    os.environ.update(
        RANK=str(start.rank),
        WORLD_SIZE=str(start.workers),
        LOCAL_RANK=str(start.rank),
        LOCAL_WORLD_SIZE=str(start.workers),
        MEGABATCH_STORE=start.store,
        GLOO_SOCKET_IFNAME="lo",
    )

    def say(kind: str, value: Any) -> None:
        # Plain pickle: multiprocessing's own would pass tensors as handles that end with this
        # process.
        pipe.send_bytes(pickle.dumps((time.monotonic(), kind, value)))

    try:
        say("result", function(*arguments))
    except UserError as error:
        say("mistake", str(error))
    except RunFailed as error:
        say("explained", str(error))
    except BaseException:
        say("failure", traceback.format_exc())
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _pass_on_signals(processes: list[Any]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
