"""Images that came from other workers, in memory which the decoding processes see too.

It is one file without a name, so it goes when the last process does. The images of an epoch lie in
an area of their own, behind a table of where each of them is. No place in the file is used twice,
so a place says which area is meant; one that is given back reads as zeros, never as other images.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings

import numpy
from numpy.typing import NDArray

from megabatch.data.decoded import FromPack
from megabatch.data.jpeg import Encoded, Pixels

Integers = NDArray[numpy.int64]

# As mmap.madvise, which would hold up other threads meanwhile.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Area:
    """Images in shared memory, by their number in the pack."""

    def __init__(self, place: int, memory: mmap.mmap) -> None:
        self.place, self.nbytes = place, len(memory)
        self._bytes = memoryview(memory)
        count = int(numpy.frombuffer(memory, numpy.int64, 1)[0])
        table = numpy.frombuffer(memory, numpy.int64, 3 * count, offset=8)
        self._numbers, self._begins, self._ends = table.reshape(3, count)

    def get(self, number: int) -> memoryview | None:
        row = int(self._numbers.searchsorted(number))
        if row == len(self._numbers) or self._numbers[row] != number:
            return None
        return self._bytes[self._begins[row] : self._ends[row]]


class Areas:
    """The file of all areas, in the process that receives the images."""

    def __init__(self) -> None:
        self.file = os.memfd_create("megabatch-received")
        self._end = 0

    def add(self, numbers: Integers, lengths: Integers) -> tuple[Area, Pixels]:
        """An area for these images, and the run of bytes that is to hold them, one after the
        other.

        Its memory is given back as soon as nothing of this process looks at it any more.
        """
        head = 8 + 3 * numbers.nbytes
        ends = head + numpy.cumsum(lengths)
        nbytes = head + int(lengths.sum())
        place, self._end = self._end, self._end + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.file, self._end)
        memory = _GivenBack(self.file, nbytes, offset=place)
        table = numpy.stack([numbers, ends - lengths, ends])[:, numpy.argsort(numbers)]
        memory[:head] = numpy.int64(len(numbers)).tobytes() + table.tobytes()
        return Area(place, memory), numpy.frombuffer(memory, numpy.uint8, offset=head)

    def close(self) -> None:
        os.close(self.file)


class _GivenBack(mmap.mmap):
    """Memory whose pages return to the system at its end, although the file stays and other
    processes may still map it."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        self._address = numpy.frombuffer(self, numpy.uint8).ctypes.data

    def __del__(self) -> None:
        if _madvise(self._address, len(self), mmap.MADV_REMOVE) != 0:
            reason = os.strerror(ctypes.get_errno())
            warnings.warn(f"memory of a past epoch stays taken: {reason}", stacklevel=1)


class FromArea:
    """Records of a pack, from the area that was turned to where it has them: for a process that is
    told with each piece of work where its images are."""

    checked = True
    separable = False

    def __init__(self, records: FromPack, file: int) -> None:
        self._records, self._file = records, file
        self._area: Area | None = None

    def turn_to(self, place: int, nbytes: int) -> None:
        """Look for images in this area from now on (of no bytes: in the pack alone)."""
        if nbytes == 0:
            self._area = None
        elif self._area is None or self._area.place != place:
            memory = mmap.mmap(self._file, nbytes, access=mmap.ACCESS_READ, offset=place)
            self._area = Area(place, memory)

    def record(self, index: int) -> Encoded | Pixels:
        found = self._area.get(index) if self._area else None
        return self._records.record(index) if found is None else whole(self._records, index, found)

    def name(self, index: int) -> str:
        return self._records.name(index)

    def will_need(self, indices: list[int]) -> None:
        area = self._area
        self._records.will_need([i for i in indices if area is None or area.get(i) is None])


def whole(records: FromPack, index: int, found: memoryview) -> Encoded | Pixels:
    """An image that was received, once its checksum is found right."""
    records.pack.check(index, found)
    return records.shaped(found)
