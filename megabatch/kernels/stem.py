"""The stem behind its convolution: batch norm by spans, ReLU and 3x3 / 2 max-pooling at once.

Forward keeps, for each pooled value, the place in its window (a byte) and what entered batch norm
there, so that the sums of the backward pass read a quarter of the picture and nothing twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.batchnorm import Affine
from megabatch.kernels.batchnorm_backward import factors_of_slots
from megabatch.kernels.rows import POOL_SUMS, part_here, rows_of

_PIXELS = 16
_WARPS = 4


def pooled(size: int) -> int:
    return (size - 1) // 2 + 1


def pool(x: Tensor, found: Affine, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Max-pooled relu(scale x + shift); the place of each maximum in its window, and x there."""
    images, channels, height, width = x.shape
    shape = (images, channels, pooled(height), pooled(width))
    last: dict[str, Any] = {"device": x.device, "memory_format": torch.channels_last}
    out = torch.empty(shape, dtype=x.dtype, **last)
    picked = torch.empty(shape, dtype=x.dtype, **last)
    places = torch.empty(shape, dtype=torch.uint8, **last)
    block = triton.next_power_of_2(channels)
    _pool[(images, triton.cdiv(shape[2] * shape[3], _PIXELS))](
        x, found.scale, found.shift, out, picked, places,
        span, height, width, shape[2], shape[3], channels, _PIXELS, block, num_warps=_WARPS,
    )  # fmt: skip
    return out, picked, places


