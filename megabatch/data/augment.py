"""Augmentation of whole batches on the device, as a function of draws keyed by an image's position
in the stream.

Flip and shift work on bytes; colour jitter (brightness, contrast, saturation in a drawn order) and
PCA lighting (Krizhevsky 2012; both as Facebook's ResNet code and Goyal 2017 have them) on numbers
from 0 to 1.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megabatch import kernels
from megabatch.config import Data
from megabatch.keyed import Purpose, uniform

_LUMA = (0.299, 0.587, 0.114)
# Principal components of ImageNet's colours and their deviations, of RGB on a scale of 0 to 1.
_COMPONENTS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_CACHED = 1 << 17  # numbers: half a megabyte in single precision
_ORDERS = tuple(itertools.permutations(range(3)))


def constant(values: tuple[Any, ...], like: Tensor) -> Tensor:
    """Numbers beside a tensor. Sent to a GPU once: the host waits for it each time."""
    return _sent(values, like.dtype, like.device)


@functools.lru_cache(maxsize=64)
def _sent(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def augment(images: Tensor, positions: Tensor, data: Data, seed: int) -> Tensor:
    """Flip and shift a batch of uint8 images by their positions' draws; the batch is used up."""
    if data.flip:
        images = _mirror(images, _mirrored(positions, seed))
    if data.shift:
        draws = uniform(
            seed, Purpose.SHIFT, positions[:, None], torch.arange(2, device=positions.device)[None]
        )
        by = (draws * (2 * data.shift + 1)).long()
        size_y, size_x = images.shape[2:]
        rows = by[:, :1] + torch.arange(size_y, device=images.device)
        columns = by[:, 1:] + torch.arange(size_x, device=images.device)
        padded = pad(images, [data.shift] * 4)
        image = torch.arange(len(images), device=images.device)[:, None, None]
        images = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
        images = images.permute(0, 3, 1, 2)
    return images


def _mirrored(positions: Tensor, seed: int) -> Tensor:
    """Which images of a batch are mirrored."""
    return uniform(seed, Purpose.FLIP, positions) < 0.5


def _mirror(images: Tensor, which: Tensor) -> Tensor:
    if images.is_cuda:  # to know which on the host would mean waiting for the device
        return torch.where(which[:, None, None, None], images.flip(3), images)
    for row in which.nonzero()[:, 0].tolist():
        images[row] = images[row].flip(2)
    return images


def recoloured(images: Tensor, positions: Tensor, data: Data, seed: int) -> Tensor:
    """Colour jitter and lighting of images that are numbers from 0 to 1 (and may leave that
    range)."""
    if any(data.jitter):
        images = _jitter(images, positions, data.jitter, seed)
    if data.lighting:
        images = images + _lighting(images, positions, data.lighting, seed)[:, :, None, None]
    return images


def _jitter(
    images: Tensor, positions: Tensor, strengths: tuple[float, float, float], seed: int
) -> Tensor:
    draws = uniform(
        seed, Purpose.COLOUR, positions[:, None], torch.arange(4, device=positions.device)[None, :]
    ).to(images.dtype)
    orders = constant(_ORDERS, images)[(draws[:, 3] * len(_ORDERS)).long()]
    blends = 1 + (2 * draws[:, :3] - 1) * constant(strengths, images)
    for turn in range(3):
        which = orders[:, turn].long()[:, None]
        keep = blends.gather(1, which)[:, :, None, None]
        grey = _grey(images)
        others = torch.stack(
            [
                torch.zeros_like(grey),  # brightness: towards black
                grey.mean((2, 3), keepdim=True).expand_as(grey),  # contrast: towards the mean grey
                grey,  # saturation: towards its own grey
            ],
            1,
        )
        other = others[torch.arange(len(images), device=images.device), which[:, 0]]
        images = images * keep + other * (1 - keep)
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    return (images * constant(_LUMA, images).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _lighting(images: Tensor, positions: Tensor, strength: float, seed: int) -> Tensor:
    """A colour for each image: along each principal component, a normal number times its
    deviation."""
    # Twelve uniform numbers less six have the mean and deviation of a normal one, and are made by
    # additions alone: the same bits on every device.
    keys = torch.arange(36, device=positions.device).view(1, 3, 12)
    drawn = uniform(seed, Purpose.LIGHTING, positions[:, None, None], keys)
    normal = (drawn.double().sum(2) - 6).to(images.dtype) * strength
    components = constant(_COMPONENTS, images) * constant(_DEVIATIONS, images)
    shift = (normal[:, None, :] * components[None]).sum(2)
    return shift if images.shape[1] == 3 else shift.mean(1, keepdim=True)


def normalise(
    images: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """uint8 images as numbers of about mean 0 and deviation 1, in `out` if that is given (channels
    last); floats are the caller's own business."""
    if images.dtype != torch.uint8:
        return images.to(dtype)
    if _by_kernel(images, dtype):
        return _numbers_of(images, None, mean, std)
    if images.is_cuda:
        numbers = images.to(dtype)
        offset, scale = (constant(v, numbers).view(1, -1, 1, 1) for v in (mean, std))
        return (numbers - offset * 255) / (scale * 255)
    # Row by row of pixels, in simple steps, a few images at a time that stay in the cache: faster
    # than one operation with mixed types.
    if out is None:
        out = torch.empty(images.shape, dtype=dtype, memory_format=torch.channels_last)
    count, channels, height, width = images.shape
    rows = images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
    results = out.permute(0, 2, 3, 1).view(rows.shape)
    offset, scale = (
        torch.tensor(v, dtype=dtype).mul(255).expand(channels).repeat(width) for v in (mean, std)
    )
    few = max(1, _CACHED // max(1, rows[0].numel())) if count else 1
    for some, result in zip(rows.split(few), results.split(few), strict=True):
        result.copy_(some).sub_(offset).div_(scale)
    return out


def _by_kernel(images: Tensor, dtype: torch.dtype) -> bool:
    last = torch.channels_last
    return (
        dtype == torch.float32
        and kernels.available(images.device)
        and images[:1].is_contiguous(memory_format=last)  # one for one: they may lie apart
    )


def _numbers_of(
    images: Tensor, mirrored: Tensor | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    from megabatch.kernels.numbers import numbers_of

    channels = images.shape[1]
    offset, scale = (_of_bytes(v, channels, images.device) for v in (mean, std))
    return numbers_of(images, mirrored, offset, scale)


@functools.lru_cache(maxsize=64)
def _of_bytes(values: tuple[float, ...], channels: int, device: torch.device) -> Tensor:
    """Numbers on a scale of 0 to 1 on the bytes' scale, one a channel."""
    numbers = torch.tensor(values, dtype=torch.float32, device=device)
    return numbers.mul(255).expand(channels).contiguous()


def finish(
    images: Tensor,
    positions: Tensor,
    data: Data,
    seed: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """All that is done to a batch of uint8 images, to what the model is given."""
    colours = any(data.jitter) or data.lighting
    if not data.shift and not colours and _by_kernel(images, dtype):
        mirrored = _mirrored(positions, seed) if data.flip else None
        return _numbers_of(images, mirrored, mean, std)
    images = augment(images, positions, data, seed)
    if colours:
        numbers = recoloured(images.to(dtype) / 255, positions, data, seed)
        offset, scale = (constant(v, numbers).view(1, -1, 1, 1) for v in (mean, std))
        return torch.sub(numbers, offset, out=out).div_(scale)
    return normalise(images, mean, std, dtype, out)
