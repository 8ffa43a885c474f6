"""Heartbeats: what every rank is doing, in the store that the ranks met by, and who is to blame.

A rank writes its step, bucket and phase there while it works. When a sum does not come, the others
read all of them, name the rank furthest behind and end; nothing waits for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megabatch.cluster import Cluster
from megabatch.sync.lanes import Pending


class Stalled(RuntimeError):
    """A sum over the workers will not come; the message names the rank furthest behind."""


class Disagreement(RuntimeError):
    """Two ranks are about to sum different things; the message says which and what."""


class Place(NamedTuple):
    """How far a rank is. Places compare: later in a run is larger."""

    step: int
    bucket: int
    order: int
    """of the phase, among all that this rank began"""
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, bucket {self.bucket}, {self.phase}"


class Heartbeat:
    """This rank's pulse and its watch over the others.

    A rank whose pulse stands still for `silent_seconds` is dead or stopped; one that lives but lets
    the others wait for `late_seconds` is stuck. Either ends all ranks: the sums that wait for it
    raise Stalled within twice silent_seconds (or late_seconds, and an eighth of silent_seconds),
    and a process that is not over silent_seconds later is ended by force, with status 1.
    """

    def __init__(
        self,
        cluster: Cluster,
        silent_seconds: float = 60,
        late_seconds: float = 600,
        store: Any = None,
    ) -> None:
        self._rank, self._world = cluster.rank, cluster.world
        self._silent, self._late = silent_seconds, late_seconds
        shared: Any = store or dist.distributed_c10d._get_default_store()
        # A connection of its own: another thread may be waiting in the shared one.
        self._store = _within("heartbeat", shared.clone())
        self._interval = silent_seconds / 8
        self._place = Place(0, 0, 0, "starting")
        self._count = 0
        self._waiting: dict[Pending, float] = {}
        self._suspect: BaseException | None = None
        self._suspected_at = 0.0
        self._heard: dict[int, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._over: Stalled | None = None
        self._pulse()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def step(self, step: int) -> None:
        """A new step begins."""
        self._place = Place(step, 0, self._place.order, "computing")

    def at(self, bucket: int, phase: str) -> None:
        """A phase of a bucket begins; called from lanes, which may be at several buckets."""
        last = self._place
        self._place = Place(last.step, bucket, last.order + 1, phase)

    def expect(self, pending: Pending) -> None:
        """Watch over a sum: it ends well, or with Stalled."""
        with self._lock:
            self._waiting[pending] = time.monotonic()
        pending.then(lambda error: self._forget(pending))
        if self._over is not None:
            pending.end(self._over)

    def failed(self, pending: Pending, error: BaseException) -> None:
        """A lane saw an error; the sum ends when it is known whose fault it is."""
        with self._lock:
            if self._suspect is None:
                self._suspect, self._suspected_at = error, time.monotonic()
        if pending not in self._waiting:
            pending.end(error)

    def accuse(self, message: str) -> str:
        """Tell all ranks that the run is over, and why; the first to say so is believed."""
        return str(self._store.compare_set("verdict", "", message).decode())

    def close(self) -> None:
        self._closing.set()
        if self._over is None:
            self._thread.join(self._interval + 1)

    def _forget(self, pending: Pending) -> None:
        with self._lock:
            self._waiting.pop(pending, None)

    def _watch(self) -> None:
        while not self._closing.wait(self._interval):
            try:
                self._pulse()
                verdict = self._verdict()
            except Exception as error:  # the store is gone, and with it the rank that holds it
                if not self._waiting:
                    return
                verdict = f"the ranks can no longer meet: the store does not answer ({error})"
            if verdict is not None:
                self._end(f"{verdict}; rank {self._rank} was at {self._place}")
                return

    def _pulse(self) -> None:
        self._count += 1
        step, bucket, order, phase = self._place
        self._store.set(f"{self._rank}", f"{self._count} {step} {bucket} {order} {phase}")

    def _verdict(self) -> str | None:
        """Who is to blame, once it is certain; only a rank that has waited for long asks."""
        if self._store.check(["verdict"]):
            return str(self._store.get("verdict").decode())
        with self._lock:
            since = min(self._waiting.values(), default=None)
        if since is None:
            return None
        waited = time.monotonic() - since
        if waited < self._silent / 2 and self._suspect is None:
            return None
        silent, places = self._listen()
        if self._suspect and not silent:
            unexplained = time.monotonic() - self._suspected_at > 2 * self._silent
            error = f"rank {self._rank} met an error though all ranks live: {self._suspect}"
            return self.accuse(error) if unexplained else None
        if not silent and waited < self._late:
            return None
        behind = min(silent or places, key=lambda rank: places[rank])
        says = (
            f"has been silent for {self._silent:g} s (dead or stopped)"
            if silent
            else f"lives but let the others wait for {self._late:g} s"
        )
        because = f"; the first error seen was: {self._suspect}" if self._suspect else ""
        return self.accuse(f"rank {behind} {says}, last at {places[behind]}{because}")

    def _listen(self) -> tuple[list[int], dict[int, Place]]:
        """The ranks whose pulse stands still, and where each rank is."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        keys = [str(rank) for rank in others]
        beats = self._store.multi_get(keys) if self._store.check(keys) else map(self._beat, keys)
        now, places = time.monotonic(), {self._rank: self._place}
        for rank, beat in zip(others, beats, strict=True):
            count, step, bucket, order, phase = beat.decode().split(" ", 4)
            places[rank] = Place(int(step), int(bucket), int(order), phase)
            if self._heard.get(rank, (None,))[0] != int(count):
                self._heard[rank] = (int(count), now)
        silent = [rank for rank in others if now - self._heard[rank][1] >= self._silent]
        return silent, places

    def _beat(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b"0 0 0 0 not yet started"

    def _end(self, message: str) -> None:
        self._over = Stalled(message)
        print(f"megabatch: rank {self._rank} stops: {message}", file=sys.stderr, flush=True)
        with self._lock:
            waiting = list(self._waiting)
        for pending in waiting:
            pending.end(self._over)
        # Lanes may wait in the backend for ever, and so may the interpreter when it ends.
        time.sleep(self._silent)
        os._exit(1)


def compare(cluster: Cluster, key: str, said: str, seconds: float = 60) -> None:
    """Raise Disagreement unless this rank says what rank 0 says; each key is compared once."""
    if cluster.world == 1:
        return
    store = _within("compare", dist.distributed_c10d._get_default_store())
    if cluster.first:
        store.set(key, said)
        return
    try:
        store.wait([key], timedelta(seconds=seconds))
    except Exception as error:
        raise Disagreement(
            f"rank {cluster.rank} says {said}, but rank 0 said nothing in {seconds:g} s"
        ) from error
    first = store.get(key).decode()
    if first != said:
        raise Disagreement(f"rank {cluster.rank} says {said}, but rank 0 says {first}")


def _within(name: str, store: Any) -> Any:
    """A part of the store for keys of our own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
