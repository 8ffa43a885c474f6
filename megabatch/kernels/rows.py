"""A channels-last tensor as rows of channels, by spans, and how batch norm's launches cut it up."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The best of a sweep on an H200 over all widths of ResNet-50, with spans of 32 and of 1024.
COLUMNS = 64
ROWS = 64
WARPS = 8
STAGES = 3
# Programs of one launch. More of them hide latency; each costs a slot that a later launch reads.
_PROGRAMS = 1056
# A program that adds up slots takes few columns and many slots: else one would read a megabyte.
FEW = 8
SLOTS = 256


class Rows(NamedTuple):
    """A channels-last tensor as rows of channels, by spans, and how a launch cuts it up."""

    spans: int
    rows: int
    """of one span"""
    channels: int
    parts: int
    """of one span"""
    each: int
    """rows of a part; the last may have fewer"""

    @property
    def blocks(self) -> int:
        return int(triton.cdiv(self.channels, COLUMNS))

    @property
    def grid(self) -> tuple[int, int]:
        return self.spans * self.parts, self.blocks


def rows_of(x: Tensor, span: int) -> Rows:
    """How a tensor n x c x h x w, dense and channels last, is cut; n is a multiple of the span."""
    images, channels, height, width = x.shape
    if not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError("batch norm by spans needs a channels-last tensor")
    if images % span:
        raise ValueError(f"{images} images are not a multiple of the span, {span}")
    spans, rows = images // span, span * height * width
    wanted = max(1, _PROGRAMS // (spans * triton.cdiv(channels, COLUMNS)))
    each = triton.cdiv(triton.cdiv(rows, wanted), ROWS) * ROWS
    return Rows(spans, rows, channels, triton.cdiv(rows, each), each)


@triton.jit  # type: ignore[untyped-decorator]
def part_here(  # type: ignore[no-untyped-def]
    rows, parts, each, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What a program of `Rows.grid` has: its slot and span; its columns, and which of them there
    are; its part's first element and how many rows; and, of a tile, the rows and all offsets."""
    slot = tl.program_id(0)
    span, part = slot // parts, slot % parts
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = (span.to(tl.int64) * rows + part * each) * channels
    count = tl.minimum(each, rows - part * each)
    row = tl.arange(0, ROWS)
    at = row[:, None] * channels + column[None, :]
    return slot, span, column, column < channels, begin, count, row, at
