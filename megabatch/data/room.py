"""Room for a micro-batch on its way to the device: one run of bytes that holds images and labels.

Threads and processes write into it piece by piece, and the device fetches it with one copy. How the
images lie in it depends on who does the rest of the work: on a CPU they are the model's numbers; on
a GPU they are bytes of the model's size, or crops as they were decoded, which the GPU resizes.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Form = Literal["numbers", "bytes", "crops"]

_ALIGNED = 64
# A crop gets this many times the bytes of what the model sees: enough for every crop of a picture
# whose shorter side is 8/7 of the model's (256 for 224) at the usual aspects. Larger ones are
# resized before they are sent.
_ROOM_FOR_CROPS = 1.75


def form_of(device: torch.device) -> Form:
    """How far the host brings images: on a CPU to the model's numbers, for a GPU no further than
    it must."""
    if device.type == "cpu":
        return "numbers"
    return "crops" if importlib.util.find_spec("triton") else "bytes"


@dataclass(frozen=True)
class Room:
    """A micro-batch, or a part of one, as views of somebody's memory."""

    images: Tensor
    """numbers or bytes: n x channels x size x size, channels last in memory; crops: n x bytes"""
    labels: Tensor
    shapes: Tensor | None = None
    """of crops: height and width"""
    memory: Tensor | None = None
    """all of it in one run, where it is"""

    def part(self, first: int, last: int) -> Room:
        some = slice(first, last)
        shapes = None if self.shapes is None else self.shapes[some]
        return Room(self.images[some], self.labels[some], shapes)


@dataclass(frozen=True)
class Layout:
    """Where the images and labels of up to `count` images lie in a run of bytes."""

    form: Form
    count: int
    size: int
    channels: int
    dtype: torch.dtype = torch.float32
    """of numbers"""

    @property
    def image_bytes(self) -> int:
        pixels = self.size**2 * self.channels
        if self.form == "numbers":
            return pixels * self.dtype.itemsize
        return pixels if self.form == "bytes" else _aligned(int(_ROOM_FOR_CROPS * pixels))

    @property
    def nbytes(self) -> int:
        return self._images_at + _aligned(self.count * self.image_bytes)

    @property
    def _images_at(self) -> int:
        return 2 * _aligned(8 * self.count)

    def views(self, memory: Tensor, count: int) -> Room:
        """`memory`, a run of bytes on any device, as the room of `count` images."""
        labels = memory[: 8 * count].view(torch.int64)
        images = memory[self._images_at :][: count * self.image_bytes]
        if self.form == "crops":
            at = _aligned(8 * self.count)
            shapes = memory[at : at + 8 * count].view(torch.int32).view(count, 2)
            return Room(images.view(count, self.image_bytes), labels, shapes, memory)
        # Channels last: as images are decoded, and resized fastest.
        shape = (count, self.size, self.size, self.channels)
        if self.form == "numbers":
            images = images.view(self.dtype)
        return Room(images.view(shape).permute(0, 3, 1, 2), labels, None, memory)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
