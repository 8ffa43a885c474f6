"""Memory for micro-batches on their way to the device: one run of bytes holds images and labels.

Threads and processes write into a buffer piece by piece, and the device fetches it with one copy.
How the images lie in it depends on who does the rest of the work: on a CPU they are the model's
numbers; on a GPU they are bytes of the model's size, or crops as they were decoded, which the GPU
resizes. Slots are buffers in memory that several processes share.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Literal, Self

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch import kernels

Form = Literal["numbers", "bytes", "crops"]

_ALIGNED = 64
# A crop gets this many times the bytes of what the model sees: enough for every crop of a picture
# whose shorter side is 8/7 of the model's (256 for 224) at the usual aspects. Larger ones are
# resized before they are sent.
_BYTES_FOR_CROPS = 1.75
LENT = 4
"""slots in the hands of whoever asked for their images: trained on, or on their way to a GPU"""


def form_of(device: torch.device) -> Form:
    """How far the host brings images: on a CPU to the model's numbers, for a GPU no further than
    it must."""
    if device.type == "cpu":
        return "numbers"
    return "bytes" if kernels.lacking() else "crops"


@dataclass(frozen=True)
class Buffer:
    """A micro-batch, or some rows of one, as views of somebody's memory."""

    images: Tensor
    """numbers or bytes: n x channels x size x size, channels last in memory; crops: n x bytes"""
    labels: Tensor
    shapes: Tensor | None = None
    """of crops: height and width"""
    memory: Tensor | None = None
    """all of it in one run, where it is"""

    def rows(self, first: int, last: int) -> Buffer:
        some = slice(first, last)
        shapes = None if self.shapes is None else self.shapes[some]
        return Buffer(self.images[some], self.labels[some], shapes)


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
        return pixels if self.form == "bytes" else _aligned(int(_BYTES_FOR_CROPS * pixels))

    @property
    def nbytes(self) -> int:
        return self._images_at + _aligned(self.count * self.image_bytes)

    @property
    def _images_at(self) -> int:
        return 2 * _aligned(8 * self.count)

    def views(self, memory: Tensor, count: int) -> Buffer:
        """`memory`, a run of bytes on any device, as the buffer of `count` images."""
        labels = memory[: 8 * count].view(torch.int64)
        images = memory[self._images_at :][: count * self.image_bytes]
        if self.form == "crops":
            at = _aligned(8 * self.count)
            shapes = memory[at : at + 8 * count].view(torch.int32).view(count, 2)
            return Buffer(images.view(count, self.image_bytes), labels, shapes, memory)
        # Channels last: as images are decoded, and resized fastest.
        shape = (count, self.size, self.size, self.channels)
        if self.form == "numbers":
            images = images.view(self.dtype)
        return Buffer(images.view(shape).permute(0, 3, 1, 2), labels, None, memory)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Slots:
    """Buffers of one layout, in a file without a name: it goes when the last process does.

    There are enough for `reading` micro-batches, and for a few that are lent: a slot that was
    handed out as a buffer is free again once no tensor looks at it any more. Untouched slots take
    no memory. With `pinned` a GPU can fetch from them while the host goes on.
    """

    def __init__(self, layout: Layout, reading: int, pinned: bool) -> None:
        self._layout, self._pinned = layout, pinned
        count = reading + LENT
        self.nbytes = -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._registered: set[int] = set()
        self._free = list(range(count))
        self._lent: set[int] = set()
        self.file = os.memfd_create("megabatch-slots")
        try:
            os.ftruncate(self.file, count * self.nbytes)
            self._memory = map_slots(self.file)
        except BaseException:
            os.close(self.file)
            raise

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        # The one used last: its memory is there already, and in the caches.
        slot = self._free.pop()
        if self._pinned and slot not in self._registered:
            address = self._slice(slot).ctypes.data
            error = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
            if error == 0:
                self._registered.add(slot)
            else:  # there are limits to pinned memory
                self._pinned = False
                warnings.warn(
                    f"memory for images cannot be pinned (CUDA error {error}), so the host waits "
                    f"while they are copied",
                    stacklevel=1,
                )
        return slot

    def give_back(self, slot: int) -> None:
        self._lent.discard(slot)
        self._free.append(slot)

    def buffer(self, slot: int, count: int) -> Buffer:
        """What was written into a slot; it is given back with the last tensor of the buffer."""
        if len(self._lent) == LENT:  # somebody keeps many: theirs are copies from now on
            copy = torch.from_numpy(self._slice(slot)).clone()
            self.give_back(slot)
            return self._layout.views(copy, count)
        # Tensors hold on to this very array, not to what it is a slice of.
        array = self._slice(slot)
        self._lent.add(slot)
        weakref.finalize(array, self.give_back, slot).atexit = False
        return self._layout.views(torch.from_numpy(array), count)

    def _slice(self, slot: int) -> NDArray[numpy.uint8]:
        return self._memory[slot * self.nbytes : (slot + 1) * self.nbytes]

    def close(self) -> None:
        """Let go of the memory; what is lent stays valid, but is not pinned any more."""
        for slot in self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._slice(slot).ctypes.data)
        self._registered.clear()
        self._memory = self._memory[:0].copy()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_slots(file: int) -> NDArray[numpy.uint8]:
    """The memory behind a file of slots, in whichever process."""
    return numpy.frombuffer(mmap.mmap(file, 0), numpy.uint8)
