"""The loader: a step of the run -> this worker's micro-batches, read ahead in the background.

The stream of micro-batches is endless and belongs to nobody: micro-batch m holds the images at
positions [m * micro, (m + 1) * micro). Which of them a worker reads is decided by the step alone,
so any number of workers reads the same batches and any position is reached at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.batch import Step, deal
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.augment import augment, crop_draws, normalise
from megabatch.data.source import Source
from megabatch.keyed import shuffled


@dataclass(frozen=True)
class MicroBatch:
    images: Tensor
    labels: Tensor
    positions: Tensor
    first: int
    """the first position, on the host"""


class Loader:
    """Training images of one worker, augmented, on its device."""

    def __init__(
        self, source: Source, config: Config, cluster: Cluster, dtype: torch.dtype
    ) -> None:
        self._source, self._config, self._cluster = source, config, cluster
        self._device, self._dtype = cluster.device, dtype
        self._pool = ThreadPoolExecutor(config.data.threads, "reader")
        self._ahead = config.data.threads + 1
        self._reading: dict[int, Future[MicroBatch]] = {}

    def share(self, step: Step) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step.

        Reading goes on into the next step as if its batch were the same; where batch-size control
        changes it, what was read in vain is dropped.
        """
        count = step.batch // self._config.micro
        dealt = range(*deal(count, self._cluster.world)[self._cluster.rank])
        first = step.seen // self._config.micro
        wanted = [first + m for m in dealt] + [first + count + m for m in dealt]
        for stale in set(self._reading) - set(wanted):
            self._reading.pop(stale).cancel()
        for place in range(len(dealt)):
            for micro in wanted[place : place + self._ahead]:
                if micro not in self._reading:
                    self._reading[micro] = self._pool.submit(self._read, micro)
            yield self._prepare(self._reading.pop(wanted[place]).result())

    def _read(self, micro: int) -> MicroBatch:
        size, config = self._config.micro, self._config
        positions = torch.arange(micro * size, (micro + 1) * size)
        indices = shuffled(config.seed, positions, len(self._source))
        images, labels = self._source.read(indices, crop_draws(config.seed, positions))
        if self._device.type == "cuda":
            images, labels, positions = (t.pin_memory() for t in (images, labels, positions))
        return MicroBatch(images, labels, positions, micro * size)

    def _prepare(self, read: MicroBatch) -> MicroBatch:
        """On the device: augmentation of whole batches, and numbers instead of bytes."""
        images, labels, positions = (
            t.to(self._device, non_blocking=True)
            for t in (read.images, read.labels, read.positions)
        )
        if images.dtype == torch.uint8:
            images = augment(images, positions, self._config.data, self._config.seed)
        images = normalise(images, self._source.mean, self._source.std, self._dtype)
        return MicroBatch(images, labels, positions, read.first)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def validation(
    source: Source, config: Config, cluster: Cluster, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of the validation images: over all workers each image exactly once."""
    count = -(-len(source) // config.micro)
    for micro in range(*deal(count, cluster.world)[cluster.rank]):
        indices = torch.arange(micro * config.micro, min((micro + 1) * config.micro, len(source)))
        images, labels = (t.to(cluster.device) for t in source.read(indices, None))
        yield normalise(images, source.mean, source.std, dtype), labels
