"""Packing: an origin becomes a pack, in parts that survive an interruption.

Images are encoded by threads and written in a fixed order, 1,024 to a part, beside the output. When
all parts are there they are joined into one file, which gets its name only once it is whole and on
disk. Nothing depends on the number of threads or on how often the work was interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from numpy.typing import NDArray

from megabatch.config import Data
from megabatch.data.jpeg import BadImage, Encoding, Stored, encode
from megabatch.data.origins import Origin
from megabatch.data.packs.reading import About
from megabatch.data.packs.writing import Index, write
from megabatch.data.source import hold_out_order
from megabatch.errors import UserError
from megabatch.host.durable import sync

PART = 1024
VAL_SHARE = Data.val_share
_AHEAD = 4  # images in the hands of each thread's queue


@dataclass(frozen=True)
class Bad:
    """An image that could not be read."""

    name: str
    reason: str


@dataclass(frozen=True)
class PackPart:
    """Up to 1,024 images in order, as they lie in a file of their own."""

    key: str
    """what they were made of"""
    good: NDArray[numpy.int64]
    """which of them could be read"""
    sizes: NDArray[numpy.int64]
    crcs: NDArray[numpy.uint32]
    bad: list[Bad]
    shapes: list[tuple[int, int, int]]
    """of the images, but two of them at the most: whether they agree is all that is asked"""

    def to_json(self) -> str:
        numbers = {name: getattr(self, name).tolist() for name in ("good", "sizes", "crcs")}
        bad = [(image.name, image.reason) for image in self.bad]
        return json.dumps({"key": self.key, **numbers, "bad": bad, "shapes": self.shapes})

    @staticmethod
    def from_json(text: str) -> PackPart:
        row: dict[str, Any] = json.loads(text)
        return PackPart(
            key=row["key"],
            good=numpy.array(row["good"], numpy.int64),
            sizes=numpy.array(row["sizes"], numpy.int64),
            crcs=numpy.array(row["crcs"], numpy.uint32),
            bad=[Bad(*bad) for bad in row["bad"]],
            shapes=[(height, width, channels) for height, width, channels in row["shapes"]],
        )


@dataclass(frozen=True)
class Packed:
    """How packing ended; without a pack where too many images are bad."""

    path: Path | None
    images: int
    bad: list[Bad]
    splits: dict[str, int]
    nbytes: int
    parts_kept: int
    """parts that an earlier attempt had finished"""


def check_new(out: Path) -> None:
    """A pack is never written over."""
    if out.exists():
        raise UserError(f"{out} exists already: remove it or name another file")


def pack(
    origin: Origin,
    title: str,
    out: Path,
    encoding: Encoding,
    *,
    val_share: float | None = None,
    skip_bad: int = 0,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Packed:
    """Pack an origin into `out`. Run again after an interruption: finished parts are taken over.

    With more than `skip_bad` unreadable images all of them are listed and no pack is made.
    """
    check_new(out)
    if origin.pixels and encoding.kind == "jpeg" and encoding.size == 0:
        encoding = Encoding("raw")  # small pictures that come as pixels stay pixels
    order, train = _order(origin, val_share)
    folder = out.with_name(out.name + ".parts")
    with _locked(folder), ThreadPoolExecutor(threads, "packer") as pool:
        parts: list[PackPart] = []
        kept = 0
        for first in range(0, len(order), PART):
            indices = order[first : first + PART]
            at = folder / f"{first // PART:06d}"
            key = _key(origin, encoding, indices)
            part = _finished(at, key)
            kept += part is not None
            if part is None:
                work = _counted(
                    _encoded(pool, threads, origin, encoding, indices), first, len(order), progress
                )
                part = _write_part(at, key, work)
            parts.append(part)
            progress(first + len(indices), len(order))
        bad = [image for part in parts for image in part.bad]
        if len(bad) > skip_bad:
            return Packed(None, len(order), bad, {}, 0, kept)
        good = numpy.concatenate([n * PART + part.good for n, part in enumerate(parts)])
        if len(good) == 0:
            raise UserError(f"{title} has no readable image at all, so there is nothing to pack")
        about, index = _described(origin, title, encoding, order, train, good, parts, len(bad))
        joined = folder / "whole"
        with joined.open("wb") as file:
            write(file, about, index, lambda to: _join(folder, parts, to))
            file.flush()
            os.fsync(file.fileno())
        os.replace(joined, out)
        sync(out.parent)
        splits = {name: last - first for name, (first, last) in about.splits.items()}
    shutil.rmtree(folder)
    return Packed(out, len(good), bad, splits, out.stat().st_size, kept)


def _order(origin: Origin, val_share: float | None) -> tuple[NDArray[numpy.int64], int]:
    """The images in the order of the pack, training part first, and how many belong to it."""
    count = len(origin.labels)
    if origin.train < count:
        if val_share is not None:
            raise UserError("the source has a val part of its own: leave --val-share away")
        return numpy.arange(count), origin.train
    train, held = hold_out_order(count, VAL_SHARE if val_share is None else val_share)
    return torch.cat([train, held]).numpy(), len(train)


# --- parts -------------------------------------------------------------------------------------


def _key(origin: Origin, encoding: Encoding, indices: NDArray[numpy.int64]) -> str:
    """Says what a part is made of: another source, setting or file time gives another key."""
    digest = hashlib.sha256(json.dumps([origin.kind, asdict(encoding)]).encode())
    for index in indices.tolist():
        line = [origin.name(index), int(origin.labels[index]), origin.stamp(index)]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()


def _encoded(
    pool: ThreadPoolExecutor,
    threads: int,
    origin: Origin,
    encoding: Encoding,
    indices: NDArray[numpy.int64],
) -> Iterator[Stored | Bad]:
    """The images encoded, in order; only a few are in memory at a time."""

    def one(index: int) -> Stored | Bad:
        try:
            return encode(origin.read(index), encoding)
        except BadImage as error:
            return Bad(origin.name(index), str(error))
        except OSError as error:
            return Bad(origin.name(index), error.strerror or str(error))

    waiting: deque[Future[Stored | Bad]] = deque()
    for index in indices.tolist():
        waiting.append(pool.submit(one, index))
        if len(waiting) > _AHEAD * threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _counted(
    images: Iterator[Stored | Bad], done: int, total: int, progress: Callable[[int, int], None]
) -> Iterator[Stored | Bad]:
    for number, image in enumerate(images, done + 1):
        yield image
        progress(number, total)


def _write_part(at: Path, key: str, images: Iterator[Stored | Bad]) -> PackPart:
    """Write the images of a part, then its table: a part with a table is whole."""
    sizes, crcs, shapes, bad = [], [], [], []
    good: list[int] = []
    with at.with_suffix(".images").open("wb") as file:
        for place, image in enumerate(images):
            if isinstance(image, Bad):
                bad.append(image)
            else:
                file.write(image.data)
                good.append(place)
                sizes.append(len(image.data))
                crcs.append(zlib.crc32(image.data))
                shapes.append(image.shape)
        file.flush()
        os.fsync(file.fileno())
    part = PackPart(
        key,
        numpy.array(good, numpy.int64),
        numpy.array(sizes, numpy.int64),
        numpy.array(crcs, numpy.uint32),
        bad,
        sorted(set(shapes))[:2],
    )
    fresh = at.with_suffix(".fresh")
    fresh.write_text(part.to_json())
    os.replace(fresh, at.with_suffix(".json"))
    return part


def _finished(at: Path, key: str) -> PackPart | None:
    """A part that an earlier attempt finished, if it is of the same images and whole."""
    try:
        part = PackPart.from_json(at.with_suffix(".json").read_text())
        size = at.with_suffix(".images").stat().st_size
        return part if part.key == key and part.sizes.sum() == size else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


# --- joining -----------------------------------------------------------------------------------


def _described(
    origin: Origin,
    title: str,
    encoding: Encoding,
    order: NDArray[numpy.int64],
    train: int,
    good: NDArray[numpy.int64],
    parts: list[PackPart],
    bad: int,
) -> tuple[About, Index]:
    labels = origin.labels[order[good]]
    if encoding.kind == "raw":
        _same_shape(parts)
    shapes = {shape for part in parts for shape in part.shapes}
    middle = int(numpy.searchsorted(good, train))
    splits = {"train": (0, middle), "val": (middle, len(good))}
    counts = {
        name: numpy.bincount(labels[first:last], minlength=len(origin.classes)).tolist()
        for name, (first, last) in splits.items()
    }
    about = About(
        source=f"{origin.kind} {title}",
        encoding=encoding.description(),
        shape=shapes.pop() if len(shapes) == 1 else None,
        classes=origin.classes,
        splits=splits,
        counts=counts,
        skipped=bad,
    )
    index = Index(
        sizes=numpy.concatenate([part.sizes for part in parts]),
        labels=labels,
        crcs=numpy.concatenate([part.crcs for part in parts]),
        names=(origin.name(int(order[place])) for place in good),
    )
    return about, index


def _same_shape(parts: list[PackPart]) -> None:
    shapes = sorted({shape for part in parts for shape in part.shapes})
    if len(shapes) > 1:
        (h, w, _), (other_h, other_w, _) = shapes[:2]
        raise UserError(
            f"a raw pack needs images of one size, but there are {w} x {h} and "
            f"{other_w} x {other_h}: give --size"
        )


def _join(folder: Path, parts: list[PackPart], to: BinaryIO) -> None:
    for number, part in enumerate(parts):
        at = folder / f"{number:06d}.images"
        with at.open("rb") as images:
            for size, crc in zip(part.sizes.tolist(), part.crcs.tolist(), strict=True):
                data = images.read(size)
                if zlib.crc32(data) != crc:
                    at.with_suffix(".json").unlink()
                    raise OSError(f"{at} was damaged while packing: pack again")
                to.write(data)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder of parts, in the hands of one process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is packing into {folder} already") from None
        yield
