"""Images that live in the device's memory, decoded once: to crop them is all that is left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from torch import Tensor

from megabatch.data.crop import choose_boxes, crop_on_device
from megabatch.data.decoded import Decoded, FromPack, with_channels
from megabatch.data.jpeg import Pixels, pixels
from megabatch.data.room import form_of

_SLAB = 4096
_ROOM = 0.3
"""share of the device's free memory that images may take; the model needs the rest"""


class Resident:
    """A packed set of one size on a device. Reading is work for the device alone."""

    instant = True

    def __init__(self, source: Decoded, device: torch.device, threads: int) -> None:
        self.data, self.classes = source.data, source.classes
        self.mean, self.std = source.mean, source.std
        shape = image_shape(source)
        assert shape is not None
        self._device, self._height, self._width = device, *shape[:2]
        channels = source.data.channels
        self._images = torch.empty(
            (len(source), *shape[:2], channels), dtype=torch.uint8, device=device
        )
        self._labels = source.labels.to(device)

        def decoded(number: int) -> Pixels:
            stored = source.records.record(number)
            if isinstance(stored, numpy.ndarray):
                return with_channels(stored, channels)
            return pixels(stored, channels)

        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(source), _SLAB):
                slab = pool.map(decoded, source.chosen[first : first + _SLAB].tolist())
                images = torch.from_numpy(numpy.stack(list(slab)))
                self._images[first : first + len(images)] = images.to(device)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        heights = numpy.full(len(indices), self._height)
        widths = numpy.full(len(indices), self._width)
        boxes = torch.from_numpy(choose_boxes(self.data, heights, widths, draws))
        boxes, indices = (self._sent(t) for t in (boxes, indices))
        return self._cropped(indices, boxes), self._labels[indices]

    def _cropped(self, indices: Tensor, boxes: Tensor) -> Tensor:
        if form_of(self._device) == "crops":
            from megabatch.kernels.resize import resize_boxes

            return resize_boxes(self._images, indices, boxes, self.data.size)
        return crop_on_device(self._images[indices], boxes, self.data.size)

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def image_shape(source: object) -> tuple[int, int, int] | None:
    """The shape of a source's images, where it is a pack and they all agree."""
    if isinstance(source, Decoded) and isinstance(source.records, FromPack):
        return source.records.pack.about.shape
    return None


def fits(source: Decoded, device: torch.device) -> bool:
    """Whether the images of a pack may live on a GPU."""
    shape = image_shape(source)
    if shape is None or device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return len(source) * shape[0] * shape[1] * source.data.channels <= _ROOM * free
