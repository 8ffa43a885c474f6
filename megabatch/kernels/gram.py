"""Batch norm behind a 1x1 convolution, without the convolution's output: one product, no passes.

Mean and variance of W z follow from the mean and the Gram matrix of z, a quarter as wide in a
bottleneck: mean = W mu, var_k = w_k' cov w_k. So scale and shift are known before the product, and
normalising, the residual add and ReLU are its epilogue; the gradients need no more than g and z.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.pointwise import DEEP, FULL, Tile, add_product, launch_grid, precision_of

# The best of a sweep on an H200, by the channels that come in: the deeper a product, the more room
# its weight takes.
_EXPAND = {
    64: Tile(128, 128, 64, 8, 3, 1),
    128: Tile(64, 128, 128, 4, 3, 2),
    256: Tile(64, 128, 256, 4, 3, 2),
}
_EXPAND_BOTH = {64: Tile(64, 128, 64, 4, 3, 2), 128: Tile(64, 128, 128, 4, 2, 1)}
_COVARY = Tile(64, 64, 64, 4, 3)
_COVARY_SPANS = Tile(128, 128, 64, 8, 3)


class Expansion(NamedTuple):
    """Batch norm of W z by spans, all in fp32: y = scale (W z) + shift; and what gradients need."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    inverse: Tensor
    """1 / sqrt(variance + eps); these four: spans x outputs"""
    inputs_mean: Tensor
    """spans x inputs"""
    covaried: Tensor
    """W cov: spans x outputs x inputs"""


def applies(inputs: int, outputs: int) -> bool:
    """Whether these kernels take such a convolution."""
    return inputs in (64, 128, 256, 512) and outputs % 64 == 0


def gram(z: Tensor, span: int) -> Tensor:
    """Sums over rows of z z', by span: spans x channels x channels, fp32."""
    return row_product(z, z, span)


