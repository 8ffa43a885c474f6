"""The pack: a data set as one Arrow IPC file, written deterministically and read by position.

All images are in one record batch, so each column is a single run of bytes, and the metadata says
where each run lies and what its checksum is. The reader uses that and never asks Arrow to parse a
file that may be damaged (Arrow crashes on some); any other Arrow reader can still open the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from megabatch.data.jpeg import BadImage, pixels
from megabatch.errors import UserError

_FORMAT = 1
# In front of the metadata: found in the raw bytes of the schema, with its own checksum and length.
_SEAL = "megabatch pack {format} {crc:08x} {length:08x} "
_VERIFIED_TOGETHER = 256
# Arrow may crash on a damaged frame: it is asked in a process of its own.
_OPEN = """
import sys, pyarrow
with pyarrow.memory_map(sys.argv[1]) as file:
    batch = pyarrow.ipc.open_file(file).get_batch(0)
    sys.exit(0 if batch.num_rows == int(sys.argv[2]) else 1)
"""
COLUMNS = ("image.offsets", "image", "label", "crc32", "name.offsets", "name")


class PackError(UserError):
    """A pack that cannot be used, in one sentence."""


@dataclass(frozen=True)
class About:
    """What a pack says of itself."""

    source: str
    """where the images came from: its kind and name"""
    encoding: dict[str, Any]
    """kind jpeg (size: shortest side, 0 untouched; quality) or raw"""
    shape: tuple[int, int, int] | None
    """height, width, channels, where all images agree"""
    classes: list[str]
    splits: dict[str, tuple[int, int]]
    """contiguous ranges of images, from and to"""
    counts: dict[str, list[int]]
    """images of each class, a split"""
    skipped: int = 0
    """unreadable images that were left out"""


def sealed(text: str, length: int) -> bytes:
    """The description as it stands in the metadata: padded to `length`, with its checksum in
    front."""
    body = text.ljust(length).encode()
    return _SEAL.format(format=_FORMAT, crc=zlib.crc32(body), length=len(body)).encode() + body


class Arena(threading.local):
    """A thread's memory for records, used again for the next ones: fresh memory costs more than the
    reading."""

    def __init__(self) -> None:
        self._memory, self._used = bytearray(), 0

    def clear(self) -> None:
        """What was taken so far is not needed any more."""
        self._used = 0

    def take(self, nbytes: int) -> memoryview:
        if self._used + nbytes > len(self._memory):
            self._memory, self._used = bytearray(2 * (self._used + nbytes)), 0
        begin, self._used = self._used, self._used + nbytes
        return memoryview(self._memory)[begin : self._used]


class Pack:
    """A pack, checked: its structure when it is opened, each image when it is read.

    Images are read, not mapped: one that is cut off meanwhile is then an error in words, where a
    map would end the process by SIGBUS. The other columns are held in memory, 24 bytes an image.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Not blocking: what is no plain file must not be waited for.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            weakref.finalize(self, os.close, self._file).atexit = False
            found = os.fstat(self._file)
        except FileNotFoundError:
            raise PackError(f"there is no file {path}: make it with megabatch pack") from None
        except OSError as error:
            reason = error.strerror or error
            raise PackError(f"{path} cannot be read as a pack: {reason}") from None
        if not stat.S_ISREG(found.st_mode):
            raise PackError(f"{path} cannot be read as a pack: it is no plain file")
        self.nbytes = found.st_size
        if self.nbytes == 0:
            raise PackError(f"{path} cannot be read as a pack: it is empty")
        try:
            self._open()
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, PackError):
                raise
            raise self._damaged(f"its description is wrong ({error!r})") from None

    def _open(self) -> None:
        about = self._description()
        if about["nbytes"] != self.nbytes:
            raise self._damaged(f"it has {self.nbytes:,} bytes and should have {about['nbytes']:,}")
        self._places: dict[str, tuple[int, int, int]] = about.pop("runs")
        del about["nbytes"]
        about["shape"] = about["shape"] and tuple(about["shape"])
        if not isinstance(about["encoding"], dict) or not isinstance(about["classes"], list):
            raise ValueError("encoding or classes")
        about["splits"] = {name: (first, last) for name, (first, last) in about["splits"].items()}
        self.about = About(**about)
        self._offsets = self._column("image.offsets", "<i8")
        self.labels: NDArray[numpy.int32] = self._column("label", "<i4")
        self._crcs = self._column("crc32", "<u4")
        self._name_offsets = self._column("name.offsets", "<i8")
        count = len(self.labels)
        if not len(self._offsets) == len(self._name_offsets) == count + 1 == len(self._crcs) + 1:
            raise self._damaged("its columns are not of one length")
        self._check_offsets(self._offsets, self._places["image"][1])
        self._check_offsets(self._name_offsets, self._places["name"][1])
        for name in ("image", "name"):
            self._check_inside(*self._places[name][:2])
        if count and not 0 <= self.labels.min() <= self.labels.max() < len(self.about.classes):
            raise self._damaged("a label names no class")
        ends = [0, *(last for _, last in self.about.splits.values())]
        begins = [first for first, _ in self.about.splits.values()]
        if begins != ends[:-1] or ends[-1] != count or sorted(ends) != ends:
            raise self._damaged("its splits do not cover the images")

    def _description(self) -> dict[str, Any]:
        """The sealed metadata, found in the raw bytes of the schema at the head of the file."""
        frame = os.pread(self._file, 16, 0)
        if frame[:6] != b"ARROW1":
            raise PackError(f"{self.path} is not a pack: it does not begin as an Arrow file does")
        length = int.from_bytes(frame[12:16], "little")
        head = self._bytes(16, min(length, max(0, self.nbytes - 16)))
        seal = _SEAL.format(format=_FORMAT, crc=0, length=0)
        at = head.find(b"megabatch pack ")
        if at < 0:
            raise PackError(
                f"{self.path} is an Arrow file but not a pack, or its head is damaged: "
                f"make it with megabatch pack"
            )
        words = head[at : at + len(seal)].split()
        body_at = at + len(seal)
        if len(words) == 5 and words[2].isdigit() and int(words[2]) > _FORMAT:
            raise PackError(
                f"{self.path} is a pack of format {int(words[2])}, newer than this megabatch reads "
                f"({_FORMAT}): upgrade megabatch or pack again"
            )
        body = head[body_at : body_at + int(words[4], 16)]
        if zlib.crc32(body) != int(words[3], 16):
            raise self._damaged("the checksum of its description is wrong")
        self.fingerprint = hashlib.sha256(body).hexdigest()
        about: dict[str, Any] = json.loads(body)
        return about

    def _read(self, position: int, out: memoryview) -> None:
        """Bytes of the file, which may have become shorter meanwhile."""
        done = os.preadv(self._file, [out], position)
        while done < len(out):  # one call reads up to 2 GB
            more = os.preadv(self._file, [out[done:]], position + done)
            if more == 0:
                now = os.fstat(self._file).st_size
                raise self._damaged(
                    f"it was cut off while it was in use, from {self.nbytes:,} to {now:,} bytes"
                )
            done += more

    def _bytes(self, position: int, length: int) -> bytearray:
        data = bytearray(length)
        self._read(position, memoryview(data))
        return data

    def _column(self, name: str, dtype: str) -> NDArray[Any]:
        position, length, crc = self._places[name]
        self._check_inside(position, length)
        column = self._bytes(position, length)
        if zlib.crc32(column) != crc:
            raise self._damaged(f"the checksum of its column {name} is wrong")
        return numpy.frombuffer(column, dtype)

    def _check_inside(self, position: int, length: int) -> None:
        if position < 0 or length < 0 or position + length > self.nbytes:
            raise self._damaged("a column lies outside the file")

    def _check_offsets(self, offsets: NDArray[Any], end: int) -> None:
        piece = 1 << 20  # in pieces: the check of a huge set needs no memory to speak of
        rising = all(
            bool((numpy.diff(offsets[at : at + piece + 1]) >= 0).all())
            for at in range(0, len(offsets) - 1, piece)
        )
        if offsets[0] != 0 or offsets[-1] != end or not rising:
            raise self._damaged("its offsets do not rise from the beginning to the end")

    def _damaged(self, how: str) -> PackError:
        return PackError(f"the pack {self.path} is damaged: {how}; copy it or pack it again")

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, index: int, arena: Arena | None = None) -> memoryview:
        """The bytes of one image, checked against their checksum; in an arena they are there until
        it is cleared."""
        first = self._places["image"][0]
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        length = end - begin
        data = memoryview(bytearray(length)) if arena is None else arena.take(length)
        self._read(first + begin, data)
        self.check(index, data)
        return data

    def records(self, indices: list[int], arena: Arena) -> list[memoryview]:
        """Several images, in the place of those that the arena held; the system is asked for all of
        them first: one wait for storage, not one each."""
        first = self._places["image"][0]
        for index in indices:
            begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
            os.posix_fadvise(self._file, first + begin, end - begin, os.POSIX_FADV_WILLNEED)
        arena.clear()
        return [self.record(index, arena) for index in indices]

    def check(self, index: int, data: bytes | memoryview) -> None:
        """Refuse bytes that are not the image's."""
        if zlib.crc32(data) != self._crcs[index]:
            raise PackError(
                f"image {index} ({self.name(index)}) in the pack {self.path} is damaged: "
                f"its checksum is wrong; copy the pack or pack it again"
            )

    def lengths(self) -> NDArray[numpy.int64]:
        """How many bytes each image has."""
        lengths: NDArray[numpy.int64] = numpy.diff(self._offsets)
        return lengths

    def name(self, index: int) -> str:
        """What an image was called in the source."""
        first = self._places["name"][0]
        begin, end = int(self._name_offsets[index]), int(self._name_offsets[index + 1])
        return self._bytes(first + begin, end - begin).decode(errors="replace")

    def check_names(self) -> None:
        """The one column that opening does not check: names serve only for messages."""
        self._column("name", "u1")


