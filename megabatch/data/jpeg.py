"""Encoded images to pixels and back: JPEG by libjpeg-turbo (simplejpeg) at the scale needed, the
rest by Pillow.

Every failure is a BadImage with a reason in words. What is decided about odd images (CMYK, 16 bits,
transparency, rotation) is decided here, for packs and folders alike; docs/data.md lists it.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[numpy.uint8]
"""height x width x channels (1 or 3)"""
Encoded = bytes | bytearray | memoryview

_MOST_PIXELS = 100_000_000
# A few of ImageNet's own files have stray bytes between segments; the picture is whole all the
# same. Every other complaint of libjpeg means pixels that are not there or not right.
_HARMLESS = "extraneous bytes before marker"


FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
# Rows of a JPEG are decoded in runs of 8 or 16 (rarely 32, which look at no others), and those of
# colour may look at the pair below.
_ROWS, _ROWS_BELOW = 16, 2


class BadImage(ValueError):
    """An image that cannot be read; the message is the reason."""


class Workspace(threading.local):
    """Memory to decode into, one a thread: fresh memory for each image costs a third of the
    decoding."""

    def __init__(self) -> None:
        self._memory = numpy.empty(1 << 20, numpy.uint8)

    def of_at_least(self, nbytes: int) -> Pixels:
        if len(self._memory) < nbytes:
            self._memory = numpy.empty(nbytes, numpy.uint8)
        return self._memory


def is_jpeg(data: Encoded) -> bool:
    return bytes(data[:3]) == b"\xff\xd8\xff"


def ends_well(head: bytes, tail: bytes, size: int) -> bool:
    """Whether a file of so many bytes begins and ends as an image does: a cut one does not. Of a
    kind that does not show it, False."""
    if is_jpeg(head):
        return b"\xff\xd9" in tail
    if head.startswith(b"\x89PNG"):
        return b"IEND" in tail
    if head.startswith(b"GIF8"):
        return tail.endswith(b";")
    if head.startswith(b"RIFF"):
        return int.from_bytes(head[4:8], "little") + 8 <= size
    return head.startswith(b"BM") and int.from_bytes(head[2:6], "little") <= size


class Head(NamedTuple):
    """What the head of an image says."""

    height: int
    width: int
    plain: bool
    """a JPEG that libjpeg-turbo turns into grey or RGB itself"""


def head_of(data: Encoded) -> Head:
    """Height, width and kind of an image, without decoding it."""
    if is_jpeg(data):
        return _jpeg_head(data)
    with _opened(data) as picture:
        return Head(picture.height, picture.width, False)


def pixels(data: Encoded, channels: int, factor: int = 1) -> Pixels:
    """An image's pixels; a JPEG at 1 / factor of its size (1, 2, 4 or 8, rounded up)."""
    head = head_of(data)
    if not head.plain:
        return _by_pillow(data, channels)
    return _by_libjpeg(data, head, channels, factor)


