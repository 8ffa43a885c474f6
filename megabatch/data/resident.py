"""Images that live in the device's memory, decoded once: to crop them is all that is left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.crop import choose_boxes
from megabatch.data.decoded import Decoded
from megabatch.data.slots import form_of
from megabatch.data.source import Source
from megabatch.data.threads import threads_of
from megabatch.errors import UserError

_SLAB_BYTES = 64 << 20
"""of images that go to the device at once"""
_RUN = 64
"""of them, that a thread brings: to hand them out one by one takes longer than to read them"""
_SHARE_OF_MEMORY = 0.3
"""of the device's free memory, that images may take; the model needs the rest"""


class Resident(Source):
    """A packed set of one size on a device. Reading is work for the device alone."""

    instant = True
    resident = True

    def __init__(self, source: Decoded, device: torch.device, threads: int) -> None:
        self.data, self.classes = source.data, source.classes
        self.mean, self.std = source.mean, source.std
        self.class_names, self.notes = source.class_names, source.notes
        shape = _image_shape(source)
        assert shape is not None
        self._device, self._height, self._width = device, *shape[:2]
        self._images = torch.empty(
            (len(source), *shape[:2], source.data.channels), dtype=torch.uint8, device=device
        )
        self._labels = source.labels.to(device)

        one = self._images.shape[1:]
        rows = max(1, min(len(source), _SLAB_BYTES // max(1, one.numel())))
        slab = torch.empty((rows, *one), dtype=torch.uint8, pin_memory=device.type == "cuda")
        places = slab.numpy()

        def bring(first: int, last: int) -> None:
            for index in range(first, last):
                places[index % rows] = source.whole_image(index)

        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(source), rows):
                last = min(first + rows, len(source))
                firsts = range(first, last, _RUN)
                lasts = (min(begin + _RUN, last) for begin in firsts)
                for _ in pool.map(bring, firsts, lasts):
                    pass
                self._images[first:last].copy_(slab[: last - first])

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


def make_resident(
    source: Decoded, config: Config, device: torch.device, threads: int
) -> Resident | None:
    """The images of a source on the device, if the config says so or they fit."""
    wish = config.data.resident
    if wish == "always" and _image_shape(source) is None:
        raise UserError(
            "data.resident is always, but the images are no pack of one size: "
            "pack them with --raw --size N"
        )
    # The free memory of the moment has no say in a run whose bits must not depend on it.
    if wish == "never" or (wish == "auto" and (config.deterministic or not _fits(source, device))):
        return None
    return Resident(source, device, threads)


def on_device(source: Source, config: Config, cluster: Cluster) -> Source:
    """The images where the device reads them, if they may lie there: for those who hand them to
    several runs, none of which then brings them there anew."""
    if isinstance(source, Decoded):
        return make_resident(source, config, cluster.device, threads_of(config, cluster)) or source
    return source.on(cluster.device)


def _image_shape(source: Decoded) -> tuple[int, int, int] | None:
    """The shape of a source's images, where it is a pack and they all agree."""
    return None if source.pack is None else source.pack.about.shape


def _fits(source: Decoded, device: torch.device) -> bool:
    """Whether the images of a pack may live on a GPU."""
    shape = _image_shape(source)
    if shape is None or device.type != "cuda":
        return False
    torch.cuda.empty_cache()  # what runs before this one have left to torch is free too
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = len(source) * shape[0] * shape[1] * source.data.channels
    return nbytes <= _SHARE_OF_MEMORY * free


def crop_on_device(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """What decoded.py does to a crop, for a batch of images of one size (n x height x width x
    channels).

    Along each axis a resized crop is a small matrix applied to the pixels, so the whole is two
    batched matrix products: any box of any image in one call, which is what a GPU wants.
    """
    height, width = images.shape[1:3]
    down = _weights(boxes[:, 1], boxes[:, 3], height, size)
    across = _weights(boxes[:, 0], boxes[:, 2], width, size)
    planes = images.permute(0, 3, 1, 2).to(down.dtype)
    resized = down[:, None] @ planes @ across[:, None].transpose(2, 3)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _weights(begin: Tensor, end: Tensor, pixels: int, size: int) -> Tensor:
    """n x size x pixels: how much each pixel of the crop counts for each pixel of the result.

    The filter is a triangle as wide as one output pixel, never narrower than two input pixels,
    which is bilinear when enlarging and antialiased when shrinking.
    """
    begin, end = begin.double()[:, None], end.double()[:, None]
    step = (end - begin) / size
    centre = begin + (torch.arange(size, device=begin.device, dtype=begin.dtype) + 0.5) * step
    reach = step.clamp(min=1.0)
    pixel = torch.arange(pixels, device=begin.device, dtype=begin.dtype)
    distance = (pixel + 0.5 - centre[:, :, None]).abs() / reach[:, :, None]
    inside = (pixel >= begin[:, :, None]) & (pixel < end[:, :, None])
    weights = (1 - distance).clamp(min=0.0) * inside
    return (weights / weights.sum(2, keepdim=True)).float()
