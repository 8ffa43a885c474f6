"""The workers of a run, joined from torchrun's, Slurm's or MPI's variables, or as torch has them.

One worker needs no process group. The same training code runs under every launcher, on gloo and
NCCL; a process group that is there already is believed before any variable.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from megabatch.elastic.link import supervised
from megabatch.elastic.rounds import agree
from megabatch.errors import UserError, nearest

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
    group: Any = field(default=None, repr=False)
    """the process group of these workers, where they are only some of all"""
    joined: bool = field(default=False, compare=False, repr=False)
    """whether this made the process group, which leave() then ends"""
    timeout_seconds: float = field(default=600, compare=False, repr=False)
    """how long a sum may take before a worker that does not come is given up"""

    @classmethod
    def from_env(
        cls,
        grid: tuple[int, int] | None = None,
        device: str = "auto",
        timeout_seconds: float = 600,
        *,
        group: Any = None,
    ) -> Cluster:
        """Join the workers that torchrun, srun, mpirun or megabatch itself started; alone
        otherwise.

        Where torch.distributed is initialised already (by Lightning, Accelerate, mp.spawn) its
        workers are taken, and all of them call this. `group` is a process group of some of them, as
        for DistributedDataParallel(process_group=group); its members call this.
        """
        import torch
        import torch.distributed as dist

        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"there is no device {device!r}: {nearest(device, _BACKENDS)}")
        initialised = dist.is_available() and dist.is_initialized()
        if group is not None and not initialised:
            raise UserError(
                "a group of workers was given, but torch.distributed is not initialised"
            )
        if not initialised:
            place = place_by(os.environ)
            grid = grid_of(place, grid)
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            chosen = _gpu(place) if device == "cuda" else torch.device("cpu")
            if place.world > 1:
                _meet(place, _BACKENDS[chosen.type], timeout_seconds)
        else:
            everyone = dist.group.WORLD
            place = _place_in(everyone, os.environ, timeout_seconds)
            chosen = _device_of(everyone, device, place)
            if group is not None:
                place = _place_in(group, {}, timeout_seconds)
            grid = grid_of(place, grid)
        return cls(
            place.rank,
            place.world,
            place.local_rank,
            place.local_world,
            chosen,
            grid,
            group,
            joined=place.world > 1 and not initialised,
            timeout_seconds=timeout_seconds,
        )

    @property
    def first(self) -> bool:
        """Whether this worker speaks for all: it prints, writes metrics and saves."""
        return self.rank == 0

    def process_group(self) -> Any:
        """The process group of these workers; there is none where a worker is alone."""
        import torch.distributed as dist

        return self.group or dist.group.WORLD

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.world > 1:
            dist.barrier(group=self.group)

    def agree(self, decide: Callable[[], T]) -> T:
        """What the first worker decides, on every worker; its UserError is raised on all of
        them."""
        if self.world == 1:
            return decide()
        import torch.distributed as dist

        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer = [decide(), None]
            except UserError as error:
                answer = [None, str(error)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        decision, mistake = answer
        if mistake is not None:
            raise UserError(mistake)
        result: T = decision
        return result

    def gather(self, mine: T) -> list[T]:
        """What each worker has, by rank, on every worker."""
        if self.world == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def apart(self) -> Cluster:
        """The same workers in a process group of its own, whose messages mix with no others; all of
        them call this, in the same order. Whoever asked for it calls leave()."""
        import torch.distributed as dist

        if self.group is not None:
            raise UserError(
                "the backend's own sums want all workers, and this cluster is a group of some: "
                "name a plan"
            )
        _end_left()
        own = dist.new_group(timeout=timedelta(seconds=self.timeout_seconds))
        return replace(self, group=own, joined=True)

    def leave(self) -> None:
        """End the process group, if this is who made it; while an error is on its way out, leave
        that to who makes or leaves one later, or to the process's end.

        The others fail of closed connections. Closed too early, they would be heard before the
        worker whose error it was.
        """
        failing = sys.exc_info()[0] is not None
        if self.joined and self.group is not None:
            _left.append(self.group)
        if self.joined and not failing:
            _end_left()
            if self.group is None:
                _end(None)


_left: list[Any] = []
"""process groups apart that nobody uses any more"""


def _end_left() -> None:
    while _left:
        _end(_left.pop())


def _end(group: Any) -> None:
    import torch.distributed as dist

    # Who has ended all process groups has ended this one.
    if dist.is_initialized():
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(group)


# --- who a worker is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A worker's number among all workers and among those of its host."""

    rank: int
    world: int
    local_rank: int
    local_world: int


