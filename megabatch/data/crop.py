"""Crops: which part of each image is taken, as a function of draws, and how it is brought to size.

The random crop by area and aspect is Inception's, as Goyal 2017 uses it; scale augmentation
(shorter side drawn, then a square of the model's size) is the original ResNet's. Both only choose a
box in the image as it is, so what lies outside is never resized.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch.config import Data
from megabatch.data.jpeg import Pixels
from megabatch.keyed import Purpose, uniform

_TRIES = 10
CROP_DRAWS = 2 * _TRIES + 2

Boxes = NDArray[numpy.int64]
"""n x 4: left, upper, right, lower, in pixels of the whole image"""


def crop_draws(seed: int, positions: Tensor) -> Tensor:
    """The numbers that choose the crops of the images at these positions, a row each."""
    keys = positions.numpy()[:, None], numpy.arange(CROP_DRAWS)[None, :]
    return uniform(seed, Purpose.CROP, *keys)


def choose_boxes(
    data: Data, heights: NDArray[Any], widths: NDArray[Any], draws: Tensor | None
) -> Boxes:
    """The part of each image that the model sees; without draws the centre crop of evaluation."""
    if draws is None:
        return centre_boxes(data, heights, widths)
    drawn = draws.numpy().astype(numpy.float64)
    if data.scale[1]:
        return scale_boxes(data, heights, widths, drawn)
    return random_boxes(data, heights, widths, drawn)


def random_boxes(
    data: Data, heights: NDArray[Any], widths: NDArray[Any], draws: NDArray[numpy.float64]
) -> Boxes:
    """Boxes of random area and aspect.

    Of ten drawn shapes the first that fits is taken; where none does, the largest centred box whose
    aspect is within the bounds.
    """
    whole_h, whole_w = heights[:, None], widths[:, None]
    (small, large), (low, high) = data.crop_area, numpy.log(data.crop_aspect)
    areas = whole_w * whole_h * (small + draws[:, 0 : 2 * _TRIES : 2] * (large - small))
    aspects = numpy.exp(low + draws[:, 1 : 2 * _TRIES : 2] * (high - low))
    w, h = numpy.rint(numpy.sqrt(areas * aspects)), numpy.rint(numpy.sqrt(areas / aspects))
    fits = (w > 0) & (w <= whole_w) & (h > 0) & (h <= whole_h)
    rows, first = numpy.arange(len(heights)), fits.argmax(1)
    w, h = w[rows, first], h[rows, first]
    left = numpy.floor(draws[:, -2] * (widths - w + 1))
    upper = numpy.floor(draws[:, -1] * (heights - h + 1))

    drawn = _boxes(left, upper, w, h)
    return numpy.where(fits.any(1)[:, None], drawn, _largest_boxes(data, heights, widths))


def scale_boxes(
    data: Data, heights: NDArray[Any], widths: NDArray[Any], draws: NDArray[numpy.float64]
) -> Boxes:
    """Squares that have the model's size after the shorter side was brought to a drawn length."""
    low, high = data.scale
    shorter = low + numpy.floor(draws[:, 0] * (high - low + 1))
    least = numpy.minimum(heights, widths)
    side = numpy.clip(numpy.rint(least * data.size / shorter), 1, least)
    left = numpy.floor(draws[:, -2] * (widths - side + 1))
    upper = numpy.floor(draws[:, -1] * (heights - side + 1))
    return _boxes(left, upper, side, side)


def centre_boxes(data: Data, heights: NDArray[Any], widths: NDArray[Any]) -> Boxes:
    """The centre crop of evaluation: a square of a share of the shorter side, or what training sees
    where that is whole images."""
    if data.evaluation_share is None:
        return _largest_boxes(data, heights, widths)
    share = data.evaluation_share
    side = numpy.maximum(1, numpy.rint(numpy.minimum(heights, widths) * share))
    return _boxes((widths - side) // 2, (heights - side) // 2, side, side)


def _largest_boxes(data: Data, heights: NDArray[Any], widths: NDArray[Any]) -> Boxes:
    """The largest centred boxes whose aspect is within the bounds: whole images, mostly."""
    aspect = numpy.clip(widths / heights, *data.crop_aspect)
    w = numpy.minimum(widths, numpy.rint(heights * aspect))
    h = numpy.minimum(heights, numpy.rint(widths / aspect))
    return _boxes((widths - w) // 2, (heights - h) // 2, w, h)


def _boxes(left: Any, upper: Any, w: Any, h: Any) -> Boxes:
    return numpy.stack([left, upper, left + w, upper + h], 1).astype(numpy.int64)


def reduction(box: list[int], size: int) -> int:
    """By how much a JPEG may be scaled down while it is decoded: the crop keeps the model's
    size."""
    least = min(box[2] - box[0], box[3] - box[1])
    return next((factor for factor in (8, 4, 2) if least >= factor * size), 1)


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


def crop_on_device(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """The same crop and resize for a batch of images of one size (n x height x width x channels).

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
    centre = begin + (torch.arange(size, device=begin.device) + 0.5) * step
    reach = step.clamp(min=1.0)
    pixel = torch.arange(pixels, device=begin.device)
    distance = (pixel + 0.5 - centre[:, :, None]).abs() / reach[:, :, None]
    inside = (pixel >= begin[:, :, None]) & (pixel < end[:, :, None])
    weights = (1 - distance).clamp(min=0.0) * inside
    return (weights / weights.sum(2, keepdim=True)).float()
