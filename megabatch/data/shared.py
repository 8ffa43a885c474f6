"""A pack shared out over the memory of all workers: each holds a part, and before an epoch receives
exactly the images it will be dealt.

Storage is read once, but for validation and steps that nobody could foresee. Who is dealt which
image is arithmetic that every worker can do for itself, so an exchange is two collective calls: who
wants what, and the bytes. They arrive in a file without a name that decoding processes see too. The
images of an epoch lie in an area of their own, behind a table of where each of them is; no place in
the file is used twice, and one that is given back reads as zeros, never as other images.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megabatch.batch import Step, count_steps, dealt, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.decoded import Decoded, FromPack
from megabatch.data.jpeg import Encoded, Pixels
from megabatch.data.packs.reading import Arena, Pack
from megabatch.elastic.connecting import connecting
from megabatch.host.granted import memory
from megabatch.keyed import shuffled

Integers = NDArray[numpy.int64]

_ROUND_BYTES = 256 << 20
_SHARE_OF_MEMORY = 0.5
"""of a node's free memory, that a pack may take"""


def share_out(source: Decoded, config: Config, cluster: Cluster) -> SharedOut | None:
    """The pack of a source in all workers' memory, if the config says so or one node's is too
    small."""
    wish, pack = config.data.shared, source.pack
    if pack is None or cluster.world == 1 or wish == "never":
        return None
    if wish == "auto":
        nodes = cluster.world / cluster.local_world

        def too_large_for_one_but_not_for_all() -> bool:
            known = memory()
            most = _SHARE_OF_MEMORY * (known.free if known is not None else 0)
            # Each worker holds its own share, and what it is dealt of two epochs.
            return pack.nbytes > most and 3 * pack.nbytes / nodes <= most

        # One node's memory is all there is, and the system's cache fills it by itself.
        if nodes <= 1 or not cluster.agree(too_large_for_one_but_not_for_all):
            return None
    return SharedOut(pack, source.chosen, config, cluster)


