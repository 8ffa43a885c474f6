"""The loader of a run as a piece of its own: images and labels for anybody's loop.

An iteration is one pass over the training images, this worker's share of each global batch; any
number of workers sees the same batches, and `seen` is all there is to save and to go on from.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from megabatch.batch import Stage, step_at
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, check_setting
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.errors import UserError
from megabatch.workers.process import made_on_cpu

T = TypeVar("T")

_FOR_EVER = 1e6
"""epochs, of a loop whose end only its owner knows"""
_WORTH_PROCESSES = 1000
"""images: of fewer, to start processes that decode takes longer than to decode them"""


class Loader:
    """Augmented images on this worker's device, read ahead: `for images, labels in loader` is one
    epoch.

    `source` is the path of a folder or a pack, a `Data` with every setting of its own, or a
    map-style data set or two of (image, label). `batch` is the global batch, of which each worker
    gets an equal share. Images come as a model wants them: n x channels x size x size, mean and
    deviation taken out.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Data | Any,
        batch: int,
        *,
        size: int = 224,
        channels: int = 3,
        augment: bool = True,
        seed: int = 0,
        seen: int = 0,
        cluster: Cluster | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`augment`: random crops of 8 to 100 % and mirrored halves, where the source is a path;
        `seen`: begin after so many images, as saved from another loader of the same batch; every
        worker of the cluster makes one."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UserError(
                f"dtype is {dtype!r}: give one of torch's floating point, torch.float32 say"
            )
        cluster = Cluster.given(cluster)
        settings, own = _settings(source, size, channels, augment)
        check_setting(Config, "batch", batch)
        if batch % cluster.world:
            raise UserError(
                f"a batch of {batch} cannot be shared out evenly to {cluster.world} workers: give "
                f"a multiple of {cluster.world}"
            )
        images_per_worker = batch // cluster.world
        config = Config(
            model="own loop",
            epochs=_FOR_EVER,
            batch=batch,
            micro=images_per_worker,
            span=images_per_worker,
            seed=seed,
            data=settings,
        ).check()
        with made_on_cpu():
            train, val = open_sources(config, own, cluster)
        if settings.processes == "auto" and len(train) < _WORTH_PROCESSES:
            config = replace(config, data=replace(settings, processes="never"))
        self._batch, self._seen = batch, 0
        self.images = len(train)
        """an epoch"""
        self.held_out = len(val)
        """images of `validation`"""
        self.classes = train.classes
        self.class_names = train.class_names
        """by label; empty where they are not known"""
        self.seen = seen
        with made_on_cpu():
            self._loader = StepLoader(train, val, config, cluster, dtype)
        self._closed, self._process = False, os.getpid()

    @property
    def seen(self) -> int:
        """Images that all workers were given so far: what a checkpoint keeps."""
        return self._seen

    @seen.setter
    def seen(self, images: int) -> None:
        if not isinstance(images, numbers.Integral) or images < 0 or images % self._batch:
            raise UserError(
                f"seen is {images!r}, not a multiple of the batch, {self._batch}: give what a "
                f"loader of this batch said"
            )
        self._seen = int(images)

    @property
    def epoch(self) -> float:
        """Passes over the images so far, a float: what schedules are called with."""
        return self._seen / self.images

    def __len__(self) -> int:
        """Steps of an epoch; where the batch does not divide it, some have one fewer."""
        return -(-self.images // self._batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """To the end of the present epoch: after a `break` the rest of it comes. A batch across the
        end has images of both epochs."""
        end = (self._seen // self.images + 1) * self.images
        stages = (Stage(0.0, self._batch),)
        while self._seen < end:
            self._check()
            step = step_at(stages, self.images, self._seen // self._batch, self._seen)
            for micro in _brought(self._loader.micro_batches(step)):
                self._seen += self._batch
                yield micro.images, micro.labels

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of the images held out: over all workers each exactly once, so the
        last batches are smaller, and a worker may have none."""
        self._check()
        return _brought(self._loader.validation())

    def _check(self) -> None:
        """Refuse where nobody would bring the images."""
        if self._closed:
            raise UserError("the loader is closed: iterate inside its with block")
        # What reads stayed behind: a fork has no threads, and slots are one process's to take from.
        if os.getpid() != self._process:
            raise UserError(
                "the loader was made in another process, which reads for itself alone: make one "
                "where it is iterated, and no DataLoader with workers around it"
            )

    def close(self) -> None:
        """End the threads and processes that read."""
        if not self._closed:
            self._closed = True
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _brought(batches: Iterator[T]) -> Iterator[T]:
    """The same, each brought without regard to the caller's default device: theirs is the time
    between two of them."""
    while True:
        with made_on_cpu():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _settings(source: Any, size: int, channels: int, augment: bool) -> tuple[Data, Any]:
    """What the images are and how they are seen, and a caller's own set of them, if it is one."""
    if isinstance(source, Data):
        return source, None
    if source is None:
        raise UserError("the loader has no images: name a folder or a pack, or give a data set")
    plain = Data(size=size, channels=channels)
    if not isinstance(source, str | os.PathLike):
        return replace(plain, source="own"), source
    named = replace(plain, path=os.fspath(source))
    return (replace(named, crop_area=(0.08, 1.0), flip=True) if augment else named), None
