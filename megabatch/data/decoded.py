"""A source of images that must be decoded: a folder, a data set as it was published, or a pack.

All that the host does to an image is done here, from its record to the model's numbers, into memory
of the caller's, by as many threads and processes as there are.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor

from megabatch.config import Config, Data
from megabatch.data.augment import finish, normalise
from megabatch.data.crop import choose_boxes
from megabatch.data.jpeg import BadImage, Encoded, Head, Pixels, Workspace, head_of, pixels, region
from megabatch.data.origins import Origin
from megabatch.data.packs.reading import Arena, Pack, PackError
from megabatch.data.slots import Buffer, Layout
from megabatch.data.source import Order, Source, Writer
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

    @property
    def pack(self) -> Pack | None: ...

    def record(self, index: int, arena: Arena | None = None) -> Encoded | Pixels: ...

    def records(self, indices: list[int], arena: Arena) -> Iterable[Encoded | Pixels]:
        """Several, in order; they are there until the thread asks for the next ones."""
        ...

    def name(self, index: int) -> str: ...


class Decoded(Source):
    """Some images of records, cropped to the size that the model sees while they are decoded."""

    separable = True

    def __init__(
        self,
        data: Data,
        records: Records,
        chosen: Tensor,
        labels: Tensor,
        classes: int,
        left_out: tuple[int, ...] = (),
        notes: tuple[str, ...] = (),
        class_names: Sequence[str] = (),
    ) -> None:
        self.data, self.records, self.chosen = data, records, chosen
        self.labels, self.classes = labels, classes
        self.left_out, self.notes = left_out, notes
        self.class_names = tuple(class_names)
        self.mean: tuple[float, ...]
        self.std: tuple[float, ...]
        self.mean, self.std = _COLOUR if data.channels == 3 else _GREY
        self._workspace, self._arena = Workspace(), Arena()
        # Which images were found whole earlier, by this process or one that was forked off it.
        self._found_intact = None if records.checked else _shared_flags(len(chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def pack(self) -> Pack | None:
        return self.records.pack

    @property
    def stored_size(self) -> int | None:
        return None if self.pack is None else self.pack.about.encoding.get("size")

    def of(self, records: Records) -> Decoded:
        """The same images, from other records."""
        return self._with(records, self.chosen, self.labels)

    def part(self, indices: Tensor) -> Decoded:
        return self._with(self.records, self.chosen[indices], self.labels[indices])

    def _with(self, records: Records, chosen: Tensor, labels: Tensor) -> Decoded:
        return Decoded(
            self.data,
            records,
            chosen,
            labels,
            self.classes,
            self.left_out,
            self.notes,
            self.class_names,
        )

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        layout = Layout("bytes", len(indices), self.data.size, self.data.channels)
        buffer = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8), len(indices))
        self.fill(buffer, indices, draws)
        return buffer.images, buffer.labels

    def writer(self, config: Config, layout: Layout, training: bool) -> Writer:
        return _Writer(self, config, layout, training).write

    def fill(self, buffer: Buffer, indices: Tensor, draws: Tensor | None) -> None:
        """Read images, cropped, into a buffer of bytes or of crops, and their labels."""
        places, numbers = indices.tolist(), self.chosen[indices].tolist()
        number = -1
        try:
            stored, heads = [], []
            coming = iter(self.records.records(numbers, self._arena))
            for number in numbers:  # noqa: B007 (whose name an error will say)
                image = next(coming)
                stored.append(image)
                heads.append(_head(image))
            heights, widths, _ = numpy.array(heads).T
            boxes = choose_boxes(self.data, heights, widths, draws).tolist()
            for row in range(len(numbers)):
                number = numbers[row]
                crop = self._crop(places[row], stored[row], heads[row], boxes[row])
                if buffer.shapes is None:
                    bring_to_size(crop, buffer.images[row])
                else:
                    buffer.shapes[row] = self._put(crop, buffer.images[row])
        except BadImage as error:
            raise UserError(
                f"the image {self.records.name(number)} cannot be read ({error}): "
                f"repair or remove it{self._way_out()}"
            ) from error
        buffer.labels.copy_(self.labels[indices])

    def _way_out(self) -> str:
        return "" if self.records.checked else ", or leave such images out with --data.skip-bad N"

    def _crop(self, place: int, image: Encoded | Pixels, head: Head, box: list[int]) -> Pixels:
        channels = self.data.channels
        if isinstance(image, numpy.ndarray):
            left, upper, right, lower = box
            return with_channels(image[upper:lower, left:right], channels)
        trusted = self._found_intact is None or bool(self._found_intact[place])
        crop = region(image, head, box, channels, self.data.size, self._workspace, trusted)
        if self._found_intact is not None:
            self._found_intact[place] = 1
        return crop

    def _put(self, crop: Pixels, out: Tensor) -> Tensor:
        """A crop as it is, or resized where it is too large; returns its height and width."""
        size, channels = self.data.size, self.data.channels
        if crop.size > len(out):
            resized = out[: size * size * channels].view(size, size, channels)
            bring_to_size(crop, resized.permute(2, 0, 1))
            return torch.tensor([size, size])
        out.numpy()[: crop.size].reshape(crop.shape)[...] = crop
        return torch.tensor(crop.shape[:2])

    def whole_image(self, index: int) -> Pixels:
        """All pixels of one image."""
        image, channels = self.records.record(int(self.chosen[index])), self.data.channels
        if isinstance(image, numpy.ndarray):
            return with_channels(image, channels)
        return pixels(image, channels)


class _Writer:
    """Positions of the stream in, images in their buffer out. Any number of threads may call it."""

    def __init__(self, source: Decoded, config: Config, layout: Layout, training: bool) -> None:
        self._source, self._config, self._layout = source, config, layout
        self._order = Order(config.seed, len(source), training)
        self._local = threading.local()

    def write(self, first: int, buffer: Buffer) -> None:
        """Read the images at positions from `first` on, as many as the buffer has rows."""
        count = len(buffer.labels)
        positions = torch.arange(first, first + count)
        indices, draws = self._order.indices(positions), self._order.draws(positions)
        if self._layout.form != "numbers":
            self._source.fill(buffer, indices, draws)
            return
        between = Buffer(self._bytes(count), buffer.labels)
        self._source.fill(between, indices, draws)
        data, mean, std = self._config.data, self._source.mean, self._source.std
        dtype, out = self._layout.dtype, buffer.images
        if self._order.training:
            finish(between.images, positions, data, self._config.seed, mean, std, dtype, out)
        else:
            normalise(between.images, mean, std, dtype, out)

    def _bytes(self, count: int) -> Tensor:
        """Images of the model's size before they are numbers; fresh memory would cost more than
        the crops."""
        kept: Tensor | None = getattr(self._local, "images", None)
        if kept is None or len(kept) < count:
            size, channels = self._layout.size, self._layout.channels
            kept = torch.empty((count, size, size, channels), dtype=torch.uint8)
            self._local.images = kept
        return kept[:count].permute(0, 3, 1, 2)


def bring_to_size(part: Pixels, out: Tensor) -> None:
    """Resize cropped pixels into `out` (channels x size x size): bilinear with antialiasing, in
    torch's uint8 kernel."""
    size = out.shape[1]
    if part.shape[:2] == (size, size):
        out.numpy()[...] = part.transpose(2, 0, 1)
        return
    if not part.flags.writeable:  # of a mapped file: torch takes only what it could write to
        part = part.copy()
    image = torch.from_numpy(part).permute(2, 0, 1)[None]
    # The operator itself: torch's interpolate() takes twice as long to decide to call it.
    torch.ops.aten._upsample_bilinear2d_aa.out(image, [size, size], False, out=out[None])


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
        return numpy.repeat(image, 3, axis=2)
    grey: Pixels = (((image * _LUMA).sum(2, keepdims=True) + 0x8000) >> 16).astype(numpy.uint8)
    return grey


