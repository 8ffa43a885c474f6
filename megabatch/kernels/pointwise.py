"""1x1 convolutions as products of our own: how they are cut up, and the way back into a block.

The gradient of a block's first convolution, the residual's added to it, ReLU's mask of the block
before and the sums of its batch norm are one launch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What one program of a product computes at a time, and with what."""

    rows: int
    columns: int
    depth: int
    """of one step of the product"""
    warps: int
    stages: int
    programs: int = 0
    """on a multiprocessor, which keep their columns of the weight and go from tile to tile; 0: a
    program for each tile"""


# The best of a sweep on an H200, by the channels that come in.
_DESCEND = {
    64: Tile(64, 128, 64, 4, 3, 2),
    128: Tile(64, 128, 128, 4, 2, 2),
    256: Tile(64, 64, 256, 4, 3, 3),
}
DEEP = Tile(64, 128, 64, 4, 3)
FULL = Tile(64, 64, 32, 4, 1)  # fp32 takes twice the room


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_grid(tile: Tile, tiles: int, columns: int, device: torch.device) -> tuple[int]:
    across = triton.cdiv(columns, tile.columns)
    if tile.programs == 0 or device.type != "cuda":
        return (tiles * across,)
    chip = _multiprocessors(device)
    return (min(tiles, max(1, tile.programs * chip // across)) * across,)


def precision_of(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def pick(x: Tensor, span: int, stride: int) -> tuple[Tensor, Tensor]:
    """Every stride-th pixel of x (x itself where that is each), and their column sums by span and
    part: what a 1x1 convolution with a stride sees."""
    images, channels, height, width = x.shape
    few_h, few_w = triton.cdiv(height, stride), triton.cdiv(width, stride)
    out = x
    if stride > 1:
        out = torch.empty(
            (images, channels, few_h, few_w),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
    spans, rows = images // span, span * few_h * few_w
    each = 1024
    parts = triton.cdiv(rows, each)
    slots = torch.empty((spans, parts, channels), dtype=torch.float32, device=x.device)
    _pick[(spans * parts, triton.cdiv(channels, 64))](
        x, out, slots, rows, parts, height, width, few_h, few_w, channels,
        each, stride, 64, 64, num_warps=4,
    )  # fmt: skip
    return out, slots


def descend(
    d_y: Tensor,
    weight: Tensor,
    mask: Tensor,
    span: int,
    added: Tensor | None = None,
    stride: int = 1,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a 1x1 convolution's input plus `added`, where `mask`, the input, is above 0;
    and its column sums by span and tile. With a stride, `added` has one pixel for stride x stride
    of the input's."""
    images, outputs, height, width = mask.shape
    inputs = d_y.shape[1]
    spans, rows = images // span, span * height * width
    out = torch.empty_like(mask)
    tile = tile or (FULL if mask.dtype == torch.float32 else _DESCEND.get(inputs, DEEP))
    tiles = triton.cdiv(rows, tile.rows)
    slots = torch.empty((spans, tiles, outputs), dtype=torch.float32, device=mask.device)
    kind = 0 if added is None else 1 if stride == 1 else 2
    _descend[launch_grid(tile, spans * tiles, outputs, mask.device)](
        d_y, weight, mask if added is None else added, mask, out, slots,
        rows, tiles, spans * tiles, outputs, height, width, inputs, stride, kind,
        rows % tile.rows == 0, outputs % tile.columns == 0, tile.programs > 0,
        tile.rows, tile.columns, min(tile.depth, inputs), tile.stages, precision_of(mask),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, slots


@triton.jit(do_not_specialize=["rows", "parts", "height", "width", "few_h", "few_w"])  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    x, out, slots, rows, parts, height, width, few_h, few_w, channels, each,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    span, part = slot // parts, slot % parts
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < channels)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    area = few_h * few_w
    x += span.to(tl.int64) * (rows // area) * height * width * channels
    out += span.to(tl.int64) * rows * channels
    for first in range(part * each, tl.minimum(rows, (part + 1) * each), ROWS):
        place = first + tl.arange(0, ROWS)
        valid = (place < rows)[:, None] & inside
        source = place
        if STRIDE > 1:
            y = place % area // few_w * STRIDE
            source = (place // area * height + y) * width + place % few_w * STRIDE
        value = tl.load(x + source.to(tl.int64)[:, None] * channels + column[None, :], valid, 0)
        if STRIDE > 1:
            at = place.to(tl.int64)[:, None] * channels + column[None, :]
            tl.store(out + at, value, valid)
        total += value.to(tl.float32)
    slots += slot.to(tl.int64) * channels + column
    tl.store(slots, tl.sum(total, 0), column < channels)


@triton.jit  # type: ignore[untyped-decorator]
def add_product(  # type: ignore[no-untyped-def]
    acc, left_at, right_at, pitch, valid, inside,
    LENGTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc plus a tile's product, taken in steps of DEPTH; the right side's steps are as far apart
    as `pitch` times that."""
    for first in range(0, LENGTH, DEPTH):
        left = tl.load(left_at + first, valid, 0)
        right = tl.load(right_at + first * pitch, inside, 0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows", "tiles", "all_tiles", "height", "width"])  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    d_y, weight, added, mask, out, slots, rows, tiles, all_tiles, outputs, height, width,
    INPUTS: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(outputs, COLUMNS)
    program = tl.program_id(0)
    k = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (k < outputs) | EVEN_COLUMNS
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    right_at = weight + depth[:, None] * outputs + k[None, :]
    if HELD:
        held = tl.load(right_at, inside[None, :], 0)
    step = tl.num_programs(0) // across
    far = tl.cast(rows, tl.int64)  # offsets of a large batch do not fit in 32 bits
    for tile in tl.range(program // across, all_tiles, step, num_stages=STAGES if HELD else 1):
        above = tile % tiles * ROWS
        begin = tile // tiles * far + above
        valid = (row < rows - above)[:, None] | EVEN_ROWS
        both = valid & inside[None, :]
        at = row[:, None] * outputs + k[None, :]
        passes = tl.load(mask + begin * outputs + at, both, 0)
        if KIND == 1:
            add = tl.load(added + begin * outputs + at, both, 0)
        if KIND == 2:
            # Counted from the tile's first image: divisions in 64 bits take longer than the loads.
            area = height * width
            place = above % area + row
            pixel = place % area
            x = pixel % width
            y = pixel // width
            few_h, few_w = tl.cdiv(height, STRIDE), tl.cdiv(width, STRIDE)
            few = (place // area * few_h + y // STRIDE) * few_w + x // STRIDE
            there = (x % STRIDE == 0) & (y % STRIDE == 0)
            image = tile // tiles * (rows // area) + above // area
            few_at = added + image * tl.cast(few_h * few_w * outputs, tl.int64)
            few_at = few_at + few[:, None] * outputs + k[None, :]
            add = tl.load(few_at, both & there[:, None], 0)
        left_at = d_y + begin * INPUTS + row[:, None] * INPUTS + depth[None, :]
        if HELD:
            acc = tl.dot(tl.load(left_at, valid, 0), held, input_precision=PRECISION)
        else:
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            acc = add_product(
                acc, left_at, right_at, outputs, valid, inside[None, :], INPUTS, DEPTH, PRECISION
            )
        if KIND > 0:
            acc += add.to(tl.float32)
        d = tl.where(passes > 0, acc, 0.0).to(out.dtype.element_ty)
        tl.store(out + begin * outputs + at, d, both)
        total = tl.sum(d.to(tl.float32), 0)
        tl.store(slots + tile * outputs + k, total, inside)
