"""Heartbeats: what every rank is doing, in the store that the ranks met by, and who is to blame.

A rank notes each step, bucket and phase that it begins, and writes the last of them there at every
pulse. When a sum does not come, the others read all of them, name the rank furthest behind and end;
nothing waits for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from megabatch.cluster import Cluster
from megabatch.elastic.link import supervised
from megabatch.errors import RunFailed
from megabatch.sync.lanes import Closed, Reduction
from megabatch.sync.segment import Begun

_PATIENCE_SECONDS = 1.0
_LEAVING_SECONDS = 10.0
_CLOSED = "closed"


class Stalled(RunFailed):
    """A sum over the workers will not come; the message names the rank furthest behind."""


class Lost(RuntimeError):
    """A rank is gone, as the supervisor says: the run goes on without it."""


class Progress(NamedTuple):
    """How far a rank is. They compare: later in a run is larger."""

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
    and a process that is not over silent_seconds later, or ten seconds, is ended by force, with
    status 1; at once where it waits in the backend itself, as it does on a GPU. `store` holds keys
    of this heartbeat alone. Who works puts what it begins into `log`, from any thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Any,
        silent_seconds: float = 60,
        late_seconds: float = 600,
    ) -> None:
        self._rank, self._world = cluster.rank, cluster.world
        self._silent, self._late = silent_seconds, late_seconds
        # A connection of its own: another thread may be waiting in the shared one.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=max(silent_seconds, 1)))
        self._interval = silent_seconds / 8
        self.log: SimpleQueue[Begun] = SimpleQueue()
        self._progress = Progress(0, 0, 0, "starting")
        self._count = 0
        self._waiting: dict[Reduction, float] = {}
        self._blocked: float | None = None
        self._suspect: BaseException | None = None
        self._suspected_at = 0.0
        self._ended = False
        self._heard: dict[int, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._over: Stalled | None = None
        self._given_up: Lost | None = None
        self._pulse()  # first: where the store is gone nothing has begun
        self._answered = time.monotonic()
        # Under a supervisor the run goes on without a lost worker, and it says which that is.
        self._ending, self._link = contextlib.ExitStack(), supervised()
        if self._link is not None:
            self._ending.enter_context(self._link.telling(self._give_up))
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        # A store that a stopped rank holds does not even refuse: another thread sees that.
        self._guard = threading.Thread(target=self._guard_store, name="guard", daemon=True)
        self._guard.start()
        atexit.register(self.close)

    def expect(self, reduction: Reduction) -> None:
        """Watch over a sum: it ends well, or with Stalled."""
        now = time.monotonic()
        with self._lock:
            kept = {sum_: since for sum_, since in self._waiting.items() if not sum_.over.is_set()}
            self._waiting = {**kept, reduction: now}
        if (over := self._over or self._given_up) is not None:
            reduction.end(over)

    @contextlib.contextmanager
    def blocked(self, phase: str) -> Iterator[None]:
        """Watch over the training thread while it waits for others where nothing can call it back:
        in a collective of the backend, or for a GPU whose stream waits in one."""
        now = self._now()
        self.log.put((now.step, now.bucket, phase))
        self._blocked = time.monotonic()
        try:
            yield
        finally:
            self._blocked = None

    def failed(self, reduction: Reduction, error: BaseException) -> None:
        """A lane saw an error; the sum ends when it is known whose fault it is, though the error
        may come before the one who began it has told that it is to be watched."""
        with self._lock:
            if self._suspect is None:
                self._suspect, self._suspected_at = error, time.monotonic()
        if self._closing.is_set() or self._given_up is not None:
            reduction.end(error)

    def accuse(self, message: str) -> str:
        """Tell all ranks that the run is over, and why; the first to say so is believed."""
        return str(self._store.compare_set("verdict", "", message).decode())

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more, and let the others know; sums that are still waited for end here."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._ending.close()
        atexit.unregister(self.close)
        if self._over is not None:
            return  # the process is about to end
        self._guard.join(_PATIENCE_SECONDS)
        self._thread.join(self._interval + _PATIENCE_SECONDS)
        self._end_all(Closed("closed before this sum was there"))
        if self._thread.is_alive():  # the store does not answer
            return
        self._progress = self._now()._replace(phase=_CLOSED)
        with contextlib.suppress(Exception):  # the first to leave may take the store along
            self._pulse()
        del self._store  # the connection

    def _give_up(self) -> None:
        """A rank is gone, and known to be: whatever is waited for ends."""
        self._given_up = Lost("another rank was lost")
        self._end_all(self._given_up)

    def _now(self) -> Progress:
        """How far this rank is, by all that was noted so far."""
        with self._lock, contextlib.suppress(Empty):
            while True:
                step, bucket, phase = self.log.get_nowait()
                self._progress = Progress(step, bucket, self._progress.order + 1, phase)
        return self._progress

    def _guard_store(self) -> None:
        while not self._closing.wait(self._interval):
            since = self._since()
            if since is None or self._given_up is not None or self._over is not None:
                continue
            if time.monotonic() - max(since, self._answered) >= self._silent + self._interval:
                self._end(
                    f"the ranks can no longer meet: the store has not answered for "
                    f"{self._silent:g} s (rank 0 holds it, where no launcher does: dead or "
                    f"stopped); rank {self._rank} was at {self._now()}"
                )
                return

    def _watch(self) -> None:
        while not self._closing.wait(self._interval):
            self._answered = time.monotonic()
            try:
                self._pulse()
                verdict = self._verdict()
            except Exception as error:  # the store is gone, and with it the rank that holds it
                if self._since() is None:
                    continue
                verdict = (
                    f"the ranks can no longer meet: the store does not answer, which rank 0 "
                    f"holds where no launcher does ({error})"
                )
            if self._given_up is not None:
                return
            if verdict is not None:
                self._end(f"{verdict}; rank {self._rank} was at {self._now()}")
                return

    def _pulse(self) -> None:
        self._count += 1
        step, bucket, order, phase = self._now()
        self._store.set(f"{self._rank}", f"{self._count} {step} {bucket} {order} {phase}")

    def _verdict(self) -> str | None:
        """Who is to blame, once it is certain; only a rank that has waited for long asks."""
        if self._store.check(["verdict"]):
            return str(self._store.get("verdict").decode())
        since = self._since()
        if since is None:
            return None
        waited = time.monotonic() - since
        if waited < self._silent / 2 and self._suspect is None:
            return None
        silent, progress = self._listen()
        closed = [rank for rank in progress if progress[rank].phase == _CLOSED]
        if closed and self._link is not None and waited < self._late:
            return None  # it knows of a loss before this rank does: the supervisor will tell
        if closed:
            step = progress[closed[0]].step
            return self.accuse(f"rank {closed[0]} closed its end at step {step}, others go on")
        if self._suspect and not silent:
            unexplained = time.monotonic() - self._suspected_at > 2 * self._silent
            error = f"rank {self._rank} met an error though all ranks live: {self._suspect}"
            return self.accuse(error) if unexplained else None
        if not silent and waited < self._late:
            return None
        behind = min(silent or progress, key=lambda rank: progress[rank])
        says = (
            f"has been silent for {self._silent:g} s (dead or stopped)"
            if silent
            else f"lives but let the others wait for {self._late:g} s"
        )
        because = f"; the first error seen was: {self._suspect}" if self._suspect else ""
        named = f"rank {behind} {says}, last at {progress[behind]}{because}"
        if self._link is None:
            return self.accuse(named)
        # Under a supervisor who will not come is ended, once, and another takes its place.
        if not self._ended:
            self._ended = True
            print(f"megabatch: {named}; it is ended", file=sys.stderr, flush=True)
            self._link.end(behind)
        return None

    def _since(self) -> float | None:
        """When this rank began to wait for what it waits for longest."""
        with self._lock:
            since = [at for sum_, at in self._waiting.items() if not sum_.over.is_set()]
        blocked = self._blocked
        return min(since if blocked is None else [*since, blocked], default=None)

    def _listen(self) -> tuple[list[int], dict[int, Progress]]:
        """The ranks whose pulse stands still, and where each rank is."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        keys = [str(rank) for rank in others]
        beats = self._store.multi_get(keys) if self._store.check(keys) else map(self._beat, keys)
        now, progress = time.monotonic(), {self._rank: self._now()}
        for rank, beat in zip(others, beats, strict=True):
            count, step, bucket, order, phase = beat.decode().split(" ", 4)
            progress[rank] = Progress(int(step), int(bucket), int(order), phase)
            if self._heard.get(rank, (None,))[0] != int(count):
                self._heard[rank] = (int(count), now)
        silent = [rank for rank in others if now - self._heard[rank][1] >= self._silent]
        return silent, progress

    def _beat(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b"0 0 0 0 not yet started"

    def _end(self, message: str) -> None:
        self._over = Stalled(message)
        print(f"megabatch: rank {self._rank} stops: {message}", file=sys.stderr, flush=True)
        self._end_all(self._over)
        # Lanes may wait in the backend for ever, and so may the interpreter when it ends.
        if self._blocked is None:
            time.sleep(max(self._silent, _LEAVING_SECONDS))
        os._exit(1)

    def _end_all(self, error: BaseException) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for reduction in waiting:
            reduction.end(error)