def region(
    data: Encoded,
    head: Head,
    box: Sequence[int],
    channels: int,
    size: int,
    workspace: Workspace,
    trusted: bool,
) -> Pixels:
    """The pixels in a box (left, upper, right, lower); a JPEG is scaled down while it is decoded as
    far as the box keeps `size` pixels a side.

    The result is overwritten by the thread's next call. Data that is `trusted` was found whole
    before: what lies below the box is then not decoded at all, which leaves the rest as it is to
    the bit.
    """
    if not head.plain:
        left, upper, right, lower = box
        return _by_pillow(data, channels)[upper:lower, left:right]
    factor = scaling(min(box[2] - box[0], box[3] - box[1]), size)
    height, width = -(-head.height // factor), -(-head.width // factor)
    if factor > 1:
        y, x = height / head.height, width / head.width
        left, upper = round(box[0] * x), round(box[1] * y)
        right, lower = max(left + 1, round(box[2] * x)), max(upper + 1, round(box[3] * y))
    else:
        left, upper, right, lower = box
    if trusted:
        rows = -(-(lower * factor + _ROWS_BELOW) // _ROWS) * _ROWS
        shorter = _shortened(data, rows) if rows < head.height else None
        if shorter is not None:
            data, head = shorter, head._replace(height=rows)
    found = _by_libjpeg(data, head, channels, factor, workspace, trusted)
    return found[upper:lower, left:right]


def _shortened(data: Encoded, rows: int) -> bytearray | None:
    """A JPEG that claims to have fewer rows, which is all that a decoder goes by; None where its
    rows are not stored from top to bottom in one run."""
    at, frame = 2, 0
    while at + 10 < len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind in (0xC0, 0xC1):  # a sequential frame: its height, then how many colours
            frame = at
        elif kind == 0xDA:  # a scan: how many of the colours it has
            if not frame or data[at + 4] != data[frame + 9]:
                return None
            shorter = bytearray(data)
            shorter[frame + 5 : frame + 7] = rows.to_bytes(2, "big")
            return shorter
        at += 2 + (data[at + 2] << 8) + data[at + 3]
    return None


def _by_libjpeg(
    data: Encoded,
    head: Head,
    channels: int,
    factor: int,
    workspace: Workspace | None = None,
    trusted: bool = False,
) -> Pixels:
    height, width = -(-head.height // factor), -(-head.width // factor)
    nbytes = height * width * channels
    memory = None if workspace is None else workspace.of_at_least(nbytes)
    wanted: dict[str, Any] = {"colorspace": "RGB" if channels == 3 else "GRAY", "buffer": memory}
    if factor > 1:
        wanted |= {"min_height": height, "min_width": width, "min_factor": factor}
    try:
        try:
            found: Pixels = simplejpeg.decode_jpeg(data, **wanted, strict=not trusted)
        except ValueError as error:
            if _HARMLESS not in str(error):
                raise
            found = simplejpeg.decode_jpeg(data, **wanted, strict=False)
    except ValueError as error:
        raise BadImage(_reason(error)) from None
    if found.shape != (height, width, channels):
        raise BadImage(f"it decodes to {found.shape} and not to {(height, width, channels)}")
    return found


def _jpeg_head(data: Encoded) -> Head:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:  # simplejpeg's own table of colour spaces
        raise BadImage("its head is cut off or damaged") from None
    except ValueError as error:
        raise BadImage(_reason(error)) from None
    _check_pixels(height, width)
    return Head(height, width, colours not in ("CMYK", "YCCK"))


def _check_pixels(height: int, width: int) -> None:
    if not 0 < height * width <= _MOST_PIXELS:
        raise BadImage(f"{width} x {height} pixels; up to {_MOST_PIXELS:,} are read")


def _opened(data: Encoded) -> Image.Image:
    if len(data) == 0:
        raise BadImage("the file is empty")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        kinds = ", ".join(FORMATS[:-1])
        raise BadImage(f"it is no {kinds} or {FORMATS[-1]}, or its head is damaged") from error
    _check_pixels(picture.height, picture.width)
    return picture


def _by_pillow(data: Encoded, channels: int) -> Pixels:
    with _opened(data) as picture:
        try:
            if picture.mode.startswith("I"):  # 16 bits grey: the upper 8 count
                high = numpy.asarray(picture).astype(numpy.uint32) >> 8
                picture = Image.fromarray(high.clip(0, 255).astype(numpy.uint8))
            elif picture.mode == "F":
                raise BadImage("its pixels are floating-point numbers, of a range nobody knows")
            elif "transparency" in picture.info or picture.mode in ("LA", "PA"):
                # Straight to RGB Pillow warns; transparency itself is dropped.
                picture = picture.convert("RGBA")
            found = numpy.asarray(picture.convert("RGB" if channels == 3 else "L"))
        except BadImage:
            raise
        except Exception as error:  # a damaged file raises nearly anything
            raise BadImage(_reason(error)) from error
    return found if channels == 3 else found[:, :, None]


def _reason(error: Exception) -> str:
    words = str(error).strip() or type(error).__name__
    return words.splitlines()[0].rstrip(".")


# --- what a pack holds of an image -------------------------------------------------------------


@dataclass(frozen=True)
class Encoding:
    kind: Literal["jpeg", "raw"] = "jpeg"
    size: int = 0
    """jpeg: shortest side at most this (0: as it is); raw: the side of the square (0: as it is)"""
    quality: int = 90
    """of JPEGs that are made anew"""

    def description(self) -> dict[str, str | int]:
        """What the pack says of it; the quality matters only where something is compressed."""
        quality = {"quality": self.quality} if self.kind == "jpeg" else {}
        return {"kind": self.kind, "size": self.size, **quality}


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
        height, width, plain = head_of(image)
        small = encoding.size == 0 or min(height, width) <= encoding.size
        if encoding.kind == "jpeg" and small and plain:
            pixels(image, 3, factor=8)
            return Stored(image, (height, width, 3))
        # Twice the wanted size is enough to make a good smaller picture from.
        factor = scaling(min(height, width), 2 * encoding.size)
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


def scaling(side: int, wanted: int) -> int:
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
