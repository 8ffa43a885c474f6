"""The pack: a data set as one Arrow IPC file, written deterministically and read through a memory
map.

All images are in one record batch, so each column is a single run of bytes, and the metadata says
where each run lies and what its checksum is. The reader uses that and never asks Arrow to parse a
file that may be damaged (Arrow crashes on some); any other Arrow reader can still open the file.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from megabatch.config import UserError

_FORMAT = 1
# In front of the metadata: found in the raw bytes of the schema, with its own checksum and length.
_SEAL = "megabatch pack {format} {crc:08x} {length:08x} "
_RUNS = ("image.offsets", "image", "label", "crc32", "name.offsets", "name")
_FAR = 10**17  # no position in a file has more digits


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


@dataclass(frozen=True)
class Index:
    """Everything about the images but their bytes."""

    sizes: NDArray[numpy.int64]
    labels: NDArray[numpy.int32]
    crcs: NDArray[numpy.uint32]
    names: list[str]


# --- writing -----------------------------------------------------------------------------------


def write(
    file: BinaryIO, about: About, index: Index, copy_images: Callable[[BinaryIO], None]
) -> None:
    """Write a whole pack; `copy_images` writes the images' bytes, in order, when their place is
    reached (it may seek over holes)."""
    runs, batch_of = _columns(about, index)
    text = _about_text(about, {name: (_FAR, _FAR, 2**32 - 1) for name in _RUNS}, _FAR)
    room = len(text)
    # Positions do not depend on what the metadata says, only on how long it is: a first pass
    # without a file finds them.
    rehearsal = _Sink(None, lambda file: None)
    _write_arrow(rehearsal, batch_of(_sealed(text, room)))
    places = {
        name: (position, length, zlib.crc32(runs[name]) if name in runs else 0)
        for name, (position, length) in zip(_RUNS, rehearsal.runs, strict=True)
    }
    text = _about_text(about, places, rehearsal.position)
    sink = _Sink(file, copy_images)
    _write_arrow(sink, batch_of(_sealed(text, room)))
    if sink.runs != rehearsal.runs or sink.position != rehearsal.position:
        raise RuntimeError("Arrow laid the same columns out in two different ways")


def _columns(about: About, index: Index) -> tuple[dict[str, bytes], Callable[[bytes], Any]]:
    """The bytes of all columns but the images', and a function from metadata to the record
    batch."""
    import pyarrow

    count = len(index.sizes)
    names = [name.encode() for name in index.names]
    runs = {
        "image.offsets": _offsets(index.sizes),
        "label": index.labels.astype("<i4").tobytes(),
        "crc32": index.crcs.astype("<u4").tobytes(),
        "name.offsets": _offsets(numpy.array([len(name) for name in names])),
        "name": b"".join(names),
    }
    # The images are in no memory at all: Arrow is shown an address range that nobody ever reads,
    # and the sink puts the bytes themselves in its place.
    nowhere = mmap.mmap(
        -1,
        int(index.sizes.sum()),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        prot=mmap.PROT_READ,
    )
    buffers = {name: pyarrow.py_buffer(run) for name, run in runs.items()}
    buffers["image"] = pyarrow.py_buffer(nowhere)

    def array(kind: Any, *names: str) -> Any:
        return pyarrow.Array.from_buffers(kind, count, [None, *(buffers[name] for name in names)])

    arrays = [
        array(pyarrow.large_binary(), "image.offsets", "image"),
        array(pyarrow.int32(), "label"),
        array(pyarrow.uint32(), "crc32"),
        array(pyarrow.large_string(), "name.offsets", "name"),
    ]

    def batch(metadata: bytes) -> Any:
        fields = [
            pyarrow.field(name, column.type, nullable=False)
            for name, column in zip(("image", "label", "crc32", "name"), arrays, strict=True)
        ]
        schema = pyarrow.schema(fields, metadata={"megabatch": metadata})
        return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)

    return runs, batch


def _offsets(sizes: NDArray[Any]) -> bytes:
    return numpy.concatenate([[0], numpy.cumsum(sizes, dtype="<i8")]).astype("<i8").tobytes()


def _about_text(about: About, places: dict[str, tuple[int, int, int]], nbytes: int) -> str:
    return json.dumps({**asdict(about), "runs": places, "nbytes": nbytes}, sort_keys=True)


def _sealed(text: str, room: int) -> bytes:
    body = text.ljust(room).encode()
    return _SEAL.format(format=_FORMAT, crc=zlib.crc32(body), length=len(body)).encode() + body


def _write_arrow(sink: _Sink, batch: Any) -> None:
    import pyarrow

    with (
        pyarrow.PythonFile(sink, mode="w") as stream,
        pyarrow.ipc.new_file(stream, batch.schema) as writer,
    ):
        sink.images_at = batch.column(0).buffers()[2].address
        writer.write_batch(batch)


class _Sink:
    """What Arrow writes to: notes where each column's run begins, and lets the images write
    themselves."""

    closed = False

    def __init__(self, file: BinaryIO | None, copy_images: Callable[[BinaryIO], None]) -> None:
        self._file, self._copy_images = file, copy_images
        self.images_at = 0
        self.position = 0
        self.runs: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        # Frames and padding come as bytes, the columns as Arrow's own buffers.
        if isinstance(data, bytes):
            if self._file is not None:
                self._file.write(data)
            self.position += len(data)
            return len(data)
        self.runs.append((self.position, data.size))
        self.position += data.size
        if self._file is not None:
            if data.address == self.images_at:
                self._copy_images(self._file)
            else:
                self._file.write(data)
            if self._file.tell() != self.position:
                raise RuntimeError("the images' bytes are not as many as their sizes say")
        size: int = data.size
        return size

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


# --- reading -----------------------------------------------------------------------------------


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
        except (KeyError, TypeError, ValueError, OverflowError) as error:
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
        if zlib.crc32(data) != self._crcs[index]:
            raise PackError(
                f"image {index} ({self.name(index)}) in the pack {self.path} is damaged: "
                f"its checksum is wrong; copy the pack or pack it again"
            )
        return data

    def sizes(self, indices: NDArray[Any]) -> NDArray[numpy.int64]:
        """How many bytes images have."""
        sizes: NDArray[numpy.int64] = self._offsets[indices + 1] - self._offsets[indices]
        return sizes

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
