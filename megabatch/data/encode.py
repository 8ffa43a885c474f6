"""What a pack holds of an image: its own JPEG bytes, a smaller JPEG, or raw pixels of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy
import simplejpeg
from PIL import Image

from megabatch.data.jpeg import BadImage, Encoded, Pixels, head_of, pixels


@dataclass(frozen=True)
class Encoding:
    kind: Literal["jpeg", "raw"] = "jpeg"
    size: int = 0
    """jpeg: shortest side at most this (0: as it is); raw: the side of the square (0: as it is)"""
    quality: int = 90
    """of JPEGs that are made anew"""

    def said(self) -> dict[str, str | int]:
        """What the pack says of it; the quality matters only where something is compressed."""
        said: dict[str, str | int] = {"kind": self.kind, "size": self.size}
        return said | ({"quality": self.quality} if self.kind == "jpeg" else {})


@dataclass(frozen=True)
class Stored:
    data: Encoded
    shape: tuple[int, int, int]
    """height, width, channels"""


def encode(image: Encoded | Pixels, encoding: Encoding) -> Stored:
    """An image of a source (a file's bytes, or pixels) as the pack holds it; BadImage where it
    cannot be read.

    A JPEG that needs no change is kept to the byte, after a trial decode at an eighth of its size:
    that reads all its data.
    """
    if isinstance(image, numpy.ndarray):
        found = image
    else:
        if len(image) == 0:
            raise BadImage("the file is empty")
        height, width, plain = head_of(image)
        small = encoding.size == 0 or min(height, width) <= encoding.size
        if encoding.kind == "jpeg" and small and plain:
            pixels(image, 3, factor=8)
            return Stored(image, (height, width, 3))
        # Twice the wanted size is enough to make a good smaller picture from.
        factor = _factor(min(height, width), 2 * encoding.size)
        found = pixels(image, 3, factor)
    if encoding.kind == "raw":
        if encoding.size:
            found = _square(found, encoding.size)
        return Stored(numpy.ascontiguousarray(found).tobytes(), found.shape)
    if encoding.size and min(found.shape[:2]) > encoding.size:
        found = _shortest_side(found, encoding.size)
    grey = found.shape[2] == 1
    data = simplejpeg.encode_jpeg(
        numpy.ascontiguousarray(found),
        quality=encoding.quality,
        colorspace="GRAY" if grey else "RGB",
        colorsubsampling="Gray" if grey else "420",
    )
    return Stored(data, (*found.shape[:2], 3))


def _factor(side: int, wanted: int) -> int:
    """The strongest scaling of libjpeg that leaves a side of at least `wanted` (0: none)."""
    return next((f for f in (8, 4, 2) if wanted and side // f >= wanted), 1)


def _resized(found: Pixels, width: int, height: int) -> Pixels:
    picture = Image.fromarray(found.squeeze(2) if found.shape[2] == 1 else found)
    shape = (height, width, found.shape[2])
    smaller = picture.resize((width, height), Image.Resampling.BICUBIC)
    return numpy.asarray(smaller).reshape(shape)


def _shortest_side(found: Pixels, size: int) -> Pixels:
    height, width = found.shape[:2]
    short = min(height, width)
    return _resized(found, round(width * size / short), round(height * size / short))


def _square(found: Pixels, size: int) -> Pixels:
    """The shortest side made `size`, and the middle of the longer."""
    if found.shape[:2] == (size, size):
        return found
    found = _shortest_side(found, size)
    upper, left = (found.shape[0] - size) // 2, (found.shape[1] - size) // 2
    return found[upper : upper + size, left : left + size]
