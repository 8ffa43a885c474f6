"""Where images come from: a source reads images and labels by index, and knows nothing of workers.

A source gives uint8 images, cropped to the size the model sees by the draws it is handed (none: the
evaluation crop), or float images that are taken as they are. The loader does the rest. Here are the
sources that need no decoding: images in memory, and anyone's own data set.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from megabatch.config import Config
from megabatch.data.crop import crop_draws
from megabatch.data.packs.reading import Pack
from megabatch.data.slots import Buffer, Layout
from megabatch.errors import UserError
from megabatch.keyed import Purpose, keyed, shuffled

_MOST_ON_DEVICE = 8 << 30
"""bytes of images in memory that a GPU takes"""
_WORD = torch.int64

Writer = Callable[[int, Buffer], None]
"""position of the first image, a buffer -> as many images as the buffer has rows are in it"""


class Source(Protocol):
    """Images by index. `mean` and `std` are of the channels, on a scale of 0 to 1."""

    instant: bool = False
    """reading is not worth a thread"""
    separable: bool = False
    """another process can open the same images"""
    resident: bool = False
    """the images lie in the device's memory already"""
    left_out: tuple[int, ...] = ()
    """unreadable images that are passed over, by their number in the origin"""
    notes: tuple[str, ...] = ()
    """what a user should know of the images, a line each"""
    class_names: tuple[str, ...] = ()
    """by label; empty where they are not known"""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int: ...

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Images (n, channels, size, size) and labels (n,); row i of draws is image i's
        randomness."""
        ...

    @property
    def pack(self) -> Pack | None:
        """The pack that the images lie in, if they do."""
        return None

    @property
    def stored_size(self) -> int | None:
        """The shortest side a JPEG pack was made with (0: untouched; None: no JPEG pack)."""
        return None

    def on(self, device: torch.device) -> Source:
        """The same source for work on a device: with its images there, if they are in memory."""
        return self

    def part(self, indices: Tensor) -> Source:
        """Some of the images."""
        return Subset(self, indices)

    def writer(self, config: Config, layout: Layout, training: bool) -> Writer | None:
        """What brings images into buffers piece by piece, in any number of threads; None for a
        source that reads micro-batches whole."""
        return None


class InMemory(Source):
    """Images that are in memory, all of one size."""

    instant = True

    def __init__(
        self, images: Tensor, labels: Tensor, classes: int, class_names: tuple[str, ...] = ()
    ) -> None:
        self.images, self.labels, self.classes = images, labels, classes
        self.class_names = class_names
        channels = images.shape[1]
        self.mean, self.std = (0.5,) * channels, (0.25,) * channels

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        indices = _sent(indices, self.images.device)
        return self.images[indices], self.labels[indices]

    def on(self, device: torch.device) -> Source:
        if device.type != "cuda" or self.images.nbytes > _MOST_ON_DEVICE:
            return self
        return InWords(self, device)


class InWords(InMemory):
    """The same in a device's memory, channels last as batches want them, each image a whole number
    of words long. They are gathered by words: torch takes one number after the other, and of bytes
    there are eight times as many (AlexNet's 1,024 images: 0.68 ms of a step of 24)."""

    def __init__(self, source: InMemory, device: torch.device) -> None:
        count, channels, *size = source.images.shape
        self._one = (*size, channels)
        self._numbers = math.prod(self._one)
        in_a_word = _WORD.itemsize // source.images.itemsize
        length = -(-self._numbers // in_a_word) * in_a_word
        self._rows = source.images.new_empty((count, length), device=device)
        images = self._images_in(self._rows)
        images.copy_(source.images)
        labels = source.labels.to(device)
        super().__init__(images, labels, source.classes, source.class_names)

    def on(self, device: torch.device) -> Source:
        # A study's runs share them: each of them asks for them on the device.
        return self if device == self._rows.device else super().on(device)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        indices = _sent(indices, self._rows.device)
        rows = self._rows.view(_WORD)[indices].view(self._rows.dtype)
        return self._images_in(rows), self.labels[indices]

    def _images_in(self, rows: Tensor) -> Tensor:
        return rows[:, : self._numbers].view(-1, *self._one).permute(0, 3, 1, 2)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from any other memory would wait for the device
    return tensor.to(device, non_blocking=True)


class Subset(Source):
    """Some images of a source."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source, self._indices = source, indices
        self.classes, self.mean, self.std = source.classes, source.mean, source.std
        self.instant, self.class_names = source.instant, source.class_names
        self.resident, self.notes = source.resident, source.notes

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._source.read(self._indices[indices], draws)

    def on(self, device: torch.device) -> Source:
        return Subset(self._source.on(device), self._indices)


@dataclass(frozen=True)
class Order:
    """Which image stands at a position, and the randomness of its crop: in training the endless
    shuffled stream, in evaluation each image in its place, without randomness."""

    seed: int
    images: int
    training: bool

    def indices(self, positions: Tensor) -> Tensor:
        return shuffled(self.seed, positions, self.images) if self.training else positions

    def draws(self, positions: Tensor) -> Tensor | None:
        return crop_draws(self.seed, positions) if self.training else None


def hold_out_order(
    count: int, fraction: float, purpose: Purpose = Purpose.HOLD_OUT
) -> tuple[Tensor, Tensor]:
    """The images to train on and those held out, chosen by hash: the same whatever the run's
    seed."""
    order = torch.as_tensor(keyed(0, purpose, torch.arange(count))).argsort(stable=True)
    held = round(fraction * count)
    if not 0 < held < count:
        raise UserError(
            f"a share of {fraction:g} of {count} image{'s' * (count != 1)} leaves nothing to hold "
            f"out or to train on: add images, or change the share that is held out "
            f"(--data.val-share; of pack --val-share)"
        )
    return order[held:].sort().values, order[:held].sort().values


def hold_out(source: Source, fraction: float) -> tuple[Source, Source]:
    """Two parts of a source, the second a share of its images."""
    train, val = hold_out_order(len(source), fraction)
    return Subset(source, train), Subset(source, val)


def for_tuning(sources: tuple[Source, Source], fraction: float) -> tuple[Source, Source]:
    """The same images, or those of a run whose settings are being chosen: a share of its training
    images is what it is judged by, and the validation images stay unseen."""
    if fraction == 0:
        return sources
    train, held = hold_out_order(len(sources[0]), fraction, Purpose.TUNING)
    return sources[0].part(train), sources[0].part(held)


# --- callers' own data sets --------------------------------------------------------------------

_IMAGE_KEYS = ("image", "img", "pixel_values")
_LABEL_KEYS = ("label", "labels", "target")


def are_two_sets(data: Any) -> bool:
    """Whether a caller's data are two sets, to train on and to hold out, and not one: of a list of
    two things it is what they are that tells."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    with _generators_kept():
        first, second = data[0], data[1]
        if any(map(_are_arrays, (data, first, second))):
            raise UserError(
                "images and labels were given apart: give them together, as "
                "torch.utils.data.TensorDataset(images, labels)"
            )
        items = [_is_item(part) for part in (first, second)]
    if items[0] != items[1]:
        kinds = [("a data set", "an (image, label)")[item] for item in items]
        raise UserError(
            f"of the two things that were given as data the first looks like {kinds[0]}, the "
            f"second like {kinds[1]}: give one data set of (image, label), or two, (train, val)"
        )
    return not items[0]


def _is_item(part: Any) -> bool:
    """Whether it looks like an image with its label, and not like a set of them."""
    if isinstance(part, Mapping):
        return True
    pair = isinstance(part, tuple | list) and len(part) >= 2
    return pair and not _is_plain(part[0]) and _may_be_label(part[1])


def _is_plain(value: Any) -> bool:
    """One value, and not several."""
    return isinstance(value, numbers.Number | str | bytes | None) or getattr(value, "ndim", 1) == 0


def _may_be_label(value: Any) -> bool:
    """One value, or a row of them, as one-hot labels are."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return _is_plain(value) or getattr(value, "ndim", None) == 1


def _are_arrays(part: Any) -> bool:
    """Whether these are many images, and as many labels."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        return False
    images, labels = part
    if not all(isinstance(one, Tensor | numpy.ndarray) for one in part):
        return False
    alike = images.ndim > 1 and labels.ndim == 1 and len(images) == len(labels)
    return alike and not _one_hot(labels)


class OwnData(Source):
    """Anyone's map-style data set: items are (image, label) or a dict of them, an image a tensor,
    an array or PIL's, a label a class number or one-hot.

    One that draws from torch's, numpy's or Python's generator is read by the training loop itself
    in a deterministic run, each item's draws keyed by its position: threads would share the
    generators with each other and with the net.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)

    def __init__(self, dataset: Any, config: Config, title: str) -> None:
        self._dataset, self._title = dataset, title
        # A module of the caller's own takes what the caller gives it, as long as it is all alike.
        data, own_model = config.data, config.model.startswith("own")
        self._shape: tuple[int, ...] | None
        self._shape = None if own_model else (data.channels, data.size, data.size)
        for method in ("__len__", "__getitem__"):
            if isinstance(dataset, str | bytes | Mapping) or not hasattr(dataset, method):
                kind = type(dataset).__name__
                a_path = ", or name a folder or pack in config.data.path"
                raise UserError(
                    f"{title} is {_article(kind)} {kind}, which cannot be read by index: give a "
                    f"map-style data set of (image, label), as torch's DataLoader takes them"
                    f"{a_path if kind == 'str' else ''}"
                )
        if len(dataset) == 0:
            raise UserError(f"{title} is empty: give a data set with images")
        self.class_names = _class_names(dataset)
        self.classes = len(self.class_names) or data.classes
        with _generators_kept():
            before = _generators()
            first, _ = self._item(0)
            draws = _generators() != before
        self._shape = self._shape or tuple(first.shape)
        self._seed, self.instant = config.seed, config.deterministic and draws
        if self.instant:
            self.notes = (
                f"{title} draws random numbers: this run is deterministic and reads it without "
                f"threads",
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.instant:
            keys = self._keys(indices, draws)
            with _generators_kept():
                items = [self._keyed_item(*one) for one in zip(indices.tolist(), keys, strict=True)]
        else:
            items = [self._item(index) for index in indices.tolist()]
        images = [image for image, _ in items]
        # As torch would: items of several types become one type that holds them all.
        dtype = images[0].dtype
        for image in images[1:]:
            dtype = torch.promote_types(dtype, image.dtype)
        return torch.stack([image.to(dtype) for image in images]), torch.tensor(
            [label for _, label in items]
        )

    def number_as(self, train: OwnData) -> None:
        """Take the classes of the images that are trained on; refuse others."""
        names, theirs = self.class_names, train.class_names
        if names and theirs and names != theirs:
            raise UserError(
                f"{self._title} has the classes {_few(names)}, but {train._title} {_few(theirs)}: "
                f"a label would mean two things; give both the same classes in the same order"
            )
        self.classes = train.classes

    def _keys(self, indices: Tensor, draws: Tensor | None) -> list[int]:
        """32 bits an item: by position in training, as the draws are, by index in evaluation."""
        bits = indices[:, None] if draws is None else (draws[:, :2].double() * 2**24).long()
        return torch.as_tensor(keyed(self._seed, Purpose.OWN_DATA, *bits.unbind(1))).tolist()

    def _keyed_item(self, index: int, key: int) -> tuple[Tensor, int]:
        torch.default_generator.manual_seed(key)
        numpy.random.seed(key)
        random.seed(key)
        return self._item(index)

    def _item(self, index: int) -> tuple[Tensor, int]:
        try:
            item = self._dataset[index]
        except Exception as error:
            reason = f"{type(error).__name__}: {_short(error, str)}"
            raise self._wrong(index, f"cannot be read ({reason})") from error
        image, label = self._image_and_label(index, item)
        return self._as_image(index, image), self._as_label(index, label)

    def _image_and_label(self, index: int, item: Any) -> tuple[Any, Any]:
        if isinstance(item, Mapping):
            image = next((item[key] for key in _IMAGE_KEYS if key in item), None)
            label = next((item[key] for key in _LABEL_KEYS if key in item), None)
            if image is not None and label is not None:
                return image, label
            found = ", ".join(map(str, item)) or "nothing"
            raise self._wrong(
                index, f"holds {found}: name its parts image and label, or give (image, label)"
            )
        if isinstance(item, tuple | list) and len(item) >= 2:
            return item[0], item[1]
        kind = type(item).__name__
        raise self._wrong(index, f"is {_article(kind)} {kind}: give (image, label)")

    def _as_image(self, index: int, image: Any) -> Tensor:
        channels = self._shape[0] if self._shape else None
        if hasattr(image, "convert") and hasattr(image, "mode"):  # Pillow's
            modes = {1: "L", 3: "RGB"}
            if channels in modes:
                image = image.convert(modes[channels])
            elif image.mode not in modes.values():
                image = image.convert("RGB")
        if not isinstance(image, Tensor):
            try:
                array = numpy.asarray(image)
            except ValueError:  # lists of several lengths
                array = numpy.empty(0, dtype=object)
            if array.dtype.kind not in "buif":
                kind = type(image).__name__
                raise self._wrong(index, f"has {_article(kind)} {kind} where its image should be")
            if array.dtype == numpy.uint8 and array.ndim == 3 and array.shape[2] in (1, 3):
                array = array.transpose(2, 0, 1)  # as Pillow and OpenCV have them
            # FITS and IDX files have theirs the other way round.
            image = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        if image.layout != torch.strided or image.is_complex():
            kind = "complex" if image.is_complex() else "sparse"
            raise self._wrong(index, f"is a {kind} image: give a dense tensor of real numbers")
        grey = image.dtype == torch.uint8 if self._shape is None else len(self._shape) == 3
        if image.ndim == 2 and grey:
            image = image[None]
        if self._shape is not None and image.shape != self._shape:
            raise self._wrong(
                index,
                f"is an image of {_by(image.shape)}, but {_by(self._shape)} (channels, height, "
                f"width) is wanted: resize the images of the data set, or set data.size and "
                f"data.channels",
            )
        found: Tensor = image.detach()
        return found

    def _as_label(self, index: int, label: Any) -> int:
        if isinstance(label, Tensor):
            label = label.detach().cpu().numpy()
        if isinstance(label, numpy.ndarray | list | tuple):
            try:
                values = numpy.asarray(label)
            except ValueError:  # a list of lists, say, of several lengths
                values = numpy.empty(0)
            if values.size == 1:
                label = values.reshape(-1)[0]
            elif values.dtype.kind in "buif" and values.ndim == 1 and _one_hot(values):
                label = values.argmax()
        if isinstance(label, numpy.bool_):  # which is no number to Python, while its own bools are
            label = bool(label)
        if not isinstance(label, numbers.Real) or not float(label).is_integer():
            raise self._wrong(
                index, f"has the label {_short(label)}: labels are class numbers, or one-hot"
            )
        number = int(label) if isinstance(label, int) else int(float(label))
        if not 0 <= number < self.classes:
            raise self._wrong(
                index,
                f"has the label {number}, but labels are 0 to {self.classes - 1}: leave the "
                f"item out, or set data.classes",
            )
        return number

    def _wrong(self, index: int, how: str) -> UserError:
        return UserError(f"item {index} of {self._title} {how}")


def _generators() -> tuple[bytes, bytes]:
    """How far torch's generator is, and numpy's and Python's."""
    others = numpy.random.get_state(legacy=False), random.getstate()
    return bytes(torch.get_rng_state().numpy()), pickle.dumps(others)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """They are afterwards as they were."""
    torchs = torch.get_rng_state()
    numpys, pythons = numpy.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        numpy.random.set_state(numpys)
        random.setstate(pythons)


def _class_names(dataset: Any) -> tuple[str, ...]:
    """As torchvision's and Hugging Face's data sets say it (none: they do not)."""
    features = getattr(dataset, "features", None)
    listed = [getattr(dataset, "classes", None)]
    if isinstance(features, Mapping):
        listed += [getattr(features[key], "names", None) for key in _LABEL_KEYS if key in features]
    return next((tuple(map(str, names)) for names in listed if names), ())


def _one_hot(values: Any) -> bool:
    return bool(len(values) and (values == 1).sum() == 1 and (values == 0).sum() == len(values) - 1)


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")


def _by(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "no dimensions"


def _short(value: Any, words_of: Callable[[Any], str] = repr) -> str:
    words = " ".join(words_of(value).split())
    return words if len(words) <= 80 else words[:77] + "..."


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"
