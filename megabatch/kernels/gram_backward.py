"""The gradients of batch norm behind a 1x1 convolution, from its input and the gradient alone.

With P = g' z: dW = scale P - the mean's share - S c (W cov), dz = g (scale W) - z Q + a constant,
where Q = W' diag(c) W and c = scale dot inverse^2 / S. Neither the convolution's output nor a pass
over it is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.gram import Expansion, row_product
from megabatch.kernels.pointwise import FULL, Tile, add_product, precision_of

# The best of a sweep on an H200, by the channels that come in.
_CONTRACT = {64: Tile(128, 64, 64, 4, 2)}
_CONTRACT_WIDE = Tile(128, 128, 64, 4, 3)


class Walk(NamedTuple):
    """How the weights' gradients are cut up: a program has some outputs and walks over some spans.
    One that walks over all of many small ones waits for each of them."""

    outputs: int
    spans: int
    warps: int


_WALK = Walk(4, 4, 4)


def expand_backward(
    gradient: Tensor,
    sums: Tensor,
    z: Tensor,
    weight: Tensor,
    found: Expansion,
    span: int,
    tile: Tile | None = None,
    walk: Walk = _WALK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, W, gamma and beta, from the gradient at the batch norm's output (masked
    already) and its column sums (spans x outputs)."""
    images, inputs, height, width = z.shape
    outputs = len(weight)
    spans, rows = images // span, span * height * width
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": z.device}
    products = row_product(gradient, z, span)

    groups = triton.cdiv(spans, walk.spans)
    parts = torch.empty((groups, outputs * (inputs + 2)), **fp32)
    scaled = torch.empty((spans, outputs, inputs), dtype=z.dtype, device=z.device)
    pulls = torch.empty((2, spans, outputs), **fp32)
    _weight_gradients[(triton.cdiv(outputs, walk.outputs), groups)](
        products, weight, found.covaried, found.scale, found.mean, found.inverse, sums,
        found.inputs_mean, parts, scaled, pulls,
        spans, walk.spans, rows, outputs, inputs, walk.outputs, num_warps=walk.warps,
    )  # fmt: skip
    summed = parts[0] if groups == 1 else parts.sum(0)
    d_weight, d_gamma, d_beta = summed.split((outputs * inputs, outputs, outputs))

    quadratic = torch.empty((spans, inputs, inputs), dtype=z.dtype, device=z.device)
    constant = torch.empty((spans, inputs), **fp32)
    block = min(inputs, 64)
    _quadratic[(spans, inputs // block, inputs // block)](
        weight, pulls, quadratic, constant, outputs, inputs, z.dtype == torch.bfloat16,
        block, 64, precision_of(z), num_warps=4,
    )  # fmt: skip

    d_z = torch.empty_like(z)
    full = z.dtype == torch.float32
    tile = tile or (FULL if full else _CONTRACT.get(inputs, _CONTRACT_WIDE))
    tiles = triton.cdiv(rows, tile.rows)
    grid = (spans * tiles * triton.cdiv(inputs, tile.columns),)
    _contract[grid](
        gradient, scaled, z, quadratic, constant, d_z,
        rows, tiles, inputs, outputs, rows % tile.rows == 0, inputs % tile.columns == 0,
        tile.rows, tile.columns, min(tile.depth, inputs), precision_of(z),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return d_z, d_weight.view(outputs, inputs), d_gamma, d_beta


@triton.jit(do_not_specialize=["spans", "each", "rows"])  # type: ignore[untyped-decorator]
def _weight_gradients(  # type: ignore[no-untyped-def]
    products, weight, covaried, scale, mean, inverse, sums, inputs_mean,
    parts, scaled, pulls, spans, each, rows, outputs,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of outputs' weights, gamma and beta, over a group of `each` spans; and
    what the gradient of z takes of each span: scale W, the pull towards the mean and the
    constant."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, INPUTS)
    inside = k < outputs
    at = k[:, None] * INPUTS + i[None, :]
    w = tl.load(weight + at, inside[:, None], 0).to(tl.float32)
    total = tl.zeros([BLOCK, INPUTS], tl.float32)
    d_gamma = tl.zeros([BLOCK], tl.float32)
    d_beta = tl.zeros([BLOCK], tl.float32)
    size = tl.cast(outputs * INPUTS, tl.int64)
    first = tl.program_id(1) * each
    for span in tl.range(first, tl.minimum(first + each, spans), num_stages=2):
        here = span * outputs + k
        all_at = span * size + at
        a = tl.load(scale + here, inside, 0)
        m = tl.load(mean + here, inside, 0)
        r = tl.load(inverse + here, inside, 0)
        s = tl.load(sums + here, inside, 0)
        mu = tl.load(inputs_mean + span * INPUTS + i)
        p = tl.load(products + all_at, inside[:, None], 0)
        dot = tl.sum(p * w, 1) - m * s
        c = a * dot * r * r
        v = tl.load(covaried + all_at, inside[:, None], 0)
        total += a[:, None] * (p - s[:, None] * mu[None, :]) - c[:, None] * v
        d_gamma += dot * r
        d_beta += s
        aw = (a[:, None] * w).to(scaled.dtype.element_ty)
        tl.store(scaled + all_at, aw, inside[:, None])
        tl.store(pulls + here, c / rows, inside)
        tl.store(pulls + spans * outputs + here, (m * c - a * s) / rows, inside)
    parts += tl.program_id(1) * (size + 2 * outputs)
    tl.store(parts + at, total, inside[:, None])
    tl.store(parts + size + k, d_gamma, inside)
    tl.store(parts + size + outputs + k, d_beta, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quadratic(  # type: ignore[no-untyped-def]
    weight, pulls, quadratic, constant, outputs, INPUTS: tl.constexpr, BF16: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """- W' diag(c) W of a span, and the constant of its dz."""
    span = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) > tl.program_id(2):  # it is its own transpose
        return
    n = tl.arange(0, DEPTH)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    total = tl.zeros([DEPTH, BLOCK], tl.float32)
    pulls += span * outputs
    size = tl.num_programs(0) * outputs
    for first in range(0, outputs, DEPTH):
        k = first + n
        inside = k < outputs
        c = tl.load(pulls + k, inside, 0)
        u = tl.load(pulls + size + k, inside, 0)
        left = tl.load(weight + k[None, :] * INPUTS + i[:, None], inside[None, :], 0)
        right = tl.load(weight + k[:, None] * INPUTS + j[None, :], inside[:, None], 0)
        pulled = left.to(tl.float32) * -c[None, :]
        total += u[:, None] * right.to(tl.float32)
        if BF16:  # two halves of it are as exact as tf32, and no operand has to be turned round
            high = pulled.to(tl.bfloat16)
            low = (pulled - high.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low, right, acc)
            acc = tl.dot(high, right, acc)
        else:
            acc = tl.dot(pulled, right.to(tl.float32), acc, input_precision=PRECISION)
    quadratic += span.to(tl.int64) * INPUTS * INPUTS
    found = acc.to(quadratic.dtype.element_ty)
    tl.store(quadratic + i[:, None] * INPUTS + j[None, :], found)
    if tl.program_id(1) < tl.program_id(2):
        tl.store(quadratic + j[None, :] * INPUTS + i[:, None], found)
    if tl.program_id(1) == 0:
        tl.store(constant + span * INPUTS + j, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _contract(  # type: ignore[no-untyped-def]
    gradient, scaled, z, quadratic, constant, out, rows, tiles, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz = g (scale W) - z Q + constant."""
    across = tl.cdiv(INPUTS, COLUMNS)
    tile = tl.program_id(0) // across
    span = tile // tiles
    above = tile % tiles * ROWS
    begin = span.to(tl.int64) * rows + above
    row = tl.arange(0, ROWS)
    j = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    valid = (row < rows - above)[:, None] | EVEN_ROWS
    inside = ((j < INPUTS) | EVEN_COLUMNS)[None, :]
    scaled += span.to(tl.int64) * OUTPUTS * INPUTS
    quadratic += span.to(tl.int64) * INPUTS * INPUTS
    right_at = depth[:, None] * INPUTS + j[None, :]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    left_at = gradient + begin * OUTPUTS + row[:, None] * OUTPUTS + depth[None, :]
    acc = add_product(
        acc, left_at, scaled + right_at, INPUTS, valid, inside, OUTPUTS, DEPTH, PRECISION
    )
    left_at = z + begin * INPUTS + row[:, None] * INPUTS + depth[None, :]
    acc = add_product(
        acc, left_at, quadratic + right_at, INPUTS, valid, inside, INPUTS, DEPTH, PRECISION
    )
    b = tl.load(constant + span * INPUTS + j, (j < INPUTS) | EVEN_COLUMNS, 0)
    d = (acc + b[None, :]).to(out.dtype.element_ty)
    tl.store(out + begin * INPUTS + row[:, None] * INPUTS + j[None, :], d, valid & inside)
