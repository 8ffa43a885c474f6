"""Reading ahead with threads: for images that need little work, and for a caller's own data set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from megabatch.config import Config
from megabatch.data.room import Layout, Room
from megabatch.data.source import Fills, Source
from megabatch.data.work import PIECE, Order, Work

T = TypeVar("T")


class Pending(Protocol):
    """A micro-batch that is on its way."""

    def result(self) -> Room:
        """The images, once all of them are there."""
        ...

    def done(self) -> bool: ...

    def cancel(self) -> None: ...


class _Pending:
    def __init__(self, join: Callable[[], Room], pieces: Sequence[Future[Any]]) -> None:
        self._join, self._pieces = join, pieces

    def result(self) -> Room:
        return self._join()

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def cancel(self) -> None:
        for piece in self._pieces:
            piece.cancel()


class Reader:
    """Threads that read a source. `busy_seconds` is their work so far, all together."""

    def __init__(
        self,
        source: Source,
        config: Config,
        layout: Layout,
        training: bool,
        threads: int,
        pinned: bool,
    ) -> None:
        self._source, self._layout, self._pinned = source, layout, pinned
        self._order = Order(config.seed, len(source), training)
        self._work = Work(source, config, layout, training) if isinstance(source, Fills) else None
        self._pool = ThreadPoolExecutor(threads, "reader")
        self._lock = threading.Lock()
        self.busy_seconds = 0.0

    def submit(self, first: int, count: int) -> Pending:
        """Begin to read the images at `count` positions from `first` on."""
        if self._source.instant:
            return _Pending(lambda: self._read(first, count), [])
        if self._work is None:
            whole = self._pool.submit(self._timed, self._read, first, count)
            return _Pending(whole.result, [whole])
        work = self._work
        memory = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        room = self._layout.views(memory, count)
        pieces = [
            self._pool.submit(self._timed, work.do, first + at, room.part(at, at + PIECE))
            for at in range(0, count, PIECE)
        ]

        def join() -> Room:
            for piece in pieces:
                piece.result()
            return room

        return _Pending(join, pieces)

    def _read(self, first: int, count: int) -> Room:
        positions = torch.arange(first, first + count)
        indices, draws = self._order.indices(positions), self._order.draws(positions)
        return Room(*self._source.read(indices, draws))

    def _timed(self, work: Callable[..., T], *arguments: object) -> T:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self.busy_seconds += time.perf_counter() - began

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
