"""A source of images that must be decoded: a folder, a data set as it was published, or a pack.

It can be read in pieces into room of the caller's, by as many threads and processes as there are.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor

from megabatch.config import Config, Data
from megabatch.data.crop import bring_to_size, choose_boxes, reduction
from megabatch.data.jpeg import BadImage, Encoded, Head, Pixels, Scratch, head_of, region
from megabatch.data.origins import Origin, open_origin
from megabatch.data.packfile import Pack, PackError
from megabatch.data.room import Layout, Room
from megabatch.data.source import Source, hold_out_order
from megabatch.data.stage import staged
from megabatch.errors import UserError

# Of ImageNet; the usual figures for photographs.
_COLOUR = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY = (0.45,), (0.225,)
# The weights of red, green and blue in grey, in 65536ths, as Pillow has them.
_LUMA = numpy.array([19595, 38470, 7471], numpy.uint32)


class Records(Protocol):
    """Images as they are stored, by index; `checked` ones were whole when they were stored and have
    not changed since."""

    checked: bool
    separable: bool
    """another process can open them too"""

    def record(self, index: int) -> Encoded | Pixels: ...

    def name(self, index: int) -> str: ...

    def will_need(self, indices: list[int]) -> None: ...


class Decoded:
    """Some images of records, cropped to the size that the model sees while they are decoded."""

    instant = False

    def __init__(
        self, data: Data, records: Records, chosen: Tensor, labels: Tensor, classes: int
    ) -> None:
        self.data, self.records, self.chosen = data, records, chosen
        self.labels, self.classes = labels, classes
        self.mean: tuple[float, ...]
        self.std: tuple[float, ...]
        self.mean, self.std = _COLOUR if data.channels == 3 else _GREY
        self.resident: Source | None = None
        """the same images on the device, once they are there"""
        self._scratch = Scratch()
        # Which images were found whole earlier, by this process or one that was forked off it.
        self._whole = None if records.checked else _shared_flags(len(chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def stored_size(self) -> int | None:
        """The shortest side a JPEG pack was made with (0: untouched; None: no JPEG pack)."""
        pack = getattr(self.records, "pack", None)
        return None if pack is None else pack.about.encoding.get("size")

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        layout = Layout("bytes", len(indices), self.data.size, self.data.channels)
        room = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8), len(indices))
        self.fill(room, indices, draws)
        return room.images, room.labels

    def fill(self, room: Room, indices: Tensor, draws: Tensor | None) -> None:
        """Read images, cropped, into room for bytes or for crops, and their labels."""
        places, numbers = indices.tolist(), self.chosen[indices].tolist()
        self.records.will_need(numbers)
        number = -1
        try:
            stored, heads = [], []
            for number in numbers:
                image = self.records.record(number)
                stored.append(image)
                heads.append(_head(image))
            heights, widths, _ = numpy.array(heads).T
            boxes = choose_boxes(self.data, heights, widths, draws).tolist()
            for row in range(len(numbers)):
                number = numbers[row]  # whose name an error will say
                part = self._part(places[row], stored[row], heads[row], boxes[row])
                if room.shapes is None:
                    bring_to_size(part, room.images[row])
                else:
                    room.shapes[row] = self._put(part, room.images[row])
        except BadImage as error:
            raise UserError(
                f"the image {self.records.name(number)} cannot be read ({error}): "
                f"repair or remove it"
            ) from error
        room.labels.copy_(self.labels[indices])

    def _part(self, place: int, image: Encoded | Pixels, head: Head, box: list[int]) -> Pixels:
        channels = self.data.channels
        if isinstance(image, numpy.ndarray):
            left, upper, right, lower = box
            return with_channels(image[upper:lower, left:right], channels)
        factor = reduction(box, self.data.size)
        trusted = self._whole is None or bool(self._whole[place])
        part = region(image, head, box, channels, factor, self._scratch, trusted)
        if self._whole is not None:
            self._whole[place] = 1
        return part

    def _put(self, part: Pixels, out: Tensor) -> Tensor:
        """A crop as it is, or resized where it is too large; returns its height and width."""
        size, channels = self.data.size, self.data.channels
        if part.size > len(out):
            resized = out[: size * size * channels].view(size, size, channels)
            bring_to_size(part, resized.permute(2, 0, 1))
            return torch.tensor([size, size])
        out.numpy()[: part.size].reshape(part.shape)[...] = part
        return torch.tensor(part.shape[:2])


def _shared_flags(count: int) -> Pixels:
    """So many zeros, in memory that forked processes share."""
    return numpy.frombuffer(mmap.mmap(-1, max(1, count)), numpy.uint8)


def _head(image: Encoded | Pixels) -> Head:
    if isinstance(image, numpy.ndarray):
        return Head(image.shape[0], image.shape[1], False)
    return head_of(image)


def with_channels(image: Pixels, channels: int) -> Pixels:
    """Pixels as grey or as colour."""
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return image.repeat(3, axis=2)
    grey = ((image * _LUMA).sum(2, keepdims=True) + 0x8000) >> 16
    return grey.astype(numpy.uint8)


# --- what can be opened ------------------------------------------------------------------------


class FromOrigin:
    """A data set as it was published, read without packing it."""

    checked = False
    separable = True

    def __init__(self, origin: Origin, path: Path) -> None:
        self._origin, self._path = origin, path

    def record(self, index: int) -> Encoded | Pixels:
        try:
            return self._origin.read(index)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None

    def name(self, index: int) -> str:
        return f"{self._path}/{self._origin.name(index)}"

    def will_need(self, indices: list[int]) -> None:
        pass


class FromPack:
    """A pack; a raw one gives pixels at once."""

    checked = True
    separable = True

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        raw = pack.about.encoding.get("kind") == "raw"
        self.shape = pack.about.shape if raw else None
        if raw and (self.shape is None or (pack.lengths() != numpy.prod(self.shape)).any()):
            raise PackError(f"the raw pack {pack.path} is damaged: its images are not of one size")

    def record(self, index: int) -> Encoded | Pixels:
        return self.shaped(self.pack.record(index))

    def shaped(self, data: Encoded) -> Encoded | Pixels:
        if self.shape is None:
            return data
        return numpy.frombuffer(data, numpy.uint8).reshape(self.shape)

    def name(self, index: int) -> str:
        return f"{self.pack.path}/{self.pack.name(index)}"

    def will_need(self, indices: list[int]) -> None:
        self.pack.will_need(indices)


def open_pack(config: Config) -> tuple[Decoded, Decoded]:
    """The train and val parts of a pack, from node-local storage where that was asked for."""
    data = config.data
    pack = Pack(staged(Path(data.path), Path(data.local_copy)) if data.local_copy else data.path)
    for part in ("train", "val"):
        first, last = pack.about.splits.get(part, (0, 0))
        if first == last:
            raise PackError(f"the pack {data.path} has no {part} images: pack it again")
    labels = torch.from_numpy(pack.labels.astype(numpy.int64))
    records, classes = FromPack(pack), len(pack.about.classes)
    train, val = (
        Decoded(data, records, chosen, labels[chosen], classes)
        for chosen in (torch.arange(*pack.about.splits[part]) for part in ("train", "val"))
    )
    return train, val


def open_published(config: Config) -> tuple[Decoded, Decoded]:
    """The train and val parts of a folder or archive; a share is held out where there is no
    val."""
    data, path = config.data, Path(config.data.path)
    try:
        origin = open_origin(path)
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: check its permissions") from error
    labels = torch.from_numpy(origin.labels.astype(numpy.int64))
    if origin.train < len(labels):
        parts = torch.arange(origin.train), torch.arange(origin.train, len(labels))
    else:
        parts = hold_out_order(len(labels), data.val_share)
    records, classes = FromOrigin(origin, path), len(origin.classes)
    train, val = (Decoded(data, records, part, labels[part], classes) for part in parts)
    return train, val
