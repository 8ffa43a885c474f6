"""Reading ahead: batches are read in pieces by threads, into memory the device can copy from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from megabatch.data.source import Source

# Small enough that the threads finish a batch together, large enough that handing pieces out costs
# nothing.
_PIECE = 8
T = TypeVar("T")
Finish = Callable[[Tensor, Tensor, Tensor], Tensor]
"""images and their positions -> what the model is given, written into the third"""


@runtime_checkable
class Fills(Protocol):
    """A source that reads into memory of the caller's, in pieces."""

    def empty(self, count: int, pinned: bool = False) -> Tensor: ...

    def fill(self, out: Tensor, indices: Tensor, draws: Tensor | None) -> Tensor: ...


class Pending:
    """A batch that is on its way."""

    def __init__(
        self, join: Callable[[], tuple[Tensor, Tensor]], pieces: Sequence[Future[Any]]
    ) -> None:
        self._join, self._pieces = join, pieces

    def result(self) -> tuple[Tensor, Tensor]:
        """Images and labels, once all of them are there."""
        return self._join()

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def cancel(self) -> None:
        for piece in self._pieces:
            piece.cancel()


class Reader:
    """Threads that read a source. `busy_seconds` is their work so far, all threads together.

    With `finish` the threads also turn the bytes into numbers of that dtype; without it that is the
    device's work, and with `pinned` the bytes lie where it can fetch them from.
    """

    def __init__(
        self,
        source: Source,
        threads: int,
        pinned: bool = False,
        finish: tuple[Finish, torch.dtype] | None = None,
    ) -> None:
        self._source, self._pinned, self._finish = source, pinned, finish
        self._pool = ThreadPoolExecutor(threads, "reader")
        self._lock = threading.Lock()
        self.threads = threads
        self.busy_seconds = 0.0

    def submit(self, indices: Tensor, positions: Tensor, draws: Tensor | None) -> Pending:
        """Begin to read images; row i of draws is image i's randomness."""
        source = self._source
        if source.instant:
            return Pending(lambda: source.read(indices, draws), [])
        if not isinstance(source, Fills):
            whole = self._pool.submit(self._timed, source.read, indices, draws)
            return Pending(whole.result, [whole])
        images = source.empty(len(indices), self._pinned)
        fill, finish, numbers = source.fill, None, images
        if self._finish is not None:
            finish, dtype = self._finish
            numbers = torch.empty(images.shape, dtype=dtype)

        def read(piece: slice) -> Tensor:
            labels = fill(images[piece], indices[piece], None if draws is None else draws[piece])
            if finish is not None:
                finish(images[piece], positions[piece], numbers[piece])
            return labels

        starts = range(0, len(indices), _PIECE)
        pieces = [self._pool.submit(self._timed, read, slice(at, at + _PIECE)) for at in starts]
        return Pending(lambda: (numbers, torch.cat([piece.result() for piece in pieces])), pieces)

    def _timed(self, work: Callable[..., T], *arguments: object) -> T:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self.busy_seconds += time.perf_counter() - began

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
