"""A channels-last tensor as rows of channels, by spans, and how batch norm's launches cut it up."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES = 3
# A program that adds up slots takes few columns and many slots: else one would read a megabyte.
FEW = 8
SLOTS = 256


class Programs(NamedTuple):
    """What each program of a launch takes at a time, and how many there are."""

    rows: int
    columns: int
    warps: int
    number: int
    """about: more of them hide latency; each costs its start, and a slot that a later launch
    reads"""


class ByWidth(NamedTuple):
    """Those of one kernel, by the channels of a tensor."""

    narrow: Programs
    """up to 64"""
    wide: Programs


# The best of a sweep on an H200 over all widths of ResNet-50, with spans of 32, 256 and 1024.
MOMENTS = ByWidth(Programs(128, 64, 4, 264), Programs(128, 64, 4, 264))
APPLY = ByWidth(Programs(32, 64, 4, 1056), Programs(64, 128, 8, 1056))
APPLY_AND_SUM = ByWidth(Programs(32, 64, 4, 792), Programs(16, 128, 4, 792))
BACKWARD_SUMS = ByWidth(Programs(64, 64, 4, 264), Programs(64, 64, 4, 264))
BACKWARD_APPLY = ByWidth(Programs(32, 64, 8, 1056), Programs(16, 128, 8, 1056))
POOL_SUMS = ByWidth(Programs(32, 64, 4, 1056), Programs(32, 64, 4, 1056))
JOIN = ByWidth(Programs(128, 64, 4, 792), Programs(64, 128, 4, 792))


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


def rows_of(x: Tensor, span: int, by_width: ByWidth) -> tuple[Rows, Programs, tuple[int, int]]:
    """How a tensor n x c x h x w, dense and channels last, is cut, and the grid; n is a multiple of
    the span."""
    images, channels, height, width = x.shape
    if not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError("batch norm by spans needs a channels-last tensor")
    if images % span:
        raise ValueError(f"{images} images are not a multiple of the span, {span}")
    programs = by_width.narrow if channels <= 64 else by_width.wide
    spans, rows = images // span, span * height * width
    blocks = triton.cdiv(channels, programs.columns)
    wanted = max(1, programs.number // (spans * blocks))
    each = triton.cdiv(triton.cdiv(rows, wanted), programs.rows) * programs.rows
    cut = Rows(spans, rows, channels, triton.cdiv(rows, each), each)
    return cut, programs, (cut.spans * cut.parts, blocks)


@triton.jit  # type: ignore[untyped-decorator]
def part_here(  # type: ignore[no-untyped-def]
    rows, parts, each, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What a program of the grid of `rows_of` has: its slot and span; its columns, and which of
    them there are; its part's first element and how many rows; and, of a tile, the rows and all
    offsets."""
    slot = tl.program_id(0)
    span, part = slot // parts, slot % parts
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = (span.to(tl.int64) * rows + part * each) * channels
    count = tl.minimum(each, rows - part * each)
    row = tl.arange(0, ROWS)
    at = row[:, None] * channels + column[None, :]
    return slot, span, column, column < channels, begin, count, row, at
