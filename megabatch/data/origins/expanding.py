"""Compressed files, expanded up to a bound: a few megabytes may claim to hold gigabytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from megabatch.errors import UserError

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_LEAST, _MOST, _TIMES = 64 << 20, 4 << 30, 50


def bound_of(path: Path) -> int:
    """The most bytes that a file may expand to: images hardly compress, digits about fivefold."""
    return min(_MOST, max(_LEAST, _TIMES * path.stat().st_size))


@contextmanager
def expanded(path: Path) -> Iterator[IO[bytes]]:
    """A file, or what it holds if it is compressed."""
    with path.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), None)
        if opener is None:
            yield file
            return
        with opener(file) as stream:
            yield cast(IO[bytes], _Bounded(stream, path))


class _Bounded(io.RawIOBase):
    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._bound = stream, path, bound_of(path)

    def read(self, size: int = -1) -> bytes:
        left = self._bound - self._stream.tell()
        data = self._stream.read(left + 1 if size < 0 else min(size, left + 1))
        if len(data) > left:
            raise self._too_large()
        return data

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or position > self._bound:
            raise self._too_large()
        return self._stream.seek(position)

    def tell(self) -> int:
        return self._stream.tell()

    def _too_large(self) -> UserError:
        times = self._bound // max(1, self._path.stat().st_size)
        return UserError(
            f"{self._path} expands to more than {self._bound >> 20} MiB, {times} times its size, "
            f"which no data set of images does: it is not read"
        )