class SharedOut:
    """Records of a pack in the workers' memory. Every worker of the cluster makes one, tells it of
    each step, and closes it."""

    checked = True

    def __init__(self, pack: Pack, chosen: Tensor, config: Config, cluster: Cluster) -> None:
        self.pack, self._records = pack, FromPack(pack)
        self._config, self._cluster = config, cluster
        self._chosen: Integers = chosen.numpy()
        images, world, rank = len(chosen), cluster.world, cluster.rank
        self._lengths: Integers = pack.lengths()[self._chosen]
        # Worker w owns the places [bounds[w], bounds[w + 1]) of the set.
        self._bounds = numpy.array([images * worker // world for worker in range(world + 1)])
        owned = slice(self._bounds[rank], self._bounds[rank + 1])
        lengths = self._lengths[owned].tolist()
        self._own = torch.empty(sum(lengths), dtype=torch.uint8).split(lengths)
        for number, image in zip(self._chosen[owned].tolist(), self._own, strict=True):
            image.numpy()[:] = numpy.frombuffer(pack.record(number), numpy.uint8)
        self._total = count_steps(config.all_stages, images, config.epochs)[1]
        self._epochs: dict[int, Future[Area]] = {}
        self._thread = ThreadPoolExecutor(1, "exchange")
        self._areas = Areas()
        # A group and a thread of its own: the exchange runs under training, whose collectives
        # have another order.
        self._group: dist.ProcessGroup | None = None
        try:
            with connecting():
                self._group = dist.new_group(backend="gloo")
        except BaseException:
            self.close()
            raise

    @property
    def file(self) -> int:
        """Where the areas are, for other processes."""
        return self._areas.file

    def begin(self, step: Step) -> None:
        """Begin the exchanges for this step's epoch and the next, in the background.

        It hangs on the step alone, so all workers join in the same exchanges. What was received for
        past epochs is dropped: nothing before this step is read any more.
        """
        images = len(self._chosen)
        first, last = step.seen // images, (step.seen + step.batch - 1) // images
        for past in [epoch for epoch in self._epochs if epoch < first]:
            # To give back gigabytes takes a while too: it is done there, and before the next come.
            self._thread.submit(_drop, self._epochs.pop(past))
        for epoch in range(first, max(first + 1, last) + 1):
            if epoch not in self._epochs and epoch * images < self._total:
                self._epochs[epoch] = self._thread.submit(self._exchange, step, epoch)

    def by_epoch(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """The positions [first, last), cut where an epoch ends: from, to, epoch."""
        images = len(self._chosen)
        epochs = range(first // images, -(-last // images))
        return [(max(first, e * images), min(last, (e + 1) * images), e) for e in epochs]

    def received(self, epoch: int) -> bool:
        """Whether there is nothing to wait for before the images of an epoch are read."""
        if epoch in self._epochs:
            return self._epochs[epoch].done()
        to_come = epoch * len(self._chosen) < self._total and epoch > max(self._epochs, default=-1)
        return not to_come

    def area(self, epoch: int) -> Area | None:
        """The images of an epoch, once they are here; None if no step made known that they would be
        needed."""
        return self._epochs[epoch].result() if epoch in self._epochs else None

    def record(self, index: int, arena: Arena | None = None) -> Encoded | Pixels:
        # A copy of the list: the training loop drops epochs while threads look for images.
        for exchange in list(self._epochs.values()):
            found = exchange.result().get(index)
            if found is not None:
                return self._records.received(index, found)
        # A step that nobody could foresee: the pack is still there.
        return self._records.record(index, arena)

    def records(self, indices: list[int], arena: Arena) -> Iterable[Encoded | Pixels]:
        arena.clear()
        return (self.record(index, arena) for index in indices)

    def name(self, index: int) -> str:
        return self._records.name(index)

    def close(self) -> None:
        """End the exchanges, once those that have begun are over: the others take part in them."""
        self._thread.shutdown()
        self._epochs.clear()
        self._areas.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the background

    def _dealt(self, step: Step, epoch: int) -> Tensor:
        """This worker's images of an epoch, from a step on, as places in the set."""
        config, cluster, images = self._config, self._cluster, len(self._chosen)
        begin, end = epoch * images, (epoch + 1) * images
        ranges = [torch.arange(0)]
        for s in steps(config.all_stages, images, config.epochs, step.index, step.seen):
            if s.seen >= end:
                break
            mine = dealt(s, config.micro, cluster.rank, cluster.world)
            low, high = max(begin, mine.start * config.micro), min(end, mine.stop * config.micro)
            ranges.append(torch.arange(low, max(low, high)))
        return shuffled(config.seed, torch.cat(ranges), images)

    def _exchange(self, step: Step, epoch: int) -> Area:
        """Ask the owners of images for them, and answer the others."""
        rounds = max(1, -(-int(self._lengths.sum()) // (self._cluster.world * _ROUND_BYTES)))
        wanted = numpy.sort(self._dealt(step, epoch).numpy())  # owners hold ascending ranges
        some = [numpy.ascontiguousarray(wanted[number::rounds]) for number in range(rounds)]
        places = numpy.concatenate(some)
        area, memory = self._areas.add(self._chosen[places], self._lengths[places])
        incoming = torch.from_numpy(memory)
        for round_ in some:
            incoming = incoming[self._exchange_some(round_, incoming) :]
        return area

    def _exchange_some(self, places: Integers, incoming: Tensor) -> int:
        """Receive images, one after the other; returns their bytes."""
        world, rank = self._cluster.world, self._cluster.rank
        owners = numpy.searchsorted(self._bounds, places, "right") - 1
        to_ask = numpy.bincount(owners, minlength=world).tolist()
        to_answer = self._all_to_all(torch.tensor(to_ask), [1] * world, [1] * world).tolist()
        answers = self._all_to_all(torch.from_numpy(places), to_ask, to_answer).numpy()

        # One call for all images, during which the thread that trains is not held up.
        rows = (answers - self._bounds[rank]).tolist()
        outgoing = torch.cat([incoming[:0], *(self._own[row] for row in rows)])
        sent = _sums(self._lengths[answers], to_answer)
        received = _sums(self._lengths[places], to_ask)
        out = incoming[: sum(received)]
        dist.all_to_all_single(out, outgoing, received, sent, group=self._group)
        return len(out)

    def _all_to_all(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = tensor.new_empty(sum(received))
        dist.all_to_all_single(out, tensor, received, sent, group=self._group)
        return out


def _drop(exchange: Future[Area]) -> None:
    """The last to hold on to an exchange is the thread that runs this."""


def _sums(lengths: Integers, counts: list[int]) -> list[int]:
    """The bytes for each worker: sums of as many lengths as it has images."""
    ends = numpy.concatenate([[0], numpy.cumsum(lengths)])
    at = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(int)
    sums: list[int] = (ends[at[1:]] - ends[at[:-1]]).astype(int).tolist()
    return sums


# --- what was received --------------------------------------------------------------------------


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
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


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
    """Records of a pack, from the area that is looked in where it has them: for a process that
    learns with each piece of work where its images are."""

    checked = True

    def __init__(self, pack: Pack, file: int) -> None:
        self.pack, self._records, self._file = pack, FromPack(pack), file
        self._area: Area | None = None

    def look_in(self, place: int, nbytes: int) -> None:
        """Look for images in this area from now on (of no bytes: in the pack alone)."""
        if nbytes == 0:
            self._area = None
        elif self._area is None or self._area.place != place:
            self._area = None  # a past epoch's is given back before another is mapped
            memory = mmap.mmap(self._file, nbytes, access=mmap.ACCESS_READ, offset=place)
            self._area = Area(place, memory)

    def record(self, index: int, arena: Arena | None = None) -> Encoded | Pixels:
        found = self._area.get(index) if self._area else None
        if found is None:
            return self._records.record(index, arena)
        return self._records.received(index, found)

    def records(self, indices: list[int], arena: Arena) -> Iterable[Encoded | Pixels]:
        area = self._area
        missing = [index for index in indices if area is None or area.get(index) is None]
        read = dict(zip(missing, self._records.records(missing, arena), strict=True))
        return (read[index] if index in read else self.record(index, arena) for index in indices)

    def name(self, index: int) -> str:
        return self._records.name(index)
