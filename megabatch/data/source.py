"""Where images come from: a source reads images and labels by index, and knows nothing of workers.

A source gives uint8 images, cropped to the size the model sees by the draws it is handed (none: the
evaluation crop), or float images that are taken as they are. The loader does the rest.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor

from megabatch.config import Config
from megabatch.data.room import Room
from megabatch.errors import UserError
from megabatch.keyed import Purpose, keyed


class Source(Protocol):
    """Images by index. `mean` and `std` are of the channels, on a scale of 0 to 1; an `instant`
    source is not worth a thread."""

    instant: bool

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int: ...

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Images (n, channels, size, size) and labels (n,); row i of draws is image i's
        randomness."""
        ...


@runtime_checkable
class Fills(Source, Protocol):
    """A source of bytes that reads into room of the caller's, in pieces."""

    def fill(self, room: Room, indices: Tensor, draws: Tensor | None) -> None: ...


class Memory:
    """Images that are in memory, all of one size."""

    instant = True

    def __init__(self, images: Tensor, labels: Tensor, classes: int) -> None:
        self.images, self.labels, self.classes = images, labels, classes
        channels = images.shape[1]
        self.mean, self.std = (0.5,) * channels, (0.25,) * channels

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class Part:
    """Some images of a source."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source, self._indices = source, indices
        self.classes, self.mean, self.std = source.classes, source.mean, source.std
        self.instant = source.instant

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._source.read(self._indices[indices], draws)


class MapStyle:
    """Anyone's map-style data set: items are (image, label), an image a tensor, an array or
    PIL's."""

    instant = False
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)

    def __init__(self, dataset: Any, classes: int) -> None:
        self._dataset = dataset
        self.classes = len(getattr(dataset, "classes", ())) or classes

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        items = [self._dataset[index] for index in indices.tolist()]
        images = torch.stack([_as_image(image) for image, *_ in items])
        return images, torch.tensor([int(label) for _, label, *_ in items])


def _as_image(image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image
    array = numpy.asarray(image)
    if array.dtype == numpy.uint8 and array.ndim == 2:  # PIL's grey
        array = array[None]
    elif array.dtype == numpy.uint8 and array.ndim == 3 and array.shape[2] in (1, 3):  # PIL's RGB
        array = array.transpose(2, 0, 1)
    return torch.from_numpy(numpy.ascontiguousarray(array))


def hold_out_order(count: int, share: float) -> tuple[Tensor, Tensor]:
    """The images to train on and those held out, chosen by hash: the same whatever the run's
    seed."""
    order = torch.as_tensor(keyed(0, Purpose.HOLD_OUT, torch.arange(count))).argsort(stable=True)
    held = round(share * count)
    if not 0 < held < count:
        raise UserError(
            f"a share of {share:g} of {count} images leaves nothing to hold out or to train on: "
            f"change the share that is held out for validation"
        )
    return order[held:].sort().values, order[:held].sort().values


def hold_out(source: Source, share: float) -> tuple[Source, Source]:
    """Two parts of a source, the second a share of its images."""
    train, val = hold_out_order(len(source), share)
    return Part(source, train), Part(source, val)


def open_sources(config: Config, data: Any = None) -> tuple[Source, Source]:
    """The training and the validation images of a run; `data` is a caller's own set, or two of
    them."""
    if data is not None:
        if isinstance(data, tuple | list) and len(data) == 2:
            train, val = (MapStyle(part, config.data.classes) for part in data)
            return train, val
        return hold_out(MapStyle(data, config.data.classes), config.data.val_share)
    kind = config.data.kind
    if config.data.local_copy and kind != "pack":
        raise UserError(
            "data.local_copy copies packs, but the images are no pack: make one with megabatch pack"
        )
    if kind in ("pack", "folder") and config.data.path == "":
        raise UserError(
            "no images were named: give --data.path a pack (FILE.arrow), or a folder with "
            "train/CLASS/ and val/CLASS/"
        )
    if kind in ("pack", "folder"):
        from megabatch.data.decoded import open_pack, open_published

        return open_pack(config) if kind == "pack" else open_published(config)
    if kind == "own":
        raise UserError(
            "data.source is own but no data was given: megabatch.train(config, data=...)"
        )
    from megabatch.data import builtin

    whole = builtin.digits(config.data) if kind == "digits" else builtin.synthetic(config)
    return hold_out(whole, config.data.val_share)
