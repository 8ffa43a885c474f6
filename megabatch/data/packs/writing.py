"""Writing a pack: Arrow lays the file out, but never holds the images, which may be far larger than
memory."""

from __future__ import annotations

import array
import json
import mmap
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from megabatch.data.packs.reading import COLUMNS, About, sealed

_FAR = 10**17  # no position in a file has more digits


@dataclass(frozen=True)
class Index:
    """Everything about the images but their bytes."""

    sizes: NDArray[numpy.int64]
    labels: NDArray[numpy.int32]
    crcs: NDArray[numpy.uint32]
    names: Iterable[str]
    """gone through once"""


def write(
    file: BinaryIO, about: About, index: Index, copy_images: Callable[[BinaryIO], None]
) -> None:
    """Write a whole pack; `copy_images` writes the images' bytes, in order, when their place is
    reached (it may seek over holes)."""
    columns, batch_of = _columns(about, index)
    text = _about_text(about, dict.fromkeys(COLUMNS, (_FAR, _FAR, 2**32 - 1)), _FAR)
    length = len(text)
    # Positions do not depend on what the metadata says, only on how long it is: a first pass
    # without a file finds them.
    rehearsal = _Sink(None, lambda file: None)
    _write_arrow(rehearsal, batch_of(sealed(text, length)))
    places = {
        name: (position, nbytes, zlib.crc32(columns[name]) if name in columns else 0)
        for name, (position, nbytes) in zip(COLUMNS, rehearsal.columns, strict=True)
    }
    text = _about_text(about, places, rehearsal.position)
    sink = _Sink(file, copy_images)
    _write_arrow(sink, batch_of(sealed(text, length)))
    if sink.columns != rehearsal.columns or sink.position != rehearsal.position:
        raise RuntimeError("Arrow laid the same columns out in two different ways")


def _columns(about: About, index: Index) -> tuple[dict[str, bytes], Callable[[bytes], Any]]:
    """The bytes of all columns but the images', and a function from metadata to the record
    batch."""
    import pyarrow

    count = len(index.sizes)
    names, ends = bytearray(), array.array("q")
    for name in index.names:  # one by one: so many strings at once would take more than all else
        names += name.encode()
        ends.append(len(names))
    columns = {
        "image.offsets": _offsets(index.sizes),
        "label": index.labels.astype("<i4").tobytes(),
        "crc32": index.crcs.astype("<u4").tobytes(),
        "name.offsets": _offsets(numpy.diff(numpy.frombuffer(ends, numpy.int64), prepend=0)),
        "name": bytes(names),
    }
    # The images are in no memory at all: Arrow is shown an address range that nobody ever reads,
    # and the sink puts the bytes themselves in its place.
    nowhere = mmap.mmap(
        -1,
        int(index.sizes.sum()),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        prot=mmap.PROT_READ,
    )
    buffers = {name: pyarrow.py_buffer(column) for name, column in columns.items()}
    buffers["image"] = pyarrow.py_buffer(nowhere)

    def array_of(kind: Any, *names: str) -> Any:
        return pyarrow.Array.from_buffers(kind, count, [None, *(buffers[name] for name in names)])

    arrays = [
        array_of(pyarrow.large_binary(), "image.offsets", "image"),
        array_of(pyarrow.int32(), "label"),
        array_of(pyarrow.uint32(), "crc32"),
        array_of(pyarrow.large_string(), "name.offsets", "name"),
    ]

    def batch(metadata: bytes) -> Any:
        fields = [
            pyarrow.field(name, values.type, nullable=False)
            for name, values in zip(("image", "label", "crc32", "name"), arrays, strict=True)
        ]
        schema = pyarrow.schema(fields, metadata={"megabatch": metadata})
        return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)

    return columns, batch


def _offsets(sizes: NDArray[Any]) -> bytes:
    return numpy.concatenate([[0], numpy.cumsum(sizes, dtype="<i8")]).astype("<i8").tobytes()


def _about_text(about: About, places: dict[str, tuple[int, int, int]], nbytes: int) -> str:
    return json.dumps({**asdict(about), "runs": places, "nbytes": nbytes}, sort_keys=True)


def _write_arrow(sink: _Sink, batch: Any) -> None:
    import pyarrow

    with (
        pyarrow.PythonFile(sink, mode="w") as stream,
        pyarrow.ipc.new_file(stream, batch.schema) as writer,
    ):
        sink.images_at = batch.column(0).buffers()[2].address
        writer.write_batch(batch)


class _Sink:
    """What Arrow writes to: notes where each column begins, and lets the images write
    themselves."""

    closed = False

    def __init__(self, file: BinaryIO | None, copy_images: Callable[[BinaryIO], None]) -> None:
        self._file, self._copy_images = file, copy_images
        self.images_at = 0
        self.position = 0
        self.columns: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        # Frames and padding come as bytes, the columns as Arrow's own buffers.
        if isinstance(data, bytes):
            if self._file is not None:
                self._file.write(data)
            self.position += len(data)
            return len(data)
        self.columns.append((self.position, data.size))
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
