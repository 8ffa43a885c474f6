"""The workers of a run: joined from torchrun's, Slurm's or MPI's variables, or started on this
machine.

One worker needs no process group. The same training code runs under every launcher, on gloo and
NCCL.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

from megabatch.config import UserError

if TYPE_CHECKING:
    import torch

# Imported once in the server that workers are forked from: four workers start in under a second.
# Imports only; neither CUDA nor OpenMP survives a fork, so no tensor is touched there.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.optim", "megabatch.train"]


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
        if grid is None:
            rows = place.world // place.local_world
            whole = rows * place.local_world == place.world
            grid = (rows, place.local_world) if whole else (1, place.world)
        elif grid[0] * grid[1] != place.world:
            raise UserError(
                f"a grid of {grid[0]} x {grid[1]} holds {grid[0] * grid[1]} workers but there are "
                f"{place.world}: give a grid whose product is {place.world}"
            )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            if not torch.cuda.is_available():
                raise UserError("device cuda was asked for but torch sees no GPU: use --device cpu")
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
            chosen = torch.device("cuda", torch.cuda.current_device())
        else:
            chosen = torch.device("cpu")
        if place.world > 1 and not dist.is_initialized():
            store = os.environ.get("MEGABATCH_STORE")
            if store is None:
                os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world))
                os.environ.setdefault("MASTER_PORT", "29500")
                if "MASTER_ADDR" not in os.environ:
                    raise UserError(
                        f"this is worker {place.rank} of {place.world} but nothing says where "
                        f"they meet: set MASTER_ADDR to the first host, or MEGABATCH_STORE to a "
                        f"file all can reach"
                    )
            dist.init_process_group(
                "nccl" if chosen.type == "cuda" else "gloo",
                store=dist.FileStore(store, place.world) if store else None,
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=timeout_seconds),
            )
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
        import torch.distributed as dist

        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Place:
    rank: int
    world: int
    local_rank: int
    local_world: int


# How each launcher says rank, world, local rank and local world. The last two may be missing.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several workers, or says that it is
    alone."""
    return any(rank in environ and world in environ for rank, world, *_ in _LAUNCHERS.values())


def _place(environ: Mapping[str, str]) -> _Place:
    for rank, world, local_rank, local_world in _LAUNCHERS.values():
        if rank in environ and world in environ:
            here = int(environ.get(local_rank, environ[rank]))
            # Slurm writes tasks per node as "4(x2),3": the first figure is what a row holds.
            local = environ.get(local_world, environ[world]).split("(")[0].split(",")[0]
            return _Place(int(environ[rank]), int(environ[world]), here, int(local))
    return _Place(0, 1, 0, 1)


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
    with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:
        store = os.path.join(folder, "store")
        processes, pipes = [], []
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(rank, workers, store, theirs, function, arguments),
                name=f"worker {rank}",
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        with _pass_on_signals([process.pid for process in processes]):
            try:
                return _results(processes, pipes)[0]
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()


def _results(processes: list[Any], pipes: list[Connection]) -> list[Any]:
    """Wait for every worker's result, or raise the first failure."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in results}
        for pipe in wait(list(waiting)):
            rank = waiting[pipe]  # type: ignore[index]
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                raise WorkerFailed(f"worker {rank} of {len(processes)} ended {how}") from None
            if kind == "mistake":
                raise UserError(value)
            if kind == "failure":
                raise WorkerFailed(f"worker {rank} of {len(processes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _work(
    rank: int,
    workers: int,
    store: str,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(workers),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(workers),
        MEGABATCH_STORE=store,
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        pipe.send(("result", function(*arguments)))
    except UserError as error:
        pipe.send(("mistake", str(error)))
    except BaseException:
        pipe.send(("failure", traceback.format_exc()))
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _pass_on_signals(pids: list[int | None]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)  # type: ignore[arg-type]

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
