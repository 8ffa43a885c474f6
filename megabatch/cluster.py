"""The workers of a run, joined from torchrun's, Slurm's or MPI's variables, or as torch has them.

One worker needs no process group. The same training code runs under every launcher, on gloo and
NCCL; a process group that is there already is believed before any variable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from megabatch.elastic.connecting import connecting
from megabatch.errors import UserError, nearest
from megabatch.workers.place import Place, grid_of, launcher_of, place_by
from megabatch.workers.rendezvous import meet, within

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
                meet(place, _BACKENDS[chosen.type], timeout_seconds)
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

    @classmethod
    def given(cls, cluster: Any) -> Cluster:
        """A caller's cluster, or where it is None the one that the environment tells of."""
        if cluster is not None and not isinstance(cluster, Cluster):
            raise UserError(
                f"cluster is {cluster!r:.80}, not a Cluster: give what Cluster.from_env() made, or "
                f"leave it away"
            )
        return cls.from_env() if cluster is None else cluster

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
        with connecting():
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


# --- where it is ------------------------------------------------------------------------------


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
    host, store = socket.gethostname(), within("megabatch hosts", group.get_group_store())
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
