"""The way back through batch norm by spans and ReLU: three launches, and one that joins gradients.

As forward: partial sums in fixed slots, added up in a fixed order; ReLU's mask is recomputed from
what entered batch norm, so nothing is kept for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.batchnorm import Affine
from megabatch.kernels.rows import (
    BACKWARD_APPLY,
    BACKWARD_SUMS,
    FEW,
    JOIN,
    SLOTS,
    STAGES,
    part_here,
    rows_of,
)


def backward(
    gradient: Tensor, x: Tensor, found: Affine, span: int, relu: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. ReLU's mask is recomputed from x; `out` may be `gradient`
    itself, which is then written over."""
    cut, programs, grid = rows_of(x, span, BACKWARD_SUMS)
    slots = torch.empty(
        (cut.spans, cut.parts, 2, cut.channels), dtype=torch.float32, device=x.device
    )
    _backward_sums[grid](
        gradient, x, found.scale, found.shift, found.mean, found.inverse, slots,
        cut.rows, cut.parts, cut.each, cut.channels, relu,
        programs.rows, programs.columns, STAGES, num_warps=programs.warps,
    )  # fmt: skip
    factors, d_weight, d_bias = factors_of_slots(slots, found, cut.rows)
    out = torch.empty_like(x) if out is None else out
    cut, programs, grid = rows_of(x, span, BACKWARD_APPLY)
    _backward_apply[grid](
        gradient, x, found.scale, found.shift, factors, out,
        cut.rows, cut.parts, cut.each, cut.spans * cut.channels, cut.channels,
        relu, programs.rows, programs.columns, num_warps=programs.warps,
    )  # fmt: skip
    return out, d_weight, d_bias


def factors_of_slots(slots: Tensor, found: Affine, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """From each part's sums of the gradient and of the gradient times the normalised x (spans x
    parts x 2 x channels): the factors of dx, and the gradients of weight and bias."""
    spans, parts, _, channels = slots.shape
    factors, totals = torch.empty(
        (2, 2, spans, channels), dtype=torch.float32, device=slots.device
    ).unbind()
    _backward_finish[(spans, triton.cdiv(channels, FEW))](
        slots, found.scale, found.mean, found.inverse, factors, totals,
        rows, parts, channels, FEW, SLOTS,
    )  # fmt: skip
    d_bias, d_weight = (totals[:, 0] if spans == 1 else totals.sum(1)).unbind()
    return factors, d_weight, d_bias


def join(first: Tensor, second: Tensor | None, result: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """(first + second) where `result`, which left a ReLU, is above 0, and its column sums by span
    and part (spans x parts x channels)."""
    cut, programs, grid = rows_of(result, span, JOIN)
    out = torch.empty_like(result)
    slots = torch.empty(
        (cut.spans, cut.parts, cut.channels), dtype=torch.float32, device=result.device
    )
    _join[grid](
        first, first if second is None else second, result, out, slots,
        cut.rows, cut.parts, cut.each, cut.channels, second is not None,
        programs.rows, programs.columns, num_warps=programs.warps,
    )  # fmt: skip
    return out, slots


@triton.jit(do_not_specialize=["rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _backward_sums(  # type: ignore[no-untyped-def]
    gradient, x, scale, shift, mean, inverse, slots,
    rows, parts, each, channels, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A part's sums of the gradient and of the gradient times the normalised x."""
    slot, span, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, COLUMNS
    )
    here = span * channels + column
    a = tl.load(scale + here, inside, 0)
    b = tl.load(shift + here, inside, 0)
    m = tl.load(mean + here, inside, 0)
    x += begin
    gradient += begin
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, count, ROWS, num_stages=STAGES):
        valid = (row < count - first)[:, None] & inside[None, :]
        v = tl.load(x + first * channels + at, valid, 0).to(tl.float32)
        g = tl.load(gradient + first * channels + at, valid, 0).to(tl.float32)
        if RELU:
            g = tl.where(v * a[None, :] + b[None, :] > 0, g, 0.0)
        total += g
        product += g * (v - m[None, :])
    slots += slot.to(tl.int64) * 2 * channels + column
    tl.store(slots, tl.sum(total, 0), inside)
    r = tl.load(inverse + here, inside, 0)
    tl.store(slots + channels, tl.sum(product, 0) * r, inside)


@triton.jit(do_not_specialize=["rows", "parts"])  # type: ignore[untyped-decorator]
def _backward_finish(  # type: ignore[no-untyped-def]
    slots, scale, mean, inverse, factors, totals, rows, parts, channels,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A span's two sums, and the factors of dx = scale gradient + factor x + constant."""
    span = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    slots += span.to(tl.int64) * parts * 2 * channels
    index = tl.arange(0, PARTS)
    at = index[:, None] * 2 * channels + column[None, :]
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    product = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, parts, PARTS):
        valid = (first + index < parts)[:, None] & inside[None, :]
        total += tl.load(slots + first * 2 * channels + at, valid, 0)
        product += tl.load(slots + first * 2 * channels + channels + at, valid, 0)
    s = tl.sum(total, 0)
    p = tl.sum(product, 0)
    here = span * channels + column
    a = tl.load(scale + here, inside, 0)
    factor = -a * tl.load(inverse + here, inside, 0) * p / rows
    constant = -a * s / rows - factor * tl.load(mean + here, inside, 0)
    size = tl.num_programs(0) * channels
    tl.store(factors + here, factor, inside)
    tl.store(factors + size + here, constant, inside)
    tl.store(totals + here, s, inside)
    tl.store(totals + size + here, p, inside)


@triton.jit(do_not_specialize=["size", "rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _backward_apply(  # type: ignore[no-untyped-def]
    gradient, x, scale, shift, factors, out, rows, parts, each, size, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    _, span, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, COLUMNS
    )
    here = span * channels + column
    a = tl.load(scale + here, inside, 0)
    b = tl.load(shift + here, inside, 0)
    factor = tl.load(factors + here, inside, 0)
    constant = tl.load(factors + size + here, inside, 0)
    x += begin
    gradient += begin
    out += begin
    for first in range(0, count, ROWS):
        valid = (row < count - first)[:, None] & inside[None, :]
        v = tl.load(x + at, valid, 0).to(tl.float32)
        g = tl.load(gradient + at, valid, 0).to(tl.float32)
        if RELU:
            g = tl.where(v * a[None, :] + b[None, :] > 0, g, 0.0)
        d = a[None, :] * g + factor[None, :] * v + constant[None, :]
        tl.store(out + at, d.to(out.dtype.element_ty), valid)
        x += ROWS * channels
        gradient += ROWS * channels
        out += ROWS * channels


@triton.jit(do_not_specialize=["rows", "parts", "each"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    first_part, second_part, result, out, slots, rows, parts, each, channels,
    TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot, _, column, inside, begin, count, row, at = part_here(
        rows, parts, each, channels, ROWS, COLUMNS
    )
    first_part += begin
    second_part += begin
    result += begin
    out += begin
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        valid = (row < count - first)[:, None] & inside[None, :]
        g = tl.load(first_part + at, valid, 0).to(tl.float32)
        if TWO:
            g += tl.load(second_part + at, valid, 0).to(tl.float32)
        g = tl.where(tl.load(result + at, valid, 0) > 0, g, 0.0).to(out.dtype.element_ty)
        tl.store(out + at, g, valid)
        total += g.to(tl.float32)
        first_part += ROWS * channels
        second_part += ROWS * channels
        result += ROWS * channels
        out += ROWS * channels
    tl.store(slots + slot.to(tl.int64) * channels + column, tl.sum(total, 0), inside)
