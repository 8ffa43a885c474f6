"""A worker's way from world to world: it meets the others, works until one is lost, and meets those
that are left."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from megabatch.cluster import Cluster
from megabatch.elastic.connecting import connecting
from megabatch.elastic.link import Link, LostWorker, Standing, World, supervised
from megabatch.errors import RunFailed, UserError
from megabatch.host.stopping import StopAsked
from megabatch.workers.place import place_by

T = TypeVar("T")


class Regroup(Exception):
    """The run goes on with another number of workers; None: with as many, in another world, for the
    others may not come to where this one is."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__(f"{workers or 'as many'} workers from here on")
        self.workers = workers


class HeldState(Protocol):
    """The state of a run as one worker holds it."""

    @property
    def standing(self) -> Standing: ...


M = TypeVar("M", bound=HeldState)


class Passage(Generic[M]):
    """What a worker takes along from world to world."""

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self.memory: M | None = None
        self.stop = None if link is None else StopAsked()

    @property
    def again(self) -> bool:
        """Whether this is not the run's first world."""
        return self._world is not None and self._world.number > 0

    @property
    def resumes(self) -> bool:
        """Whether the run's folder was begun by a world before this one."""
        return self._world is not None and self._world.resumes

    @property
    def copies(self) -> bool:
        """Whether the first worker holds the run's state, for all others to copy."""
        return self._world is not None and self._world.copies

    @property
    def _world(self) -> World | None:
        return None if self._link is None else self._link.world

    def begun(self) -> None:
        """The run's folder is its own from here on."""
        if self._link is not None:
            self._link.say("begun")

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """What a world before this one could do in the run's folder is no mistake of the user's
        when it fails: the disk is full by now, say."""
        try:
            yield
        except UserError as error:
            if not self.resumes:
                raise
            raise RunFailed(str(error)) from None

    def heed(self, micro_batches: Iterable[T]) -> Iterable[T]:
        """The same; a world that is lost ends between two of them."""
        return micro_batches if self._link is None else _heeding(self._link, micro_batches)

    def enter(self, stage: int) -> None:
        """Go on with as many workers as are wanted in a batch stage, if that is another number."""
        world = self._world
        if world is not None and world.by_stage:
            workers = world.by_stage[min(stage, len(world.by_stage) - 1)]
            if workers != world.wanted:
                raise Regroup(workers)

    @contextlib.contextmanager
    def keeping(self, memory: Callable[[], M]) -> Iterator[None]:
        """What happens in here leaves the run's state whole, whenever it fails."""
        try:
            yield
        except (UserError, RunFailed):
            raise
        except Exception:
            if self._link is not None:
                self.memory = memory()
            raise


def _heeding(link: Link, micro_batches: Iterable[T]) -> Iterator[T]:
    for micro in micro_batches:
        if link.lost:
            raise LostWorker
        yield micro


def join_others(grid: tuple[int, int] | None = None, device: str = "auto") -> Cluster:
    """Join the others; where one is lost before all have met, those that are left. A grid is for as
    many workers as it holds, now or later; one worker needs none."""
    link = supervised()
    if link is None:
        return Cluster.from_env(None if place_by(os.environ).world == 1 else grid, device)
    link.grid = grid
    return _meet(link, Passage[Any](link), grid, device)


def in_worlds(cluster: Cluster, run: Callable[[Cluster, Passage[M]], T]) -> T:
    """run(cluster, passage); where a worker is lost, again with those that are left and whoever
    comes in its place. Inside another such run a loss is the other's: it ends both."""
    link = supervised()
    if link is None or link.in_worlds:
        return run(cluster, Passage[M](None))
    passage = Passage[M](link)
    given, grid = cluster, link.grid or cluster.grid
    link.in_worlds = True
    try:
        while True:
            # On a GPU what follows a sum is on its way before the sum is known to have failed.
            link.all_or_none = cluster.device.type == "cuda"
            workers = None
            try:
                return run(cluster, passage)
            except Regroup as regroup:
                workers = regroup.workers
            except (UserError, RunFailed):
                raise
            except Exception as error:
                if not link.explains(error):
                    raise
            # Here no error holds on to what the lost world was made of.
            device = cluster.device.type
            cluster.leave()
            gc.collect()
            _join(link, passage, workers)
            cluster = _meet(link, passage, grid, device)
    finally:
        link.in_worlds = False
        if cluster is not given:
            cluster.leave()


def _join(link: Link, passage: Passage[Any], workers: int | None = None) -> None:
    link.join(None if passage.memory is None else passage.memory.standing, workers)


def _meet(link: Link, passage: Passage[Any], grid: tuple[int, int] | None, device: str) -> Cluster:
    import torch.distributed as dist

    while True:
        assert link.world is not None
        fits = grid is None or grid[0] * grid[1] == link.world.size
        try:
            with connecting():
                return Cluster.from_env(grid if fits else None, device)
        except UserError as error:
            if not passage.again:
                raise
            raise RunFailed(str(error)) from None  # they could before
        except RunFailed:
            raise
        except Exception as error:
            if not link.explains(error):
                raise
        # Process groups are named by their number, and that one was none.
        dist.distributed_c10d._world.group_count = 0
        gc.collect()
        _join(link, passage)
