"""Encoded images to pixels: JPEG by libjpeg-turbo (simplejpeg) at the scale that is needed, the
rest by Pillow.

Every failure is a BadImage with a reason in words. What is decided about odd images (CMYK, 16 bits,
transparency, rotation) is decided here, for packs and folders alike; docs/data.md lists it.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[numpy.uint8]
"""height x width x channels (1 or 3)"""
Encoded = bytes | memoryview

_MOST_PIXELS = 100_000_000
# A few of ImageNet's own files have stray bytes between segments; the picture is whole all the
# same. Every other complaint of libjpeg means pixels that are not there or not right.
_HARMLESS = "extraneous bytes before marker"


class BadImage(ValueError):
    """An image that cannot be read; the message is the reason."""


class Scratch(threading.local):
    """Room to decode into, one a thread: fresh memory for each image costs a third of the
    decoding."""

    def __init__(self) -> None:
        self._room = numpy.empty(1 << 20, numpy.uint8)

    def room(self, nbytes: int) -> Pixels:
        if len(self._room) < nbytes:
            self._room = numpy.empty(nbytes, numpy.uint8)
        return self._room


def is_jpeg(data: Encoded) -> bool:
    return bytes(data[:3]) == b"\xff\xd8\xff"


def size_of(data: Encoded) -> tuple[int, int]:
    """Height and width, from the head of the image."""
    if is_jpeg(data):
        return _jpeg_head(data)[:2]
    with _opened(data) as picture:
        return picture.height, picture.width


def pixels(data: Encoded, channels: int, factor: int = 1, scratch: Scratch | None = None) -> Pixels:
    """An image's pixels; a JPEG at 1 / factor of its size (1, 2, 4 or 8, rounded up).

    With a scratch the result is overwritten by the thread's next call.
    """
    if not is_jpeg(data):
        return _by_pillow(data, channels)
    height, width, colours = _jpeg_head(data)
    if colours in ("CMYK", "YCCK"):
        return _by_pillow(data, channels)
    height, width = -(-height // factor), -(-width // factor)
    room = None if scratch is None else scratch.room(height * width * channels)
    wanted: dict[str, Any] = {"colorspace": "RGB" if channels == 3 else "GRAY", "buffer": room}
    if factor > 1:
        wanted |= {"min_height": height, "min_width": width, "min_factor": factor}
    try:
        try:
            found: Pixels = simplejpeg.decode_jpeg(data, **wanted)
        except ValueError as error:
            if _HARMLESS not in str(error):
                raise
            found = simplejpeg.decode_jpeg(data, **wanted, strict=False)
    except ValueError as error:
        raise BadImage(_reason(error)) from None
    if found.shape != (height, width, channels):
        raise BadImage(f"it decodes to {found.shape} and not to {(height, width, channels)}")
    return found


def _jpeg_head(data: Encoded) -> tuple[int, int, str]:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:  # simplejpeg's own table of colour spaces
        raise BadImage("its head names no colours that are known") from None
    except ValueError as error:
        raise BadImage(_reason(error)) from None
    _check_pixels(height, width)
    return height, width, colours


def _check_pixels(height: int, width: int) -> None:
    if not 0 < height * width <= _MOST_PIXELS:
        raise BadImage(f"{width} x {height} pixels; up to {_MOST_PIXELS:,} are read")


def _opened(data: Encoded) -> Image.Image:
    if len(data) == 0:
        raise BadImage("the file is empty")
    try:
        picture = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
    except Exception as error:
        raise BadImage("it is neither JPEG nor PNG, or its head is damaged") from error
    _check_pixels(picture.height, picture.width)
    return picture


def _by_pillow(data: Encoded, channels: int) -> Pixels:
    with _opened(data) as picture:
        try:
            if picture.mode.startswith("I"):  # 16 bits grey: the upper 8 count
                high = numpy.asarray(picture).astype(numpy.uint32) >> 8
                picture = Image.fromarray(high.clip(0, 255).astype(numpy.uint8))
            elif "transparency" in picture.info or picture.mode in ("LA", "PA"):
                # Straight to RGB Pillow warns; transparency itself is dropped.
                picture = picture.convert("RGBA")
            found = numpy.asarray(picture.convert("RGB" if channels == 3 else "L"))
        except Exception as error:  # a damaged file raises nearly anything
            raise BadImage(_reason(error)) from error
    return found if channels == 3 else found[:, :, None]


def _reason(error: Exception) -> str:
    words = str(error).strip() or type(error).__name__
    return words.splitlines()[0].rstrip(".")
