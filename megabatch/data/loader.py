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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megabatch.batch import Step, dealt, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.augment import finish, normalise
from megabatch.data.placement import (
    by_processes,
    place,
    place_validation,
    separable,
    shared_out,
    threads_of,
)
from megabatch.data.pool import TRAINING, VALIDATION, Decoders, DecodersPart
from megabatch.data.room import Layout, Room, form_of
from megabatch.data.source import Source
from megabatch.data.threads import Pending, Reader
from megabatch.tree import deal

_LEAST_AHEAD, _MOST_AHEAD = 2, 64
_MOST_AHEAD_BYTES = 256 << 20
_NOTICED_SECONDS = 1e-3
_VALIDATION_AHEAD = 8
_COPIES = 2
"""micro-batches on their way to a GPU"""

Submit = Callable[[int, int], Pending]
"""position of the first image, how many -> the micro-batch on its way"""


@dataclass(frozen=True)
class MicroBatch:
    images: Tensor
    """n x channels x size x size; decoded ones lie in memory with the channels last"""
    labels: Tensor
    positions: Tensor
    first: int
    """the first position, on the host"""


class Loader:
    """Images of one worker on its device: of training, augmented, and of validation.

    `waited_seconds` is how long the training loop has waited for images so far (the first
    micro-batch, which nobody could read ahead, does not count), `busy_seconds` how long the reading
    threads or processes have worked, all together, `core_seconds` how much of that on a core or
    waiting for one.
    """

    def __init__(
        self,
        train: Source | None,
        val: Source | None,
        config: Config,
        cluster: Cluster,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._cluster, self._dtype = config, cluster, dtype
        self._device = cluster.device
        self._val = val
        self.threads = threads_of(config, cluster)
        self._pinned = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if self._pinned else None
        self._copied: deque[tuple[torch.cuda.Event, Room]] = deque()
        data = config.data
        form = form_of(self._device)
        self._layout = Layout(form, config.micro, data.size, data.channels, dtype)
        most = _MOST_AHEAD_BYTES // self._layout.nbytes
        self._most_ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, most))
        self._ahead = _LEAST_AHEAD
        self._validation_ahead = min(_VALIDATION_AHEAD, self._most_ahead)
        self._reading: dict[int, Pending] = {}
        self._prepared: dict[int, MicroBatch] = {}
        self._begun = False
        self.waited_seconds = 0.0

        self._ending = contextlib.ExitStack()
        self._decoders: Decoders | None = None
        self._reader: Reader | DecodersPart | None = None
        self._validate: Submit | None = None
        if train is not None:
            placed = place(train, config, cluster)
            self._ending.callback(placed.close)
            self._begin, self._source = placed.begin, placed.source
            if self._side is not None:  # what was put on the device is read on the side stream
                self._side.wait_stream(torch.cuda.current_stream(self._device))
            self._submit = self._submit_to(placed.source, TRAINING)

    @property
    def readers(self) -> Literal["processes", "threads", "gpu", "nobody"]:
        """Who decodes the training images."""
        if self._source.instant:
            return "nobody"
        if isinstance(self._reader, DecodersPart):
            return "processes"
        return "gpu" if getattr(self._source, "on_gpu", False) else "threads"

    @property
    def busy_seconds(self) -> float:
        return self._reader.busy_seconds if self._reader else 0.0

    @property
    def core_seconds(self) -> float | None:
        """None for threads: their waits for storage and for the interpreter look alike."""
        return self._reader.core_seconds if isinstance(self._reader, DecodersPart) else None

    # --- training

    def share(self, step: Step) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step, while those of the next steps are being read."""
        self._begin(step)
        mine = len(self._dealt(step))
        wanted = list(itertools.islice(self._coming(step), mine + self._ahead))
        for stale in self._reading.keys() - set(wanted):
            self._reading.pop(stale).cancel()
        for stale in self._prepared.keys() - set(wanted):
            del self._prepared[stale]
        for turn, micro in enumerate(wanted[:mine]):
            following = wanted[turn + 1 : turn + 1 + self._ahead]
            self._read_ahead([micro, *following])
            prepared = self._prepared.pop(micro, None)
            now = self._handed_over(prepared or self._prepare(micro))
            if self._side is not None and following:
                self._prepare_if_there(following[0])
            yield now

    def _dealt(self, step: Step) -> range:
        """This worker's micro-batches of a step, as places in the stream."""
        return dealt(step, self._config.micro, self._cluster.rank, self._cluster.world)

    def _coming(self, step: Step) -> Iterator[int]:
        """All micro-batches of this worker from a step on, to the end of the run."""
        config = self._config
        batch = step.batch if config.noise.follow else None
        run = steps(
            config.all_stages, len(self._source), config.epochs, step.index, step.seen, batch
        )
        # A step may be asked for that the plan has not.
        later = (s for s in run if s.seen >= step.seen + step.batch)
        return itertools.chain.from_iterable(self._dealt(s) for s in itertools.chain([step], later))

    def _read_ahead(self, wanted: list[int]) -> None:
        micro_size = self._config.micro
        for micro in wanted:
            if micro not in self._reading and micro not in self._prepared:
                self._reading[micro] = self._submit(micro * micro_size, micro_size)

    def _prepare_if_there(self, micro: int) -> None:
        """On a GPU the next one is copied and augmented beside the present one's work."""
        if micro not in self._prepared and self._reading[micro].done():
            self._prepared[micro] = self._prepare(micro)

    def _prepare(self, micro: int) -> MicroBatch:
        """Wait for a micro-batch; on the device: augmentation, and numbers instead of bytes."""
        first, count = micro * self._config.micro, self._config.micro
        data, source = self._config.data, self._source
        # All of it on the side stream: a resident source launches its kernels here.
        with torch.cuda.stream(self._side):
            room = self._waited_for(self._reading.pop(micro))
            positions = torch.arange(first, first + count, device=self._device)
            images, labels = self._on_device(room)
            images = finish(
                images, positions, data, self._config.seed, source.mean, source.std, self._dtype
            )
        return MicroBatch(images, labels, positions, first)

    def _waited_for(self, pending: Pending) -> Room:
        began = time.perf_counter()
        room = pending.result()
        waited = time.perf_counter() - began
        if self._begun and not self._source.instant:  # what the loop does itself is no waiting
            self.waited_seconds += waited
            if waited > _NOTICED_SECONDS:
                self._ahead = min(self._ahead + 1, self._most_ahead)
        self._begun = True
        return room

    def _handed_over(self, batch: MicroBatch) -> MicroBatch:
        """From the side stream to the one that trains."""
        if self._side is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_stream(self._side)
            for tensor in (batch.images, batch.labels, batch.positions):
                tensor.record_stream(training)
        return batch

    # --- validation

    @property
    def validation_images(self) -> int:
        return 0 if self._val is None else len(self._val)

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of the validation images: over all workers each image exactly once."""
        assert self._val is not None
        micro, world = self._config.micro, self._cluster.world
        if self._validate is None:
            self._val = place_validation(self._val, self._config, self._cluster)
            self._validate = self._submit_to(self._val, VALIDATION)
        source = self._val
        count = len(source)
        waiting: deque[Pending] = deque()
        try:
            for number in range(*deal(-(-count // micro), world)[self._cluster.rank]):
                first = number * micro
                waiting.append(self._validate(first, min(micro, count - first)))
                if len(waiting) > self._validation_ahead:
                    yield self._validated(waiting.popleft(), source)
            while waiting:
                yield self._validated(waiting.popleft(), source)
        finally:
            for pending in waiting:  # of a caller that had enough
                pending.cancel()

    def _validated(self, pending: Pending, source: Source) -> tuple[Tensor, Tensor]:
        images, labels = self._on_device(pending.result())
        return normalise(images, source.mean, source.std, self._dtype), labels

    # --- both

    def _submit_to(self, source: Source, part: int) -> Submit:
        """Who reads a source: processes, where that pays, or threads."""
        config, cluster = self._config, self._cluster
        if by_processes(source, config, cluster) or (self._decoders and separable(source)):
            if self._decoders is None:
                reading = self._most_ahead + 1 + self._validation_ahead + 1
                self._decoders = Decoders(
                    config, self._layout, self.threads, reading, self._pinned, shared_out(source)
                )
                self._ending.callback(self._decoders.close)
            reader: Reader | DecodersPart = self._decoders.part(part)
        else:
            layout, training = self._layout, part == TRAINING
            reader = Reader(source, config, layout, training, self.threads, self._pinned)
            self._ending.callback(reader.close)
        if part == TRAINING:
            self._reader = reader
        return reader.submit

    def _on_device(self, room: Room) -> tuple[Tensor, Tensor]:
        """Images and labels where the model is, in bytes or numbers of the size it sees."""
        images, labels, shapes = room.images, room.labels, room.shapes
        if self._side is not None and room.memory is not None:
            memory = room.memory.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            # The host's memory may be used again when the copy is done, not when it is ordered.
            self._copied.append((copied, room))
            while len(self._copied) > _COPIES or (self._copied and self._copied[0][0].query()):
                self._copied[0][0].synchronize()
                self._copied.popleft()
            room = self._layout.views(memory, len(labels))
            # Labels of their own: they would keep all the bytes beside them.
            images, labels, shapes = room.images, room.labels.clone(), room.shapes
        elif self._side is not None:
            labels = labels if labels.is_cuda else labels.pin_memory()
            if images.is_cuda:  # of another stream's making
                images.record_stream(torch.cuda.current_stream(self._device))
            images, labels = (t.to(self._device, non_blocking=True) for t in (images, labels))
        if shapes is not None:
            from megabatch.kernels.resize import resize_crops

            images = resize_crops(images, shapes, self._config.data.size, self._layout.channels)
        return images, labels

    def close(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self._device)  # nothing may still be copied from the slots
            self._copied.clear()
        self._reading.clear()
        self._prepared.clear()
        self._ending.close()
