"""A 7x7 convolution with stride 2 of a picture of three channels, as a 4x4 one of folded pixels.

Four neighbours become one pixel of 12 channels (16 with zeros), so that a row of the kernel is 64
values that lie side by side: a product for tensor cores, with batch norm's sums in its epilogue.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.pointwise import precision_of
from megabatch.kernels.rows import Rows

_CHANNELS = 16  # of a folded pixel: 2 x 2 x 3 and four zeros
_SIDE = 4  # of the kernel over folded pixels
_ROWS = 64
_WARPS = 4
_STAGES = 2
_PROGRAMS = 264


def convolved(size: int) -> int:
    """The side of the result."""
    return (size - 1) // 2 + 1


def fold(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Images n x 3 x h x w of any layout and dtype -> n x h' x w' x 16, folded and padded."""
    count, channels, height, width = images.shape
    if channels > 3:
        raise ValueError(f"a folded picture has at most 3 channels, got {channels}")
    tall, wide = convolved(height) + _SIDE - 1, convolved(width) + _SIDE - 1
    out = torch.empty((count, tall, wide, _CHANNELS), dtype=dtype, device=images.device)
    pixels = 128
    _fold[(count, triton.cdiv(tall * wide, pixels))](
        images, out, *images.stride(), height, width, tall, wide, channels,
        pixels, _CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def fold_weight(weight: Tensor) -> Tensor:
    """Weights k x 3 x 7 x 7 -> 4 x 64 x k: for each row of folded pixels a matrix."""
    outputs, channels, *_ = weight.shape
    eight = torch.nn.functional.pad(weight, (1, 0, 1, 0))
    six = eight.view(outputs, channels, _SIDE, 2, _SIDE, 2)
    # outputs, channel, row, y, column, x -> row, column, y, x, channel, outputs
    folded = six.permute(2, 4, 3, 5, 1, 0).reshape(_SIDE, _SIDE, 4 * channels, outputs)
    padded = torch.nn.functional.pad(folded, (0, 0, 0, _CHANNELS - 4 * channels))
    return padded.reshape(_SIDE, _SIDE * _CHANNELS, outputs).contiguous()


def unfold_weight(folded: Tensor, channels: int) -> Tensor:
    """The way back, for gradients."""
    outputs = folded.shape[2]
    inner = folded.view(_SIDE, _SIDE, _CHANNELS, outputs)[:, :, : 4 * channels]
    six = inner.reshape(_SIDE, _SIDE, 2, 2, channels, outputs).permute(5, 4, 0, 2, 1, 3)
    return six.reshape(outputs, channels, 2 * _SIDE, 2 * _SIDE)[:, :, 1:, 1:]


def _cut(folded: Tensor, outputs: int, span: int) -> tuple[Rows, int, int]:
    count, tall, wide, _ = folded.shape
    height, width = tall - _SIDE + 1, wide - _SIDE + 1
    spans, rows = count // span, span * height * width
    wanted = max(1, _PROGRAMS // spans)
    each = triton.cdiv(triton.cdiv(rows, wanted), _ROWS) * _ROWS
    return Rows(spans, rows, outputs, triton.cdiv(rows, each), each), height, width


def convolve(folded: Tensor, weight: Tensor, span: int) -> tuple[Tensor, Tensor, Rows]:
    """The convolution by a folded weight, channels last; and what `affine_of_slots` takes: each
    part's means and sums of squares around them."""
    outputs = weight.shape[2]
    cut, height, width = _cut(folded, outputs, span)
    out = torch.empty(
        (len(folded), outputs, height, width),
        dtype=folded.dtype,
        device=folded.device,
        memory_format=torch.channels_last,
    )
    slots = torch.empty(
        (cut.spans, cut.parts, 2, outputs), dtype=torch.float32, device=folded.device
    )
    _convolve[(cut.spans * cut.parts,)](
        folded, weight, out, slots, cut.rows, cut.parts, cut.each, height, width,
        outputs, _ROWS, _SIDE * _CHANNELS, _STAGES, precision_of(folded), num_warps=_WARPS,
    )  # fmt: skip
    return out, slots, cut


def weight_gradient(folded: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of the folded weight, fp32; summed in fixed slots."""
    outputs = d_y.shape[1]
    cut, height, width = _cut(folded, outputs, len(folded))
    slots = torch.empty(
        (cut.parts, _SIDE, _SIDE * _CHANNELS, outputs), dtype=torch.float32, device=folded.device
    )
    _weight_gradient[(cut.parts,)](
        folded, d_y, slots, cut.rows, cut.each, height, width,
        outputs, _ROWS, _SIDE * _CHANNELS, _STAGES, precision_of(folded), num_warps=_WARPS,
    )  # fmt: skip
    return slots.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    images, out, step_n, step_c, step_y, step_x, height, width, tall, wide, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inner = tl.arange(0, CHANNELS)
    channel = inner % channels
    # The padding of 3 and the kernel's added row and column: folded pixel 0 begins at -4.
    y = (pixel // wide * 2 - 4)[:, None] + (inner // channels // 2)[None, :]
    x = (pixel % wide * 2 - 4)[:, None] + (inner // channels % 2)[None, :]
    real = (inner < 4 * channels)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = images + image * step_n + channel[None, :] * step_c + y * step_y + x * step_x
    exists = (pixel < tall * wide)[:, None] & (inner < CHANNELS)[None, :]
    value = tl.load(at, real & exists, 0).to(out.dtype.element_ty)
    out += image * tall * wide * CHANNELS
    tl.store(out + pixel[:, None] * CHANNELS + inner[None, :], value, exists)


@triton.jit  # type: ignore[untyped-decorator]
def _windows(place, height, width, line):  # type: ignore[no-untyped-def]
    """Where the first rows of some results' windows begin in the folded pictures, of lines so long;
    `place` counts the results."""
    # Divisions in 32 bits, inside the part: in 64 they would take longer than the loads.
    area = height * width
    image = place // area
    pixel = place % area
    inner = (pixel // width * (width + 3) + pixel % width) * 16
    return image.to(tl.int64) * ((height + 3) * line) + inner


@triton.jit(do_not_specialize=["rows", "parts", "each", "height", "width"])  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    folded, weight, out, slots, rows, parts, each, height, width,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    part = slot % parts
    line = (width + 3) * 16
    depth = tl.arange(0, DEPTH)
    k = tl.arange(0, OUTPUTS)
    weight_at = weight + depth[:, None] * OUTPUTS + k[None, :]
    w0 = tl.load(weight_at)
    w1 = tl.load(weight_at + DEPTH * OUTPUTS)
    w2 = tl.load(weight_at + 2 * DEPTH * OUTPUTS)
    w3 = tl.load(weight_at + 3 * DEPTH * OUTPUTS)
    span = (slot // parts).to(tl.int64)
    folded += span * (rows // (height * width)) * ((height + 3) * line)
    out += span * rows * OUTPUTS
    start = part * each
    count = tl.minimum(each, rows - start)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    square = tl.zeros([ROWS, OUTPUTS], tl.float32)
    pivot = tl.zeros([OUTPUTS], tl.float32)
    for first in tl.range(0, count, ROWS, num_stages=STAGES):
        valid = (row < count - first)[:, None]
        place = start + first + row
        at = folded + _windows(place, height, width, line)[:, None] + depth[None, :]
        acc = tl.dot(tl.load(at, valid, 0), w0, input_precision=PRECISION)
        acc = tl.dot(tl.load(at + line, valid, 0), w1, acc, input_precision=PRECISION)
        acc = tl.dot(tl.load(at + 2 * line, valid, 0), w2, acc, input_precision=PRECISION)
        acc = tl.dot(tl.load(at + 3 * line, valid, 0), w3, acc, input_precision=PRECISION)
        y = acc.to(out.dtype.element_ty)
        tl.store(out + place.to(tl.int64)[:, None] * OUTPUTS + k[None, :], y, valid)
        y = y.to(tl.float32)
        if first == 0:
            pivot = tl.sum(y, 0) / tl.minimum(ROWS, count)
        away = tl.where(valid, y - pivot[None, :], 0.0)
        total += away
        square += away * away
    offset = tl.sum(total, 0) / count
    slots += slot.to(tl.int64) * 2 * OUTPUTS + k
    tl.store(slots, pivot + offset)
    tl.store(slots + OUTPUTS, tl.sum(square, 0) - count * offset * offset)


@triton.jit(do_not_specialize=["rows", "each", "height", "width"])  # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]
    folded, d_y, slots, rows, each, height, width,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    line = (width + 3) * 16
    depth = tl.arange(0, DEPTH)
    k = tl.arange(0, OUTPUTS)
    start = part * each
    count = tl.minimum(each, rows - start)
    row = tl.arange(0, ROWS)
    g0 = tl.zeros([DEPTH, OUTPUTS], tl.float32)
    g1 = tl.zeros([DEPTH, OUTPUTS], tl.float32)
    g2 = tl.zeros([DEPTH, OUTPUTS], tl.float32)
    g3 = tl.zeros([DEPTH, OUTPUTS], tl.float32)
    for first in tl.range(0, count, ROWS, num_stages=STAGES):
        valid = (row < count - first)[:, None]
        place = start + first + row
        at = folded + _windows(place, height, width, line)[:, None] + depth[None, :]
        d = tl.load(d_y + place.to(tl.int64)[:, None] * OUTPUTS + k[None, :], valid, 0)
        g0 = tl.dot(tl.trans(tl.load(at, valid, 0)), d, g0, input_precision=PRECISION)
        g1 = tl.dot(tl.trans(tl.load(at + line, valid, 0)), d, g1, input_precision=PRECISION)
        g2 = tl.dot(tl.trans(tl.load(at + 2 * line, valid, 0)), d, g2, input_precision=PRECISION)
        g3 = tl.dot(tl.trans(tl.load(at + 3 * line, valid, 0)), d, g3, input_precision=PRECISION)
    slots += part.to(tl.int64) * 4 * DEPTH * OUTPUTS + depth[:, None] * OUTPUTS + k[None, :]
    tl.store(slots, g0)
    tl.store(slots + DEPTH * OUTPUTS, g1)
    tl.store(slots + 2 * DEPTH * OUTPUTS, g2)
    tl.store(slots + 3 * DEPTH * OUTPUTS, g3)
