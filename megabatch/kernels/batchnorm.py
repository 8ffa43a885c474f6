"""Batch norm by spans with ReLU and residual add, channels last: three launches.

Statistics over groups of `span` images (Goyal 2017, section 2.3): partial sums go to fixed slots
and are added up in a fixed order, so that replicas compute equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.rows import (
    APPLY,
    APPLY_AND_SUM,
    FEW,
    MOMENTS,
    SLOTS,
    STAGES,
    Rows,
    part_here,
    rows_of,
)


class Affine(NamedTuple):
    """What batch norm does to a span: y = scale x + shift. All fp32, spans x channels."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    inverse: Tensor
    """1 / sqrt(variance + eps)"""


def affine(
    x: Tensor, weight: Tensor, bias: Tensor, span: int, eps: float, statistics: Tensor
) -> Affine:
    """The affine map of each span's batch norm; its mean and unbiased variance are written to
    `statistics` (spans x 2 channels, its rows any distance apart)."""
    cut, programs, grid = rows_of(x, span, MOMENTS)
    slots = torch.empty(
        (cut.spans, cut.parts, 2, cut.channels), dtype=torch.float32, device=x.device
    )
    _moments[grid](
        x, slots, cut.rows, cut.parts, cut.each, cut.channels,
        programs.rows, programs.columns, STAGES, num_warps=programs.warps,
    )  # fmt: skip
    return affine_of_slots(slots, cut, weight, bias, eps, statistics)


def affine_of_slots(
    slots: Tensor, cut: Rows, weight: Tensor, bias: Tensor, eps: float, statistics: Tensor
) -> Affine:
    """The same from each part's mean and sum of squares around it (spans x parts x 2 x channels),
    which another kernel may have left."""
    out = torch.empty((4, cut.spans, cut.channels), dtype=torch.float32, device=slots.device)
    _finish[(cut.spans, triton.cdiv(cut.channels, FEW))](
        slots, weight, bias, out, statistics, statistics.stride(0),
        cut.rows, cut.parts, cut.each, cut.channels, eps, FEW, SLOTS,
    )  # fmt: skip
    return Affine(*out)


def apply(
    x: Tensor,
    found: Affine,
    span: int,
    relu: bool,
    residual: Tensor | None = None,
    residual_affine: Affine | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """relu(scale x + shift + residual); the residual may have an affine map of its own.

    With `sums` also the column sums of the result by span and part (spans x parts x channels).
    """
    cut, programs, grid = rows_of(x, span, APPLY_AND_SUM if sums else APPLY)
    out = torch.empty_like(x)
    slots = None
    if sums:
        slots = torch.empty(
            (cut.spans, cut.parts, cut.channels), dtype=torch.float32, device=x.device
        )
    other = residual_affine or found
    kind = 0 if residual is None else 1 if residual_affine is None else 2
    _apply[grid](
        x, x if residual is None else residual, out, found.scale, found.shift,
        other.scale, other.shift, slots,
        cut.rows, cut.parts, cut.each, cut.channels, relu, kind, sums,
        programs.rows, programs.columns, num_warps=programs.warps,
    )  # fmt: skip
    return out, slots


@triton.jit(do_not_specialize=["rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _moments(  # type: ignore[no-untyped-def]
    x, slots, rows, parts, each, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part's means and sums of squares around them: shifted by its first tile's mean, since the
    plain sum of squares loses what a large mean hides."""
    slot, _, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, COLUMNS
    )
    x += begin
    value = tl.load(x + at, (row < count)[:, None] & inside[None, :], 0).to(tl.float32)
    pivot = tl.sum(value, 0) / tl.minimum(ROWS, count)
    total = tl.where((row < count)[:, None], value - pivot[None, :], 0.0)
    square = total * total
    for first in tl.range(ROWS, count, ROWS, num_stages=STAGES):
        valid = (row < count - first)[:, None]
        value = tl.load(x + first * channels + at, valid & inside[None, :], 0).to(tl.float32)
        away = tl.where(valid, value - pivot[None, :], 0.0)
        total += away
        square += away * away
    offset = tl.sum(total, 0) / count
    slots += slot.to(tl.int64) * 2 * channels + column
    tl.store(slots, pivot + offset, inside)
    tl.store(slots + channels, tl.sum(square, 0) - count * offset * offset, inside)


@triton.jit(do_not_specialize=["pitch", "rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    slots, weight, bias, out, statistics, pitch, rows, parts, each, channels, eps,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One span's affine map, from its parts' means and squares (Chan 1979), which are taken around
    the first part's mean."""
    span = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    slots += span.to(tl.int64) * parts * 2 * channels
    index = tl.arange(0, PARTS)
    at = index[:, None] * 2 * channels + column[None, :]
    pivot = tl.load(slots + column, inside, 0)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    square = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, parts, PARTS):
        valid = (first + index < parts)[:, None] & inside[None, :]
        count = tl.minimum(each, rows - (first + index) * each).to(tl.float32)[:, None]
        here = slots + first * 2 * channels + at
        away = tl.where(valid, tl.load(here, valid, 0) - pivot[None, :], 0.0)
        total += away * count
        square += tl.load(here + channels, valid, 0) + away * away * count
    offset = tl.sum(total, 0) / rows
    mean = pivot + offset
    squares = tl.maximum(tl.sum(square, 0) - offset * offset * rows, 0.0)
    inverse = 1 / tl.sqrt_rn(squares / rows + eps)
    scale = tl.load(weight + column, inside, 0).to(tl.float32) * inverse
    shift = tl.load(bias + column, inside, 0).to(tl.float32) - scale * mean

    size = tl.num_programs(0) * channels
    out += span * channels + column
    tl.store(out, scale, inside)
    tl.store(out + size, shift, inside)
    tl.store(out + 2 * size, mean, inside)
    tl.store(out + 3 * size, inverse, inside)
    statistics += span * pitch + column
    tl.store(statistics, mean, inside)
    tl.store(statistics + channels, squares / tl.maximum(rows - 1, 1), inside)


@triton.jit(do_not_specialize=["rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    x, residual, out, scale, shift, residual_scale, residual_shift, slots,
    rows, parts, each, channels, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot, span, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, COLUMNS
    )
    a = tl.load(scale + span * channels + column, inside, 0)
    b = tl.load(shift + span * channels + column, inside, 0)
    if RESIDUAL == 2:
        c = tl.load(residual_scale + span * channels + column, inside, 0)
        b += tl.load(residual_shift + span * channels + column, inside, 0)
    x += begin
    out += begin
    residual += begin
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        valid = (row < count - first)[:, None] & inside[None, :]
        y = tl.load(x + at, valid, 0).to(tl.float32) * a[None, :] + b[None, :]
        if RESIDUAL == 1:
            y += tl.load(residual + at, valid, 0).to(tl.float32)
        if RESIDUAL == 2:
            y += tl.load(residual + at, valid, 0).to(tl.float32) * c[None, :]
        if RELU:
            y = tl.maximum(y, 0.0)
        y = y.to(out.dtype.element_ty)
        tl.store(out + at, y, valid)
        if SUMS:
            total += tl.where(valid, y.to(tl.float32), 0.0)
        x += ROWS * channels
        out += ROWS * channels
        residual += ROWS * channels
    if SUMS:
        tl.store(slots + slot.to(tl.int64) * channels + column, tl.sum(total, 0), inside)
