"""The pack: a data set as one Arrow IPC file, written deterministically and read through a memory
map.

All images are in one record batch, so each column is a single run of bytes, and the metadata says
where each run lies and what its checksum is. The reader uses that and never asks Arrow to parse a
file that may be damaged (Arrow crashes on some); any other Arrow reader can still open the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from megabatch.errors import UserError

_FORMAT = 1
# In front of the metadata: found in the raw bytes of the schema, with its own checksum and length.
_SEAL = "megabatch pack {format} {crc:08x} {length:08x} "
RUNS = ("image.offsets", "image", "label", "crc32", "name.offsets", "name")


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


def sealed(text: str, room: int) -> bytes:
    """The description as it stands in the metadata: padded to `room`, with its checksum in
    front."""
    body = text.ljust(room).encode()
    return _SEAL.format(format=_FORMAT, crc=zlib.crc32(body), length=len(body)).encode() + body


class Pack:
    """A pack, mapped and checked: its structure when it is opened, each image when it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise PackError(f"there is no file {path}: make it with megabatch pack") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise PackError(f"{path} cannot be read as a pack: {error}") from None
        self._bytes = memoryview(self._map)
        try:
            self._open()
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, PackError):
                raise
            raise self._damaged(f"its description is wrong ({error!r})") from None

    def _open(self) -> None:
        said = self._description()
        if said["nbytes"] != self.nbytes:
            raise self._damaged(f"it has {self.nbytes:,} bytes and should have {said['nbytes']:,}")
        self._places: dict[str, tuple[int, int, int]] = said.pop("runs")
        del said["nbytes"]
        said["shape"] = said["shape"] and tuple(said["shape"])
        said["splits"] = {name: (first, last) for name, (first, last) in said["splits"].items()}
        self.about = About(**said)
        self._offsets = self._run("image.offsets", "<i8")
        self.labels: NDArray[numpy.int32] = self._run("label", "<i4")
        self._crcs = self._run("crc32", "<u4")
        self._name_offsets = self._run("name.offsets", "<i8")
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
        if bytes(self._bytes[:6]) != b"ARROW1":
            raise PackError(f"{self.path} is not a pack: it does not begin as an Arrow file does")
        length = int.from_bytes(self._bytes[12:16], "little")
        head = bytes(self._bytes[16 : 16 + length])
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
        said: dict[str, Any] = json.loads(body)
        return said

    def _run(self, name: str, dtype: str) -> NDArray[Any]:
        position, length, crc = self._places[name]
        self._check_inside(position, length)
        run = self._bytes[position : position + length]
        if zlib.crc32(run) != crc:
            raise self._damaged(f"the checksum of its column {name} is wrong")
        return numpy.frombuffer(run, dtype)

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

    def record(self, index: int) -> memoryview:
        """The bytes of one image, checked against their checksum; valid while the pack is open."""
        first = self._places["image"][0]
        begin, end = first + int(self._offsets[index]), first + int(self._offsets[index + 1])
        data = self._bytes[begin:end]
        self.check(index, data)
        return data

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

    def will_need(self, indices: list[int]) -> None:
        """Ask the system to have these images in memory soon: one wait for storage, not one
        each."""
        first, page = self._places["image"][0], mmap.PAGESIZE
        for index in indices:
            begin = (first + int(self._offsets[index])) // page * page
            end = first + int(self._offsets[index + 1])
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def name(self, index: int) -> str:
        """What an image was called in the source."""
        first = self._places["name"][0]
        begin, end = int(self._name_offsets[index]), int(self._name_offsets[index + 1])
        return bytes(self._bytes[first + begin : first + end]).decode(errors="replace")

    def check_names(self) -> None:
        """The one column that opening does not check: names serve only for messages."""
        self._run("name", "u1")