# --- verifying ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    images: int
    bad: list[tuple[str, str]]
    """image and reason"""
    frame: str
    """what is wrong with the Arrow frame, which the loader does not need; else empty"""


def verify_pack(
    path: Path, threads: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Check every byte of a pack; one that cannot even be opened raises PackError."""
    pack = Pack(path)
    pack.check_names()
    raw = pack.about.encoding["kind"] == "raw"

    def check(index: int) -> tuple[str, str] | None:
        try:
            data = pack.record(index)
            if raw:
                numpy.frombuffer(data, numpy.uint8).reshape(pack.about.shape or ())
            else:
                pixels(data, 3, factor=8)
        except PackError:
            return pack.name(index), "its checksum is wrong"
        except (BadImage, UserError, ValueError) as error:
            return pack.name(index), str(error)
        return None

    bad: list[tuple[str, str]] = []
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(pack), _VERIFIED_TOGETHER):
            piece = range(first, min(first + _VERIFIED_TOGETHER, len(pack)))
            bad += [found for found in pool.map(check, piece) if found is not None]
            progress(piece.stop, len(pack))
    command = [sys.executable, "-c", _OPEN, str(path), str(len(pack))]
    opened = subprocess.run(command, capture_output=True).returncode == 0
    frame = "" if opened else "its Arrow frame is damaged, so other Arrow readers cannot open it"
    return Verified(len(pack), bad, frame)