# --- records -----------------------------------------------------------------------------------


class FromOrigin:
    """A data set as it was published, read without packing it."""

    checked = False
    pack = None

    def __init__(self, origin: Origin, path: Path) -> None:
        self._origin, self._path = origin, path

    def record(self, index: int, arena: Arena | None = None) -> Encoded | Pixels:
        try:
            return self._origin.read(index)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None

    def records(self, indices: list[int], arena: Arena) -> Iterable[Encoded | Pixels]:
        return map(self.record, indices)

    def name(self, index: int) -> str:
        return f"{self._path}/{self._origin.name(index)}"


class FromPack:
    """A pack; a raw one gives pixels at once."""

    checked = True

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        raw = pack.about.encoding.get("kind") == "raw"
        self.shape = pack.about.shape if raw else None
        if raw and (self.shape is None or (pack.lengths() != numpy.prod(self.shape)).any()):
            raise PackError(f"the raw pack {pack.path} is damaged: its images are not of one size")

    def record(self, index: int, arena: Arena | None = None) -> Encoded | Pixels:
        return self.shaped(self.pack.record(index, arena))

    def records(self, indices: list[int], arena: Arena) -> Iterable[Encoded | Pixels]:
        return map(self.shaped, self.pack.records(indices, arena))

    def received(self, index: int, data: memoryview) -> Encoded | Pixels:
        """An image of the pack that came another way, once its checksum is found right."""
        self.pack.check(index, data)
        return self.shaped(data)

    def shaped(self, data: Encoded) -> Encoded | Pixels:
        if self.shape is None:
            return data
        return numpy.frombuffer(data, numpy.uint8).reshape(self.shape)

    def name(self, index: int) -> str:
        return f"{self.pack.path}/{self.pack.name(index)}"
