"""A pack shared out over the memory of all workers: each holds a part, and before an epoch receives
exactly the images it will be dealt.

Storage is read once in the whole run. Who is dealt which image is arithmetic that every worker can
do for itself, so an exchange is two collective calls: who wants what, and the bytes.
"""

from __future__ import annotations

import bisect
from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.batch import Step, count_steps, deal, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.decode import Encoded, Pixels
from megabatch.data.decoded import FromPack
from megabatch.keyed import shuffled

_ROUND_BYTES = 256 << 20

Received = dict[int, memoryview]
"""number in the pack -> bytes"""


class SharedOut:
    """Records of a pack in the workers' memory. Every worker of the cluster makes one, tells it of
    each step, and closes it."""

    checked = True
    separable = False

    def __init__(self, records: FromPack, chosen: Tensor, config: Config, cluster: Cluster) -> None:
        self._records, self._chosen = records, chosen.numpy()
        self._config, self._cluster = config, cluster
        images = len(chosen)
        self._bounds = [images * worker // cluster.world for worker in range(cluster.world + 1)]
        own = self._chosen[self._bounds[cluster.rank] : self._bounds[cluster.rank + 1]]
        self._own = {number: bytes(records.pack.record(number)) for number in own.tolist()}
        self._total = count_steps(config.all_stages, images, config.epochs)[1]
        # A group and a thread of its own: the exchange runs under training, whose collectives
        # have another order.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "exchange")
        self._epochs: dict[int, Future[Received]] = {}

    def begin(self, step: Step) -> None:
        """Begin the exchange for the epoch after this step's, in the background.

        It hangs on the step alone, so all workers join in the same exchanges.
        """
        images = len(self._chosen)
        first, last = step.seen // images, (step.seen + step.batch - 1) // images
        for past in [epoch for epoch in self._epochs if epoch < first]:
            del self._epochs[past]
        for epoch in range(first, last + 2):
            if epoch not in self._epochs and epoch * images < self._total:
                wanted = self._dealt(step, epoch)
                self._epochs[epoch] = self._thread.submit(self._exchange, wanted)

    def record(self, index: int) -> Encoded | Pixels:
        for epoch in sorted(self._epochs):
            found = self._epochs[epoch].result().get(index)
            if found is not None:
                self._records.pack.check(index, found)
                return self._records.shaped(found)
        # A step that nobody could foresee: the pack is still there.
        return self._records.record(index)

    def name(self, index: int) -> str:
        return self._records.name(index)

    def will_need(self, indices: list[int]) -> None:
        pass

    def close(self) -> None:
        self._thread.shutdown()

    def _dealt(self, step: Step, epoch: int) -> Tensor:
        """This worker's images of an epoch, from a step on, as places in the set."""
        config, images = self._config, len(self._chosen)
        begin, end = epoch * images, (epoch + 1) * images
        ranges = []
        for s in steps(config.all_stages, images, config.epochs, step.index, step.seen):
            if s.seen >= end:
                break
            first, last = deal(s.batch // config.micro, self._cluster.world)[self._cluster.rank]
            low = max(begin, s.seen + first * config.micro)
            high = min(end, s.seen + last * config.micro)
            ranges.append(torch.arange(low, max(low, high)))
        positions = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
        return shuffled(config.seed, positions, images)

    def _exchange(self, wanted: Tensor) -> Received:
        """Ask the owners of images for them, and answer the others."""
        total = sum(self._records.pack.lengths()[self._chosen].tolist())
        rounds = max(1, -(-total // (self._cluster.world * _ROUND_BYTES)))
        received: Received = {}
        for turn in range(rounds):
            received |= self._exchange_some(wanted[turn::rounds])
        return received

    def _exchange_some(self, wanted: Tensor) -> Received:
        world, lengths = self._cluster.world, self._records.pack.lengths()
        places = numpy.sort(wanted.numpy())  # owners hold ascending ranges
        owners = [bisect.bisect_right(self._bounds, place) - 1 for place in places.tolist()]
        asked = torch.from_numpy(self._chosen[places])
        to_ask = numpy.bincount(owners, minlength=world).tolist()
        to_answer = self._all_to_all(torch.tensor(to_ask), [1] * world, [1] * world).tolist()
        answers = self._all_to_all(asked, to_ask, to_answer).tolist()

        data = b"".join(self._own[number] for number in answers)
        outgoing = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _nothing()
        sent = _sums(lengths[answers], to_answer)
        incoming = self._all_to_all(outgoing, sent, _sums(lengths[asked.numpy()], to_ask))
        view, received, at = incoming.numpy().data, {}, 0
        for number in asked.tolist():
            received[number] = view[at : at + int(lengths[number])]
            at += int(lengths[number])
        return received

    def _all_to_all(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = tensor.new_empty(sum(received))
        dist.all_to_all_single(out, tensor, received, sent, group=self._group)
        return out


def _sums(lengths: numpy.ndarray, counts: list[int]) -> list[int]:
    """The bytes for each worker: sums of as many lengths as it has images."""
    ends = numpy.concatenate([[0], numpy.cumsum(lengths)])
    at = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(int)
    sums: list[int] = (ends[at[1:]] - ends[at[:-1]]).astype(int).tolist()
    return sums


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