# How each launcher says rank, world and, where it does, local rank and local world. The first row
# that is there whole counts, so what runs innermost comes first: in a Slurm job mpirun and mpiexec
# start a daemon on each node by srun, and the workers inherit the daemons' variables beside their
# own. (A batch script has SLURM_PROCID too, but it is no step: nothing has been started yet.)
LAUNCHERS = (
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


def launcher_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the variables by which a worker is known here; empty if there is none."""
    return next((row for row in LAUNCHERS if all(name in environ for name in row)), ())


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several workers, or says that it is
    alone."""
    return bool(launcher_of(environ))


def place_by(environ: Mapping[str, str]) -> Place:
    """Who a worker is by its launcher's variables."""
    names = launcher_of(environ)
    if not names:
        return Place(0, 1, 0, 1)
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
    return Place(rank, world, local_rank, local_world)


def grid_of(place: Place, asked: tuple[int, int] | None) -> tuple[int, int]:
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


def _place_in(group: Any, environ: Mapping[str, str], seconds: float) -> Place:
    """Who a worker is in a process group; its host's workers by the variables, if all workers have
    them as this group has, else by what each worker says its host is."""
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UserError("this worker is not in the group: only members make a cluster of it")
    names = launcher_of(environ)
    by_name = place_by(environ) if names else Place(rank, world, rank, world)
    fits = len(names) == 4 and (by_name.rank, by_name.world) == (rank, world)
    # Slurm's and MPI's variables may be those of a job inside which these workers were started, and
    # Accelerate's debug_launcher has each of its workers believe that RANK is 0. But workers that
    # were told of another number of workers would train apart from each other.
    if by_name.world != world and names[0] == "RANK":
        raise UserError(
            f"torch.distributed has this process as worker {rank} of {world}, but WORLD_SIZE is "
            f"{by_name.world} (and RANK {by_name.rank}): unset them, or initialise it by them"
        )
    if world == 1:
        return Place(0, 1, 0, 1)
    host, store = socket.gethostname(), _within("megabatch hosts", group.get_group_store())
    if not store.check([f"{rank}"]):  # it may be asked again
        store.set(f"{rank}", host)
        store.add("fitting", int(fits))
        if store.add("arrived", 1) == world:
            store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=seconds))
    except Exception:
        absent = next((one for one in range(world) if not store.check([f"{one}"])), None)
        raise UserError(
            f"worker {rank} of {world} asks for the cluster, but worker {absent} did not in "
            f"{seconds:g} s: every worker calls Cluster.from_env"
        ) from None
    if store.add("fitting", 0) == world:
        return by_name
    hosts = [found.decode() for found in store.multi_get([f"{one}" for one in range(world)])]
    return Place(rank, world, hosts[:rank].count(host), hosts.count(host))


def _within(name: str, store: Any) -> Any:
    """A part of a store for keys of our own."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


# --- its device --------------------------------------------------------------------------------

# What sums are made over: gloo among CPUs, NCCL among GPUs.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def _gpu(place: Place) -> torch.device:
    """This worker's own GPU, made the present one."""
    import torch

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
    return torch.device("cuda", torch.cuda.current_device())