def row_product(left: Tensor, right: Tensor, span: int) -> Tensor:
    """left' right over the rows of each span, in fp32; the rows are split in a fixed way, since one
    small result for each span would leave most of the chip idle."""
    spans = len(left) // span
    left, right = (t.permute(0, 2, 3, 1).reshape(-1, t.shape[1]) for t in (left, right))
    rows = len(left) // spans
    tiles = triton.cdiv(left.shape[1], 128) * triton.cdiv(right.shape[1], 128)
    splits = _divisor(rows, max(1, min(264 // (spans * tiles), rows // 512)))
    left = left.view(spans * splits, rows // splits, -1).transpose(1, 2)
    right = right.view(spans * splits, rows // splits, -1)
    if left.is_cuda and left.dtype != torch.float32:
        product = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        product = torch.bmm(left.float(), right.float())
    if splits == 1:
        return product
    return product.view(spans, splits, *product.shape[1:]).sum(1)


def _divisor(number: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if number % d == 0)


def expansion(
    grams: Tensor,
    sums: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    rows: int,
    eps: float,
    statistics: Tensor,
    cut: Tile | None = None,
) -> Expansion:
    """The batch norm of W z from the Gram matrix and the column sums (spans x inputs) of z, of
    which a span has `rows`; mean and unbiased variance go to `statistics` (spans x 2 outputs)."""
    spans, inputs, _ = grams.shape
    outputs = len(weight)
    cut = cut or (_COVARY if spans == 1 else _COVARY_SPANS)
    columns = min(inputs, cut.columns)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": grams.device}
    vectors = torch.empty((4, spans, outputs), **fp32)
    covaried = torch.empty((spans, outputs, inputs), **fp32)
    slots = torch.empty((spans, inputs // columns, 2, outputs), **fp32)
    mean = sums / rows
    _covary[(spans, triton.cdiv(outputs, cut.rows), inputs // columns)](
        grams, mean, weight, covaried, slots, rows, outputs, inputs,
        weight.dtype != torch.float32, cut.rows, columns, min(inputs, cut.depth),
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    block = 128
    _expansion[(spans, triton.cdiv(outputs, block))](
        slots, gamma, beta, vectors, statistics, statistics.stride(0),
        rows, outputs, eps, inputs // columns, block, num_warps=4,
    )  # fmt: skip
    scale, shift, outputs_mean, inverse = vectors
    return Expansion(scale, shift, outputs_mean, inverse, mean, covaried)


def expand(
    z: Tensor,
    weight: Tensor,
    found: Expansion,
    span: int,
    identity: Tensor | None = None,
    shortcut: tuple[Tensor, Tensor, Expansion] | None = None,
    relu: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """relu(scale (W z) + shift + identity), where a shortcut (its input, weight and batch norm) may
    stand for the identity: its product is taken in the same program and never written."""
    images, inputs, height, width = z.shape
    outputs = len(weight)
    out = torch.empty(
        (images, outputs, height, width),
        dtype=z.dtype,
        device=z.device,
        memory_format=torch.channels_last,
    )
    spans, rows = images // span, span * height * width
    other, other_weight, other_found = shortcut or (z, weight, found)
    table = _EXPAND if shortcut is None else _EXPAND_BOTH if other.shape[1] <= 256 else {}
    tile = tile or (FULL if z.dtype == torch.float32 else table.get(inputs, DEEP))
    kind = 2 if shortcut is not None else int(identity is not None)
    tiles = triton.cdiv(rows, tile.rows)
    _expand[launch_grid(tile, spans * tiles, outputs, z.device)](
        z, weight, found.scale, found.shift,
        other, other_weight, other_found.scale, other_found.shift,
        z if identity is None else identity, out,
        rows, tiles, spans * tiles, outputs, inputs, other.shape[1], kind, relu,
        rows % tile.rows == 0, outputs % tile.columns == 0, tile.programs > 0,
        tile.rows, tile.columns, min(tile.depth, inputs), tile.stages, precision_of(z),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _covary(  # type: ignore[no-untyped-def]
    grams, inputs_mean, weight, covaried, slots, rows, outputs, INPUTS: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of W cov, and what its columns add to the outputs' means and variances."""
    span = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < outputs
    grams += span * INPUTS * INPUTS
    inputs_mean += span * INPUTS
    mu_j = tl.load(inputs_mean + j)
    w_row = weight + k[:, None] * INPUTS
    of_a_row = 1.0 / rows
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for first in range(0, INPUTS, DEPTH):
        i = first + tl.arange(0, DEPTH)
        mu_i = tl.load(inputs_mean + i)
        # A Gram matrix is its own transpose: tensor cores want tf32 along the sum's dimension.
        g = tl.load(grams + j[None, :] * INPUTS + i[:, None])
        cov = g * of_a_row - mu_i[:, None] * mu_j[None, :]
        w = tl.load(w_row + i[None, :], inside[:, None], 0).to(tl.float32)
        # As exact as fp32, on tensor cores: tf32 holds half weights whole and half of a covariance,
        # so that two products do; of full weights three.
        if HALF:
            high = (cov.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            acc = tl.dot(w, cov - high, acc, input_precision="tf32")
            acc = tl.dot(w, high, acc, input_precision="tf32")
        else:
            acc = tl.dot(w, cov, acc, input_precision="tf32x3")
    w = tl.load(w_row + j[None, :], inside[:, None], 0).to(tl.float32)
    at = span * outputs * INPUTS + k[:, None] * INPUTS + j[None, :]
    tl.store(covaried + at, acc, inside[:, None])
    slots += (span * tl.num_programs(2) + tl.program_id(2)) * 2 * outputs + k
    tl.store(slots, tl.sum(w * mu_j[None, :], 1), inside)
    tl.store(slots + outputs, tl.sum(w * acc, 1), inside)


@triton.jit(do_not_specialize=["pitch", "rows"])  # type: ignore[untyped-decorator]
def _expansion(  # type: ignore[no-untyped-def]
    slots, gamma, beta, vectors, statistics, pitch, rows, outputs, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and variance of a block of outputs, and from them scale and shift."""
    span = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < outputs
    slots += span * PARTS * 2 * outputs + k
    mean = tl.zeros([BLOCK], tl.float32)
    var = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        mean += tl.load(slots + part * 2 * outputs, inside, 0)
        var += tl.load(slots + (part * 2 + 1) * outputs, inside, 0)
    var = tl.maximum(var, 0.0)
    inverse = 1 / tl.sqrt_rn(var + eps)
    scale = tl.load(gamma + k, inside, 0).to(tl.float32) * inverse
    shift = tl.load(beta + k, inside, 0).to(tl.float32) - scale * mean
    size = tl.num_programs(0) * outputs
    vectors += span * outputs + k
    tl.store(vectors, scale, inside)
    tl.store(vectors + size, shift, inside)
    tl.store(vectors + 2 * size, mean, inside)
    tl.store(vectors + 3 * size, inverse, inside)
    statistics += span * pitch + k
    tl.store(statistics, mean, inside)
    tl.store(statistics + outputs, var * rows / tl.maximum(rows - 1, 1), inside)


@triton.jit(do_not_specialize=["rows", "tiles", "all_tiles"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    z, weight, scale, shift, other, other_weight, other_scale, other_shift, identity, out,
    rows, tiles, all_tiles, outputs, INPUTS: tl.constexpr, OTHERS: tl.constexpr,
    KIND: tl.constexpr, RELU: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
    HELD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Tiles of the same rows run side by side: all but the first find z in the cache.
    across = tl.cdiv(outputs, COLUMNS)
    program = tl.program_id(0)
    k = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (k < outputs) | EVEN_COLUMNS
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    if HELD:
        held = tl.load(weight + k[None, :] * INPUTS + depth[:, None], inside[None, :], 0)
        if KIND == 2:
            others = tl.arange(0, OTHERS)
            other_at = other_weight + k[None, :] * OTHERS + others[:, None]
            other_held = tl.load(other_at, inside[None, :], 0)
    step = tl.num_programs(0) // across
    far = tl.cast(rows, tl.int64)  # offsets of a large batch do not fit in 32 bits
    for tile in tl.range(program // across, all_tiles, step, num_stages=STAGES if HELD else 1):
        span = tile // tiles
        above = tile % tiles * ROWS
        begin = span * far + above
        valid = (row < rows - above)[:, None] | EVEN_ROWS
        both = valid & inside[None, :]
        at = row[:, None] * outputs + k[None, :]
        if KIND == 1:  # asked for early, to arrive while the product is taken
            add = tl.load(identity + begin * outputs + at, both, 0)
        left_at = z + begin * INPUTS + row[:, None] * INPUTS + depth[None, :]
        if HELD:
            acc = tl.dot(tl.load(left_at, valid, 0), held, input_precision=PRECISION)
        else:
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            right_at = weight + k[None, :] * INPUTS + depth[:, None]
            acc = add_product(
                acc, left_at, right_at, 1, valid, inside[None, :], INPUTS, DEPTH, PRECISION
            )
        a = tl.load(scale + span * outputs + k, inside, 0)
        b = tl.load(shift + span * outputs + k, inside, 0)
        y = acc * a[None, :] + b[None, :]
        if KIND == 1:
            y += add.to(tl.float32)
        if KIND == 2:
            if HELD:
                left_at = other + begin * OTHERS + row[:, None] * OTHERS + others[None, :]
                acc = tl.dot(tl.load(left_at, valid, 0), other_held, input_precision=PRECISION)
            else:
                acc = tl.zeros([ROWS, COLUMNS], tl.float32)
                left_at = other + begin * OTHERS + row[:, None] * OTHERS + depth[None, :]
                right_at = other_weight + k[None, :] * OTHERS + depth[:, None]
                acc = add_product(
                    acc, left_at, right_at, 1, valid, inside[None, :], OTHERS, DEPTH, PRECISION
                )
            a = tl.load(other_scale + span * outputs + k, inside, 0)
            b = tl.load(other_shift + span * outputs + k, inside, 0)
            y += acc * a[None, :] + b[None, :]
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(out + begin * outputs + at, y.to(out.dtype.element_ty), both)
