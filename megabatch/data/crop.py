"""Crops: which part of each image is taken, as a function of draws.

The random crop by area and aspect is Inception's, as Goyal 2017 uses it; scale augmentation
(shorter side drawn, then a square of the model's size) is the original ResNet's. Both only choose a
box in the image as it is, so what lies outside is never resized.
"""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from megabatch.config import Data
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
    fraction = data.evaluation_share
    if fraction is None:
        return _largest_boxes(data, heights, widths)
    side = numpy.maximum(1, numpy.rint(numpy.minimum(heights, widths) * fraction))
    return _boxes((widths - side) // 2, (heights - side) // 2, side, side)


def _largest_boxes(data: Data, heights: NDArray[Any], widths: NDArray[Any]) -> Boxes:
    """The largest centred boxes whose aspect is within the bounds: whole images, mostly."""
    aspect = numpy.clip(widths / heights, *data.crop_aspect)
    w = numpy.minimum(widths, numpy.rint(heights * aspect))
    h = numpy.minimum(heights, numpy.rint(widths / aspect))
    return _boxes((widths - w) // 2, (heights - h) // 2, w, h)


def _boxes(left: Any, upper: Any, w: Any, h: Any) -> Boxes:
    return numpy.stack([left, upper, left + w, upper + h], 1).astype(numpy.int64)