def _device_of(group: Any, asked: str, place: Place) -> torch.device:
    """A device that the process group can sum on; a GPU that was chosen for it is kept."""
    import torch
    import torch.distributed as dist

    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if asked == "auto":
        nccl = torch.cuda.is_available() and backends.get("cuda") == "nccl"
        asked = "cuda" if nccl else "cpu"
    if backends.get(asked) != _BACKENDS[asked]:
        raise UserError(
            f"device {asked} is summed on by {_BACKENDS[asked]}, but torch.distributed was "
            f"initialised with {dist.get_backend(group)}: initialise it with {_BACKENDS[asked]}, "
            f"or with cpu:gloo,cuda:nccl"
        )
    if asked == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device cuda was asked for but torch sees no GPU: use --device cpu")
    bound = group.bound_device_id
    if bound is None and torch.cuda.current_device() == 0:
        bound = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    if bound is not None:
        torch.cuda.set_device(bound)
    return torch.device("cuda", torch.cuda.current_device())


# --- where workers meet ------------------------------------------------------------------------


def _meet(place: Place, backend: str, timeout_seconds: float) -> None:
    """Make the process group, through the file MEGABATCH_STORE or at MASTER_ADDR."""
    import torch.distributed as dist

    me = f"this is worker {place.rank} of {place.world}"
    store = None
    if path := os.environ.get("MEGABATCH_STORE"):
        store = _shared_file(path, place, me)
        if backend == "gloo" and supervised() is not None:
            store = _heeding(store)
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
        if store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _agents_store(place, timedelta(seconds=timeout_seconds))
        elif store is None and os.environ["MASTER_ADDR"] in _LOOPBACK:
            store = _loopback_store(place, timedelta(seconds=timeout_seconds))
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (dist.DistNetworkError, TimeoutError) as error:
        address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
        raise UserError(
            f"{me} but they cannot meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _agents_store(place: Place, timeout: timedelta) -> Any:
    """The store that torchrun holds, a part of it for the workers of this round."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    whole = dist.TCPStore(address, port, place.world, False, timeout)  # type: ignore[attr-defined]
    rounds = _within("megabatch rounds", whole)
    return _within(agree(rounds, place.rank, place.world, timeout.total_seconds()), whole)


_LOOPBACK = ("127.0.0.1", "localhost")


def _loopback_store(place: Place, timeout: timedelta) -> Any:
    """The store of workers that meet on one machine: it listens on the loopback, where torch's own
    would on all interfaces."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    first = place.rank == 0
    how: dict[str, Any] = {}
    if first:
        try:
            how = {"master_listen_fd": socket.create_server((address, port)).detach()}
        except OSError:  # an earlier store of this process has it, which torch shares, or it tells
            how = {"multi_tenant": True}
    return dist.TCPStore(address, port, place.world, first, timeout, **how)  # type: ignore[attr-defined]


_held: list[Any] = []


def _heeding(store: Any) -> Any:
    """The store, which nobody waits in for a lost worker; kept until the next."""
    from megabatch.elastic.heeding import HeedingStore

    _held[:] = [HeedingStore(store)]
    return _held[0]


# What a worker writes into the shared file: the same when a process joins twice, never another's.
_MARK = uuid.uuid4().hex


def _shared_file(path: str, place: Place, me: str) -> Any:
    """The store in a file. One that an earlier run left behind holds addresses of workers that are
    gone: it is refused, for dialling them fails only when the time is up."""
    import torch.distributed as dist

    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"MEGABATCH_STORE is {path}, but {me} and sees no such folder")
    try:
        store = dist.FileStore(path, place.world)  # type: ignore[attr-defined]
        known = store.compare_set(f"megabatch {place.rank}", "", _MARK)
    except RuntimeError as error:
        raise UserError(
            f"{me} but they cannot meet by {path}: {str(error).splitlines()[0]}: make room there, "
            f"or name another place for temporary files with TMPDIR"
        ) from None
    if known != _MARK.encode():
        raise UserError(
            f"{me} but {path} knows another: it is left from an earlier run; set MEGABATCH_STORE "
            f"to a file that does not exist yet"
        )
    return store