def pool_backward(
    gradient: Tensor, x: Tensor, picked: Tensor, places: Tensor, found: Affine, span: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, from the gradient of the pooled result where that was above
    0 (what ReLU stopped must be 0 already)."""
    images, channels, height, width = x.shape
    cut, programs, _ = rows_of(picked, span, POOL_SUMS)
    slots = torch.empty((cut.spans, cut.parts, 2, channels), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(channels)
    _pool_sums[(cut.spans * cut.parts,)](
        gradient, picked, found.mean, found.inverse, slots,
        cut.rows, cut.parts, cut.each, channels, programs.rows, block,
        num_warps=programs.warps,
    )  # fmt: skip
    factors, d_weight, d_bias = factors_of_slots(slots, found, span * height * width)
    out = torch.empty_like(x)
    few_h, few_w = gradient.shape[2:]
    pixels = 16
    _pool_backward[(images, triton.cdiv(few_h * few_w, pixels))](
        gradient, x, places, found.scale, factors, out,
        span, height, width, few_h, few_w, cut.spans * channels, channels, pixels, block,
        num_warps=_WARPS,
    )  # fmt: skip
    return out, d_weight, d_bias


@triton.jit(do_not_specialize=["span", "height", "width", "few_h", "few_w"])  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    x, scale, shift, out, picked, places, span, height, width, few_h, few_w, channels,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = (column < channels)[None, :]
    a = tl.load(scale + image // span * channels + column, column < channels, 0)[None, :]
    b = tl.load(shift + image // span * channels + column, column < channels, 0)[None, :]
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < few_h * few_w
    y = pixel // few_w * 2 - 1
    left = pixel % few_w * 2 - 1
    x += image.to(tl.int64) * height * width * channels
    best = tl.full([PIXELS, BLOCK], -1.0, tl.float32)
    source = tl.zeros([PIXELS, BLOCK], x.dtype.element_ty)
    place = tl.zeros([PIXELS, BLOCK], tl.int32)
    for window in tl.static_range(9):
        down = y + window // 3
        right = left + window % 3
        valid = exists & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        at = (down * width + right)[:, None] * channels + column[None, :]
        value = tl.load(x + at, valid[:, None] & inside, 0)
        z = tl.maximum(value.to(tl.float32) * a + b, 0.0).to(x.dtype.element_ty).to(tl.float32)
        # The first of equal ones wins, as in torch.
        better = valid[:, None] & (z > best)
        best = tl.where(better, z, best)
        source = tl.where(better, value, source)
        place = tl.where(better, window, place)
    begin = image.to(tl.int64) * few_h * few_w * channels
    at = begin + pixel[:, None] * channels + column[None, :]
    stored = exists[:, None] & inside
    tl.store(out + at, best.to(out.dtype.element_ty), stored)
    tl.store(picked + at, source, stored)
    tl.store(places + at, place.to(tl.uint8), stored)


@triton.jit(do_not_specialize=["rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _pool_sums(  # type: ignore[no-untyped-def]
    gradient, picked, mean, inverse, slots, rows, parts, each, channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, span, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, BLOCK
    )
    m = tl.load(mean + span * channels + column, inside, 0)
    gradient += begin
    picked += begin
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        valid = (row < count - first)[:, None] & inside[None, :]
        g = tl.load(gradient + at, valid, 0).to(tl.float32)
        v = tl.load(picked + at, valid, 0).to(tl.float32)
        total += g
        product += g * (v - m[None, :])
        gradient += ROWS * channels
        picked += ROWS * channels
    slots += slot.to(tl.int64) * 2 * channels + column
    tl.store(slots, tl.sum(total, 0), inside)
    r = tl.load(inverse + span * channels + column, inside, 0)
    tl.store(slots + channels, tl.sum(product, 0) * r, inside)


@triton.jit(do_not_specialize=["span", "height", "width", "few_h", "few_w", "size"])  # type: ignore[untyped-decorator]
def _pool_backward(  # type: ignore[no-untyped-def]
    gradient, x, places, scale, factors, out, span, height, width, few_h, few_w, size, channels,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Four pixels, (2i, 2j) to (2i+1, 2j+1), which lie in the windows (i, j) to (i+1, j+1)."""
    image = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    known = column < channels
    inside = known[None, :]
    here = image // span * channels + column
    a = tl.load(scale + here, known, 0)[None, :]
    factor = tl.load(factors + here, known, 0)[None, :]
    constant = tl.load(factors + size + here, known, 0)[None, :]
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < few_h * few_w
    i = pixel // few_w
    j = pixel % few_w
    begin = image.to(tl.int64) * few_h * few_w * channels
    gradient += begin
    places += begin
    at = pixel[:, None] * channels + column[None, :]
    now = exists[:, None] & inside
    right = (exists & (j + 1 < few_w))[:, None] & inside
    below = (exists & (i + 1 < few_h))[:, None] & inside
    g0 = tl.load(gradient + at, now, 0).to(tl.float32)
    p0 = tl.load(places + at, now, 9).to(tl.int32)
    g1 = tl.load(gradient + at + channels, right, 0).to(tl.float32)
    p1 = tl.load(places + at + channels, right, 9).to(tl.int32)
    g2 = tl.load(gradient + at + few_w * channels, below, 0).to(tl.float32)
    p2 = tl.load(places + at + few_w * channels, below, 9).to(tl.int32)
    g3 = tl.load(gradient + at + (few_w + 1) * channels, right & below, 0).to(tl.float32)
    p3 = tl.load(places + at + (few_w + 1) * channels, right & below, 9).to(tl.int32)

    begin = image.to(tl.int64) * height * width * channels
    x += begin
    out += begin
    at = (2 * i * width + 2 * j)[:, None] * channels + column[None, :]
    right = now & (2 * j + 1 < width)[:, None]
    below = now & (2 * i + 1 < height)[:, None]
    g = tl.where(p0 == 4, g0, 0.0)
    v = tl.load(x + at, now, 0).to(tl.float32)
    tl.store(out + at, (a * g + factor * v + constant).to(out.dtype.element_ty), now)
    g = tl.where(p0 == 5, g0, 0.0) + tl.where(p1 == 3, g1, 0.0)
    v = tl.load(x + at + channels, right, 0).to(tl.float32)
    d = a * g + factor * v + constant
    tl.store(out + at + channels, d.to(out.dtype.element_ty), right)
    at += width * channels
    g = tl.where(p0 == 7, g0, 0.0) + tl.where(p2 == 1, g2, 0.0)
    v = tl.load(x + at, below, 0).to(tl.float32)
    tl.store(out + at, (a * g + factor * v + constant).to(out.dtype.element_ty), below)
    g = tl.where(p0 == 8, g0, 0.0) + tl.where(p1 == 6, g1, 0.0)
    g += tl.where(p2 == 2, g2, 0.0) + tl.where(p3 == 0, g3, 0.0)
    v = tl.load(x + at + channels, right & below, 0).to(tl.float32)
    d = a * g + factor * v + constant
    tl.store(out + at + channels, d.to(out.dtype.element_ty), right & below)
