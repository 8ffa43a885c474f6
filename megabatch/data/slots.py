"""Rooms for micro-batches in memory that several processes share."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref

import numpy
import torch

from megabatch.data.room import Layout, Room

LENT = 4
"""slots in the hands of whoever asked for their images: trained on, or on their way to a GPU"""


class Slots:
    """Rooms of one layout, in a file without a name: it goes when the last process does.

    There are enough for `reading` micro-batches, and for a few that are lent: a slot that was
    handed out as a room is free again once no tensor looks at it any more. Untouched slots take no
    memory. With `pinned` a GPU can fetch from them while the host goes on.
    """

    def __init__(self, layout: Layout, reading: int, pinned: bool) -> None:
        self._layout, self._pinned = layout, pinned
        count = reading + LENT
        self.nbytes = -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = os.memfd_create("megabatch-slots")
        os.ftruncate(self.file, count * self.nbytes)
        self._memory = map_slots(self.file)
        self._free = list(range(count))
        self._lent: set[int] = set()
        self._registered: set[int] = set()

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

    def room(self, slot: int, count: int) -> Room:
        """What was written into a slot; it is given back with the last tensor of the room."""
        if len(self._lent) == LENT:  # somebody keeps many: theirs are copies from now on
            copy = torch.from_numpy(self._slice(slot)).clone()
            self.give_back(slot)
            return self._layout.views(copy, count)
        # Tensors hold on to this very array, not to what it is a slice of.
        array = self._slice(slot)
        self._lent.add(slot)
        weakref.finalize(array, self.give_back, slot).atexit = False
        return self._layout.views(torch.from_numpy(array), count)

    def _slice(self, slot: int) -> numpy.ndarray:
        return self._memory[slot * self.nbytes : (slot + 1) * self.nbytes]

    def close(self) -> None:
        for slot in self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._slice(slot).ctypes.data)
        self._registered.clear()
        os.close(self.file)


def map_slots(file: int) -> numpy.ndarray:
    """The memory behind a file of slots, in whichever process."""
    return numpy.frombuffer(mmap.mmap(file, 0), numpy.uint8)
