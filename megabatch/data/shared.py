"""A pack shared out over the memory of all workers: each holds a part, and before an epoch receives
exactly the images it will be dealt.

Storage is read once, but for validation and steps that nobody could foresee. Who is dealt which
image is arithmetic that every worker can do for itself, so an exchange is two collective calls: who
wants what, and the bytes. They arrive in memory that decoding processes can be pointed to.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.batch import Step, count_steps, dealt, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.decoded import FromPack
from megabatch.data.jpeg import Encoded, Pixels
from megabatch.data.received import Area, Areas, Integers, whole
from megabatch.keyed import shuffled

_ROUND_BYTES = 256 << 20


class SharedOut:
    """Records of a pack in the workers' memory. Every worker of the cluster makes one, tells it of
    each step, and closes it."""

    checked = True
    separable = True

    def __init__(self, records: FromPack, chosen: Tensor, config: Config, cluster: Cluster) -> None:
        self._records, self._config, self._cluster = records, config, cluster
        self._chosen: Integers = chosen.numpy()
        images, world, rank = len(chosen), cluster.world, cluster.rank
        self._lengths: Integers = records.pack.lengths()[self._chosen]
        # Worker w owns the places [bounds[w], bounds[w + 1]) of the set.
        self._bounds = numpy.array([images * worker // world for worker in range(world + 1)])
        owned = slice(self._bounds[rank], self._bounds[rank + 1])
        lengths = self._lengths[owned].tolist()
        self._own = torch.empty(sum(lengths), dtype=torch.uint8).split(lengths)
        for number, room in zip(self._chosen[owned].tolist(), self._own, strict=True):
            room.numpy()[:] = records.pack.record(number)
        self._total = count_steps(config.all_stages, images, config.epochs)[1]
        self._areas = Areas()
        # A group and a thread of its own: the exchange runs under training, whose collectives
        # have another order.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "exchange")
        self._epochs: dict[int, Future[Area]] = {}

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

    def record(self, index: int) -> Encoded | Pixels:
        # A copy of the list: the training loop drops epochs while threads look for images.
        for exchange in list(self._epochs.values()):
            found = exchange.result().get(index)
            if found is not None:
                return whole(self._records, index, found)
        # A step that nobody could foresee: the pack is still there.
        return self._records.record(index)

    def name(self, index: int) -> str:
        return self._records.name(index)

    def will_need(self, indices: list[int]) -> None:
        pass

    def close(self) -> None:
        self._thread.shutdown()
        self._epochs.clear()
        self._areas.close()

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
        turns = [numpy.ascontiguousarray(wanted[turn::rounds]) for turn in range(rounds)]
        places = numpy.concatenate(turns)
        area, room = self._areas.add(self._chosen[places], self._lengths[places])
        incoming = torch.from_numpy(room)
        for some in turns:
            incoming = incoming[self._exchange_some(some, incoming) :]
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
