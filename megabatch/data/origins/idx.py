"""MNIST-style idx files, gzipped or not: a magic number, the dimensions, then bytes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from megabatch.data.jpeg import Pixels
from megabatch.data.origins.expanding import expanded
from megabatch.errors import UserError

_UNSIGNED_BYTES = 8


@dataclass
class Arrays:
    """Images that are in memory as pixels: idx files and CIFAR."""

    kind: str
    images: list[Pixels]
    """n x height x width x channels, one array a part"""
    labels: NDArray[numpy.int32]
    train: int
    classes: list[str]
    stamped: str
    pixels = True
    notes = ()

    def name(self, index: int) -> str:
        part, at = self._place(index)
        return f"{'train' if index < self.train else 'val'}/{part}/{at}"

    def stamp(self, index: int) -> str:
        return self.stamped

    def seems_whole(self, index: int) -> bool:
        return True

    def read(self, index: int) -> Pixels:
        part, at = self._place(index)
        image: Pixels = self.images[part][at]
        return image

    def _place(self, index: int) -> tuple[int, int]:
        for part, images in enumerate(self.images):
            if index < len(images):
                return part, index
            index -= len(images)
        raise IndexError(index)


def found_at(path: Path) -> bool:
    return path.is_dir() and any(_pair(path, "train"))


def open_at(path: Path) -> Arrays:
    images: list[Pixels] = []
    labels: list[NDArray[numpy.uint8]] = []
    stamps: list[str] = []
    for part in ("train", "t10k", "test"):
        files = _pair(path, part)
        if not any(files):
            continue
        if not all(files):
            raise UserError(f"{path} has only one of the {part} images and labels: both are needed")
        pictures, numbers = (read_idx(file) for file in files if file)
        if pictures.ndim != 3 or numbers.ndim != 1 or len(pictures) != len(numbers):
            raise UserError(
                f"{files[0]} and {files[1]} do not belong together: {_by(pictures.shape)} pixels, "
                f"{_by(numbers.shape)} labels"
            )
        images.append(pictures[:, :, :, None])
        labels.append(numbers)
        stamps += [f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files if f]
    together = numpy.concatenate(labels).astype(numpy.int32)
    classes = [str(label) for label in range(int(together.max()) + 1)]
    return Arrays("idx", images, together, len(images[0]), classes, "; ".join(stamps))


def _pair(path: Path, part: str) -> tuple[Path | None, Path | None]:
    def one(what: str) -> Path | None:
        found = sorted(path.glob(f"*{part}-{what}*ubyte*"))
        return next((file for file in found if file.is_file()), None)

    return one("images"), one("labels")


def read_idx(path: Path) -> NDArray[numpy.uint8]:
    """The array in an idx file of unsigned bytes."""
    try:
        with expanded(path) as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTES:
                raise UserError(f"{path} is no idx file of bytes: its magic number is {head.hex()}")
            sides = file.read(4 * head[3])
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    shape = numpy.frombuffer(sides.ljust(4 * head[3], b"\0"), ">u4").tolist()
    if len(data) != math.prod(shape):
        raise UserError(
            f"{path} is damaged: it has {len(data):,} bytes for {_by(shape)}, "
            f"which need {math.prod(shape):,}"
        )
    return numpy.frombuffer(data, numpy.uint8).reshape(shape)


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "no"
