"""Crops of any shape resized on a GPU in one launch: bilinear with antialiasing, bytes to bytes.

The plain twins are `bring_to_size` of data/decoded.py on the host and `crop_on_device` of
data/resident.py, which does the same by matrix products. They differ by one step of 256 at the
most: the host rounds between its two passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


def resize_crops(crops: Tensor, shapes: Tensor, size: int, channels: int) -> Tensor:
    """Crops that lie each in a row of its own (n x bytes) -> n x channels x size x size, channels
    last; `shapes` are their heights and widths."""
    begins = torch.arange(len(crops), device=crops.device) * crops.shape[1]
    return resize_at(crops, begins, shapes[:, 1] * channels, shapes, size, channels)


def resize_boxes(images: Tensor, numbers: Tensor, boxes: Tensor, size: int) -> Tensor:
    """A box (left, upper, right, lower) of each of some images of a set (n x height x width x
    channels), as `resize_crops`."""
    _, height, width, channels = images.shape
    left, upper, right, lower = boxes.unbind(1)
    begins = ((numbers * height + upper) * width + left) * channels
    shapes = torch.stack([lower - upper, right - left], 1)
    pitches = torch.full_like(left, width * channels)
    return resize_at(images, begins, pitches, shapes, size, channels)


def resize_at(
    pixels: Tensor, begins: Tensor, pitches: Tensor, shapes: Tensor, size: int, channels: int
) -> Tensor:
    """Crops anywhere in one run of bytes: where each begins, and how far apart its rows are."""
    count = len(begins)
    out = torch.empty((count, size, size, channels), dtype=torch.uint8, device=pixels.device)
    begins, pitches = begins.to(torch.int64), pitches.to(torch.int32).contiguous()
    shapes = shapes.to(torch.int32).contiguous()
    grid = (count, triton.cdiv(size * size, _BLOCK))
    _resize[grid](pixels, begins, pitches, shapes, out, size, channels, _BLOCK)
    return out.permute(0, 3, 1, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _resize(  # type: ignore[no-untyped-def]
    pixels, begins, pitches, shapes, out, size, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of pixels of one result. Each is the mean of the pixels around its place, weighted by
    a triangle as wide as one pixel of the result and never narrower than two of the crop."""
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size * size
    begin = tl.load(begins + image)
    pitch = tl.load(pitches + image)
    height = tl.load(shapes + 2 * image)
    width = tl.load(shapes + 2 * image + 1)

    step_y = height.to(tl.float32) / size
    step_x = width.to(tl.float32) / size
    reach_y = tl.maximum(step_y, 1.0)
    reach_x = tl.maximum(step_x, 1.0)
    centre_y = ((place // size).to(tl.float32) + 0.5) * step_y
    centre_x = ((place % size).to(tl.float32) + 0.5) * step_x
    first_y = tl.floor(centre_y - reach_y + 0.5).to(tl.int32)
    first_x = tl.floor(centre_x - reach_x + 0.5).to(tl.int32)

    total = tl.zeros([BLOCK], tl.float32)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for over_y in range(0, tl.ceil(2 * reach_y).to(tl.int32) + 1):
        y = first_y + over_y
        far_y = tl.abs(y.to(tl.float32) + 0.5 - centre_y) / reach_y
        weight_y = tl.where((y >= 0) & (y < height), tl.maximum(1.0 - far_y, 0.0), 0.0)
        row = pixels + begin + y.to(tl.int64) * pitch
        for over_x in range(0, tl.ceil(2 * reach_x).to(tl.int32) + 1):
            x = first_x + over_x
            far_x = tl.abs(x.to(tl.float32) + 0.5 - centre_x) / reach_x
            weight_x = tl.where((x >= 0) & (x < width), tl.maximum(1.0 - far_x, 0.0), 0.0)
            weight = weight_y * weight_x
            counts = inside & (weight > 0)
            total += weight
            at = row + x * CHANNELS
            red += weight * tl.load(at, counts, 0).to(tl.float32)
            if CHANNELS == 3:
                green += weight * tl.load(at + 1, counts, 0).to(tl.float32)
                blue += weight * tl.load(at + 2, counts, 0).to(tl.float32)

    result = out + (image.to(tl.int64) * size * size + place) * CHANNELS
    tl.store(result, tl.floor(red / total + 0.5).to(tl.uint8), inside)
    if CHANNELS == 3:
        tl.store(result + 1, tl.floor(green / total + 0.5).to(tl.uint8), inside)
        tl.store(result + 2, tl.floor(blue / total + 0.5).to(tl.uint8), inside)
