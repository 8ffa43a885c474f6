"""The loader: a step of the run -> this worker's micro-batches, read ahead in the background.

The stream of micro-batches is endless and belongs to nobody: micro-batch m holds the images at
positions [m * micro, (m + 1) * micro). Which of them a worker reads is decided by the step alone,
so any number of workers reads the same batches and any position is reached at once.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.batch import Step, deal, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.augment import finish, normalise
from megabatch.data.crop import crop_draws
from megabatch.data.placement import place, place_validation, threads_of
from megabatch.data.reader import Pending, Reader
from megabatch.data.source import Source
from megabatch.keyed import shuffled

_LEAST_AHEAD, _MOST_AHEAD = 2, 64
_MOST_AHEAD_BYTES = 256 << 20
_NOTICED_SECONDS = 1e-3


@dataclass(frozen=True)
class MicroBatch:
    images: Tensor
    """n x channels x size x size; on a GPU decoded ones lie in memory with the channels last"""
    labels: Tensor
    positions: Tensor
    first: int
    """the first position, on the host"""


class Loader:
    """Training images of one worker, augmented, on its device.

    `waited_seconds` is how long the training loop has waited for images so far, `busy_seconds` how
    long the reading threads have worked, all together.
    """

    def __init__(
        self, source: Source, config: Config, cluster: Cluster, dtype: torch.dtype
    ) -> None:
        self._config, self._cluster, self._dtype = config, cluster, dtype
        self._placed = place(source, config, cluster)
        self._source, self._device = self._placed.source, cluster.device
        on_gpu = self._device.type == "cuda"
        self._reader = Reader(
            self._source,
            threads_of(config, cluster),
            pinned=on_gpu,
            finish=None if on_gpu else (self._finish, dtype),
        )
        self._side = torch.cuda.Stream(self._device) if on_gpu else None
        self._ahead = _LEAST_AHEAD
        nbytes = 4 * config.micro * config.data.channels * config.data.size**2
        self._most_ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, _MOST_AHEAD_BYTES // nbytes))
        self._reading: dict[int, Pending] = {}
        self._prepared: dict[int, MicroBatch] = {}
        self.waited_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        return self._reader.busy_seconds

    @property
    def threads(self) -> int:
        return self._reader.threads

    def share(self, step: Step) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step, while those of the next steps are being read."""
        self._placed.begin(step)
        mine = len(self._dealt(step))
        wanted = list(itertools.islice(self._coming(step), mine + self._ahead))
        for stale in self._reading.keys() - set(wanted):
            self._reading.pop(stale).cancel()
        for stale in self._prepared.keys() - set(wanted):
            del self._prepared[stale]
        for turn, micro in enumerate(wanted[:mine]):
            following = wanted[turn + 1 : turn + 1 + self._ahead]
            self._read_ahead([micro, *following])
            now = self._prepared.pop(micro, None) or self._prepare(micro)
            # On a GPU the next one is copied and augmented beside the present one's work.
            if self._side is not None and following and self._reading[following[0]].done():
                self._prepared[following[0]] = self._prepare(following[0])
            yield self._handed_over(now)

    def _dealt(self, step: Step) -> range:
        """This worker's micro-batches of a step, as places in the stream."""
        first, count = step.seen // self._config.micro, step.batch // self._config.micro
        begin, end = deal(count, self._cluster.world)[self._cluster.rank]
        return range(first + begin, first + end)

    def _coming(self, step: Step) -> Iterator[int]:
        """All micro-batches of this worker from a step on, to the end of the run."""
        config = self._config
        run = steps(config.all_stages, len(self._source), config.epochs, step.index, step.seen)
        # A step may be asked for that the plan has not (a batch that follows the noise, say).
        later = (s for s in run if s.seen >= step.seen + step.batch)
        return itertools.chain.from_iterable(self._dealt(s) for s in itertools.chain([step], later))

    def _read_ahead(self, wanted: list[int]) -> None:
        for micro in wanted:
            if micro not in self._reading and micro not in self._prepared:
                positions = self._positions(micro)
                indices = shuffled(self._config.seed, positions, len(self._source))
                draws = crop_draws(self._config.seed, positions)
                self._reading[micro] = self._reader.submit(indices, positions, draws)

    def _positions(self, micro: int) -> Tensor:
        return torch.arange(micro * self._config.micro, (micro + 1) * self._config.micro)

    def _prepare(self, micro: int) -> MicroBatch:
        """Wait for a micro-batch; on the device: augmentation, and numbers instead of bytes."""
        positions = self._positions(micro)
        with torch.cuda.stream(self._side) if self._side else contextlib.nullcontext():
            pending = self._reading.pop(micro)
            began = time.perf_counter()
            images, labels = pending.result()
            waited = time.perf_counter() - began
            self.waited_seconds += waited
            if waited > _NOTICED_SECONDS:
                self._ahead = min(self._ahead + 1, self._most_ahead)
            if self._side is not None:
                positions = positions.pin_memory()
                labels = labels if labels.is_cuda else labels.pin_memory()
            images, labels, positions = (
                t.to(self._device, non_blocking=True) for t in (images, labels, positions)
            )
            images = self._finish(images, positions)
        return MicroBatch(images, labels, positions, micro * self._config.micro)

    def _finish(self, images: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        data, seed, source = self._config.data, self._config.seed, self._source
        return finish(images, positions, data, seed, source.mean, source.std, self._dtype, out)

    def _handed_over(self, batch: MicroBatch) -> MicroBatch:
        """From the side stream to the one that trains."""
        if self._side is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_stream(self._side)
            for tensor in (batch.images, batch.labels, batch.positions):
                tensor.record_stream(training)
        return batch

    def close(self) -> None:
        self._reader.close()
        self._placed.close()


def validation(
    source: Source, config: Config, cluster: Cluster, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of the validation images: over all workers each image exactly once."""
    source = place_validation(source, config, cluster)
    count = -(-len(source) // config.micro)
    reader = Reader(source, threads_of(config, cluster), cluster.device.type == "cuda")
    waiting: deque[Pending] = deque()
    try:
        for micro in range(*deal(count, cluster.world)[cluster.rank]):
            end = min((micro + 1) * config.micro, len(source))
            indices = torch.arange(micro * config.micro, end)
            waiting.append(reader.submit(indices, indices, None))
            if len(waiting) > _LEAST_AHEAD:
                yield _finished(waiting.popleft(), source, cluster, dtype)
        while waiting:
            yield _finished(waiting.popleft(), source, cluster, dtype)
    finally:
        reader.close()


def _finished(
    pending: Pending, source: Source, cluster: Cluster, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    images, labels = (t.to(cluster.device, non_blocking=True) for t in pending.result())
    return normalise(images, source.mean, source.std, dtype), labels
