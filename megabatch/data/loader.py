"""The loader: a step of the run -> this worker's micro-batches, read ahead in the background.

The stream of micro-batches is endless and belongs to nobody: micro-batch m holds the images at
positions [m * micro, (m + 1) * micro). Which of them a worker reads is decided by the step alone,
so any number of workers reads the same batches and any position is reached at once.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megabatch.batch import Step, dealt, steps
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.augment import finish, normalise
from megabatch.data.decoded import Decoded
from megabatch.data.pool import TRAINING, VALIDATION, Decoders
from megabatch.data.resident import make_resident
from megabatch.data.shared import SharedOut, share_out
from megabatch.data.slots import Buffer, Layout, form_of
from megabatch.data.source import Source
from megabatch.data.threads import FutureMicroBatch, Reader, ThreadReader, threads_of
from megabatch.errors import UserError
from megabatch.tree import deal

_LEAST_AHEAD, _MOST_AHEAD = 2, 64
_MOST_AHEAD_BYTES = 256 << 20
_NOTICED_SECONDS = 1e-3
_VALIDATION_AHEAD = 8
_COPIES = 2
"""micro-batches on their way to a GPU"""

_WORTH_PROCESSES = 50_000
"""images: to start processes takes about as long as to decode a few thousand"""


@dataclass(frozen=True)
class MicroBatch:
    images: Tensor
    """n x channels x size x size; decoded ones lie in memory with the channels last"""
    labels: Tensor
    positions: Tensor
    first: int
    """the first position, on the host"""


class StepLoader:
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
        self._closed = False
        self._ending = contextlib.ExitStack()
        self._config, self._cluster, self._dtype = config, cluster, dtype
        self._device = cluster.device
        self._val = val
        self.threads = threads_of(config, cluster)
        self._pinned = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if self._pinned else None
        self._copied: deque[tuple[torch.cuda.Event, Buffer]] = deque()
        data = config.data
        form = form_of(self._device)
        self._layout = Layout(form, config.micro, data.size, data.channels, dtype)
        most = _MOST_AHEAD_BYTES // self._layout.nbytes
        self._most_ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, most))
        self._ahead = _LEAST_AHEAD
        self._validation_ahead = min(_VALIDATION_AHEAD, self._most_ahead)
        self._reading: dict[int, FutureMicroBatch] = {}
        self._prepared: dict[int, MicroBatch] = {}
        self._begun = False
        self.waited_seconds = 0.0
        self._shared: SharedOut | None = None
        self._decoders: Decoders | None = None
        self._reader: Reader | None = None
        self._validator: Reader | None = None
        if train is None:
            return
        try:
            self._source = self._placed(train)
            if self._side is not None:  # what was put on the device is read on the side stream
                self._side.wait_stream(torch.cuda.current_stream(self._device))
            self._reader = self._reader_of(self._source, TRAINING)
        except BaseException:
            self._closed = True
            self._ending.close()
            raise

    def _placed(self, source: Source) -> Source:
        """The training images where they lie: on the device, in all workers' memory, or where they
        are."""
        config, data = self._config, self._config.data
        if source.resident:
            return source
        if not isinstance(source, Decoded) or source.pack is None:
            for name, wish in (("resident", data.resident), ("shared", data.shared)):
                if wish == "always":
                    raise UserError(f"data.{name} is for packs: make one with megabatch pack")
            return source.on(self._device)
        resident = make_resident(source, config, self._device, self.threads)
        if resident is not None:
            return resident
        self._shared = share_out(source, config, self._cluster)
        if self._shared is None:
            return source
        self._ending.callback(self._shared.close)
        return source.of(self._shared)

    @property
    def readers(self) -> str:
        """Who decodes the training images: processes, threads or nobody."""
        return "nobody" if self._reader is None or self._source.instant else self._reader.kind

    @property
    def busy_seconds(self) -> float:
        return self._reader.busy_seconds if self._reader else 0.0

    @property
    def core_seconds(self) -> float | None:
        """None for threads: their waits for storage and for the interpreter look alike."""
        return self._reader.core_seconds if self._reader else None

    # --- training

    def micro_batches(self, step: Step) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step, while those of the next steps are being read."""
        if self._shared is not None:
            self._shared.begin(step)
        mine = len(self._dealt(step))
        wanted = list(itertools.islice(self._coming(step), mine + self._ahead))
        for stale in self._reading.keys() - set(wanted):
            self._reading.pop(stale).cancel()
        for stale in self._prepared.keys() - set(wanted):
            del self._prepared[stale]
        for number, micro in enumerate(wanted[:mine]):
            following = wanted[number + 1 : number + 1 + self._ahead]
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
        assert self._reader is not None
        images = self._config.micro
        for micro in wanted:
            if micro not in self._reading and micro not in self._prepared:
                self._reading[micro] = self._reader.submit(micro * images, images)

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
            buffer = self._waited_for(self._reading.pop(micro))
            positions = torch.arange(first, first + count, device=self._device)
            images, labels = self._on_device(buffer)
            if images.dtype == torch.uint8:
                images = finish(
                    images, positions, data, self._config.seed, source.mean, source.std, self._dtype
                )
            else:  # numbers: a reader has finished them, or they are of the caller's own making
                images = images.to(self._dtype)
        return MicroBatch(images, labels, positions, first)

    def _waited_for(self, coming: FutureMicroBatch) -> Buffer:
        began = time.perf_counter()
        buffer = coming.result()
        waited = time.perf_counter() - began
        if self._begun and not self._source.instant:  # what the loop does itself is no waiting
            self.waited_seconds += waited
            if waited > _NOTICED_SECONDS:
                self._ahead = min(self._ahead + 1, self._most_ahead)
        self._begun = True
        return buffer

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
        if self._validator is None:
            if isinstance(self._val, Decoded):  # on the device too, where they fit
                resident = make_resident(self._val, self._config, self._device, self.threads)
                self._val = resident or self._val
            self._validator = self._reader_of(self._val, VALIDATION)
        source = self._val
        count = len(source)
        waiting: deque[FutureMicroBatch] = deque()
        try:
            for number in range(*deal(-(-count // micro), world)[self._cluster.rank]):
                first = number * micro
                waiting.append(self._validator.submit(first, min(micro, count - first)))
                if len(waiting) > self._validation_ahead:
                    yield self._validated(waiting.popleft(), source)
            while waiting:
                yield self._validated(waiting.popleft(), source)
        finally:
            for coming in waiting:  # of a caller that had enough
                coming.cancel()

    def _validated(self, coming: FutureMicroBatch, source: Source) -> tuple[Tensor, Tensor]:
        images, labels = self._on_device(coming.result())
        return normalise(images, source.mean, source.std, self._dtype), labels

    # --- both

    def _reader_of(self, source: Source, split: int) -> Reader:
        """Who reads a source: processes, where that pays, or threads."""
        config = self._config
        if self._decoders is None and self._by_processes(source):
            reading = self._most_ahead + 1 + self._validation_ahead + 1
            self._decoders = Decoders(
                config,
                self._layout,
                self.threads,
                reading,
                self._pinned,
                self._shared,
                source.left_out,
            )
            self._ending.callback(self._decoders.close)
        if self._decoders is not None and source.separable:
            return self._decoders.split(split)
        training = split == TRAINING
        reader = ThreadReader(source, config, self._layout, training, self.threads, self._pinned)
        self._ending.callback(reader.close)
        return reader

    def _by_processes(self, source: Source) -> bool:
        wish = self._config.data.processes
        if wish == "never" or not source.separable:
            return False
        to_read = len(source) * max(1.0, self._config.epochs) / self._cluster.world
        return wish == "always" or to_read >= _WORTH_PROCESSES

    def _on_device(self, buffer: Buffer) -> tuple[Tensor, Tensor]:
        """Images and labels where the model is, in bytes or numbers of the size it sees."""
        images, labels, shapes = buffer.images, buffer.labels, buffer.shapes
        if self._side is not None and buffer.memory is not None:
            memory = buffer.memory.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            # The host's memory may be used again when the copy is done, not when it is ordered.
            self._copied.append((copied, buffer))
            while len(self._copied) > _COPIES or (self._copied and self._copied[0][0].query()):
                self._copied[0][0].synchronize()
                self._copied.popleft()
            buffer = self._layout.views(memory, len(labels))
            # Labels of their own: they would keep all the bytes beside them.
            images, labels = buffer.images, buffer.labels.clone()
            shapes = buffer.shapes
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
        """End the threads and processes that read, and let go of their memory."""
        if self._copied:
            torch.cuda.synchronize(self._device)  # nothing may still be copied from the slots
            self._copied.clear()
        self._reading.clear()
        self._prepared.clear()
        self._closed = True
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            try:
                warnings.warn("a loader was not closed", ResourceWarning, source=self, stacklevel=2)
            finally:  # also where warnings are errors
                self.close()
