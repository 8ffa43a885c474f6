"""The workers of a run, joined from torchrun's, Slurm's or MPI's variables.

One worker needs no process group. The same training code runs under every launcher, on gloo and
NCCL.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from megabatch.errors import UserError

if TYPE_CHECKING:
    import torch

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

    def gather(self, mine: T) -> list[T]:
        """What each worker has, by rank, on every worker."""
        if self.world == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

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
