"""Reading ahead with threads: for images that need little work, and for a caller's own data set."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self, TypeVar

import torch

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.slots import Buffer, Layout
from megabatch.data.source import Order, Source, Writer

_PIECE = 32
"""images of a piece: few enough that a micro-batch is finished by all threads together, enough that
choosing their crops costs little"""

T = TypeVar("T")


def threads_of(config: Config, cluster: Cluster) -> int:
    """How many threads a worker decodes with: as the config says, or its share of the machine's
    cores."""
    cores = len(os.sched_getaffinity(0))
    return config.data.threads or max(1, cores // cluster.local_world)


class FutureMicroBatch(Protocol):
    """A micro-batch that is on its way."""

    def result(self) -> Buffer:
        """The images, once all of them are there."""
        ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class Reader(Protocol):
    """Whoever reads ahead. `busy_seconds` is its work so far, all threads or processes together,
    `core_seconds` how much of that on a core or waiting for one (None: not known)."""

    busy_seconds: float
    core_seconds: float | None
    kind: str
    """what the work is done by"""

    def submit(self, first: int, count: int) -> FutureMicroBatch:
        """Begin to read the images at `count` positions from `first` on."""
        ...


class ThreadReader:
    """Threads that read a source."""

    kind = "threads"
    core_seconds: float | None = None  # waits for storage and for the interpreter look alike

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
        self._write = source.writer(config, layout, training)
        self._lock = threading.Lock()
        self.busy_seconds = 0.0
        self._pool = ThreadPoolExecutor(threads, "reader")

    def submit(self, first: int, count: int) -> FutureMicroBatch:
        if self._source.instant:
            return _WhenAsked(lambda: self._read(first, count))
        if self._write is None:
            return self._pool.submit(self._timed, self._read_whole, first, count)
        return self._submit_pieces(self._write, first, count)

    def _submit_pieces(self, write: Writer, first: int, count: int) -> FutureMicroBatch:
        memory = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        buffer = self._layout.views(memory, count)
        pieces = [
            self._pool.submit(self._timed, write, first + at, buffer.rows(at, at + _PIECE))
            for at in range(0, count, _PIECE)
        ]
        return _Gathered(buffer, pieces)

    def _read(self, first: int, count: int) -> Buffer:
        positions = torch.arange(first, first + count)
        indices, draws = self._order.indices(positions), self._order.draws(positions)
        return Buffer(*self._source.read(indices, draws))

    def _read_whole(self, first: int, count: int) -> Buffer:
        buffer = self._read(first, count)
        if buffer.images.is_cuda:  # of a caller's own: whoever takes them works on another stream
            torch.cuda.current_stream(buffer.images.device).synchronize()
        return buffer

    def _timed(self, work: Callable[..., T], *arguments: object) -> T:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self.busy_seconds += time.perf_counter() - began

    def close(self) -> None:
        """What has begun is finished, the rest is not begun."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WhenAsked:
    """A micro-batch of images that are where they are wanted: read by whoever asks for it."""

    def __init__(self, read: Callable[[], Buffer]) -> None:
        self.result = read

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Nothing has begun."""


class _Gathered(Future[Buffer]):
    """A buffer, once all its pieces are written; of several failures the first piece's."""

    def __init__(self, buffer: Buffer, pieces: Sequence[Future[None]]) -> None:
        super().__init__()
        self._buffer, self._pieces = buffer, pieces
        self._missing, self._counting = len(pieces), threading.Lock()
        self.set_running_or_notify_cancel()
        for piece in pieces:
            piece.add_done_callback(self._arrived)

    def cancel(self) -> bool:
        """Pieces that have begun are finished; nobody may wait for the others."""
        cancelled = [piece.cancel() for piece in self._pieces]
        return all(cancelled)

    def _arrived(self, _: Future[None]) -> None:
        with self._counting:
            self._missing -= 1
            missing = self._missing
        if missing or any(piece.cancelled() for piece in self._pieces):
            return
        failures = (error for piece in self._pieces if (error := piece.exception()))
        if error := next(failures, None):
            self.set_exception(error)
        else:
            self.set_result(self._buffer)
