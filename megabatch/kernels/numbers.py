"""Bytes to the model's numbers in one launch: mirrored or not, less the mean, over the deviation.

The plain twin is `megabatch.data.augment`, which takes five passes over larger memory for it; the
bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def numbers_of(images: Tensor, mirrored: Tensor | None, offset: Tensor, scale: Tensor) -> Tensor:
    """(image - offset) / scale in fp32, channels last; `mirrored` says which images to turn round.

    Images are bytes, each dense and channels last; offset and scale have a number a channel.
    """
    count, channels, height, width = images.shape
    if not images[:1].is_contiguous(memory_format=torch.channels_last):
        raise ValueError("bytes become numbers channels last")
    out = torch.empty_like(images, dtype=torch.float32, memory_format=torch.channels_last)
    length = height * width * channels
    blocks = triton.cdiv(length, _BLOCK)
    # One after the other: a grid's second side ends at 65,535.
    _numbers[(count * blocks,)](
        images, mirrored, offset, scale, out, blocks, images.stride(0), length, width, channels,
        mirrored is not None, _BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    images, mirrored, offset, scale, out, blocks, apart, length, width, CHANNELS: tl.constexpr,
    MIRROR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    channel = place % CHANNELS
    source = place
    if MIRROR and tl.load(mirrored + image):
        column = place // CHANNELS % width
        source += (width - 1 - 2 * column) * CHANNELS
    image = image.to(tl.int64)
    value = tl.load(images + image * apart + source, inside, 0).to(tl.float32)
    # Rounded as torch rounds: no reciprocal, nothing contracted.
    number = tl.div_rn(value - tl.load(offset + channel), tl.load(scale + channel))
    tl.store(out + image * length + place, number, inside)
