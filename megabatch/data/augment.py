"""Augmentation as a function of draws: numbers in [0, 1) keyed by an image's position in the
stream.

Crops are chosen before an image is resized (by the source, while it decodes); what works on whole
batches of equal size (flip, shift, normalisation) runs on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from megabatch.config import Data
from megabatch.keyed import Purpose, uniform

_TRIES = 10
CROP_DRAWS = 2 * _TRIES + 2

Box = tuple[float, float, float, float]
"""left, upper, right, lower"""


def crop_draws(seed: int, positions: Tensor) -> Tensor:
    """The numbers that choose the crops of the images at these positions, a row each."""
    return uniform(seed, Purpose.CROP, positions[:, None], torch.arange(CROP_DRAWS)[None, :])


def random_box(data: Data, width: int, height: int, draws: list[float]) -> Box:
    """A random part of the image by area and aspect, as Inception and Goyal 2017 crop.

    Of ten drawn shapes the first that fits is taken; when none does, the largest centred box whose
    aspect is within the bounds.
    """
    low, high = (math.log(aspect) for aspect in data.crop_aspect)
    for index in range(_TRIES):
        share, shape = draws[2 * index : 2 * index + 2]
        area = (
            width * height * (data.crop_area[0] + share * (data.crop_area[1] - data.crop_area[0]))
        )
        aspect = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(draws[-2] * (width - w + 1))
            upper = int(draws[-1] * (height - h + 1))
            return left, upper, left + w, upper + h
    aspect = min(max(width / height, data.crop_aspect[0]), data.crop_aspect[1])
    w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def centre_box(data: Data, width: int, height: int) -> Box:
    """The centre crop of evaluation: a square of size / resize of the shorter side."""
    side = min(width, height) * min(1.0, data.size / (data.resize or data.size * 8 / 7))
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def augment(images: Tensor, positions: Tensor, data: Data, seed: int) -> Tensor:
    """Flip and shift a batch of images in place of their positions' draws."""
    if data.flip:
        mirrored = uniform(seed, Purpose.FLIP, positions) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if data.shift:
        draws = uniform(seed, Purpose.SHIFT, positions[:, None], positions.new_tensor([[0, 1]]))
        by = (draws * (2 * data.shift + 1)).long()
        size_y, size_x = images.shape[2:]
        rows = by[:, :1] + torch.arange(size_y, device=images.device)
        columns = by[:, 1:] + torch.arange(size_x, device=images.device)
        padded = pad(images, [data.shift] * 4)
        image = torch.arange(len(images), device=images.device)[:, None, None]
        images = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
        images = images.permute(0, 3, 1, 2)
    return images


def normalise(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """uint8 images as numbers of about mean 0 and deviation 1; floats are the caller's own
    business."""
    if images.dtype != torch.uint8:
        return images.to(dtype)
    shape = (1, -1, 1, 1)
    offset = torch.tensor(mean, dtype=dtype, device=images.device).view(shape) * 255
    scale = torch.tensor(std, dtype=dtype, device=images.device).view(shape) * 255
    return (images.to(dtype) - offset) / scale
