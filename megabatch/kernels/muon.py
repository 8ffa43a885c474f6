"""Muon for all weights of a group: four launches around the products of its polynomial.

Momentum and norms in one pass; what points the way, packed as matrices of length 1, those with as
many rows in one batch; the products, by cuBLAS; then the step's norms, and weights, lengths and
half copies in one pass. Norms in float64, as partial sums in fixed slots. What it does is said by
`megabatch.optim.muon_step.MuonUpdate`, whose plain form there takes what this one does not.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.tables import (
    CHUNK,
    WARPS,
    addresses_of,
    aligned,
    at,
    chunks_of,
    half_of,
    lay_alike,
    sent,
    size_of,
    store_copy,
    table_of,
    takes,
)
from megabatch.optim.layerwise import Adaptation
from megabatch.optim.muon_step import MuonSettings, iterated
from megabatch.optim.muon_step import update as update_plain

_SIDE = 64
"""of a tile: whole lines of memory whichever way a matrix is turned"""
_UNIT = 64
"""elements that a batch begins at a multiple of"""
_EPS = torch.finfo(torch.float32).eps


class Matrices(NamedTuple):
    """Where matrices lie in their batches, and the tiles that they are cut into."""

    tile: Tensor
    """owner, first row and first column of each tile, in the weight's own matrix"""
    begins: Tensor
    """where each weight's tiles begin"""
    place: Tensor
    """rows and columns of each weight's matrix, where its batch has it, how far a row and a column
    of the weight's lie apart there"""
    batches: tuple[tuple[int, tuple[int, int, int]], ...]
    """where each begins, and its shape"""
    tiles: int
    length: int


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    lengths: list[Tensor],
    settings: MuonSettings,
    good: Tensor | None,
    copies: list[tuple[int, Tensor]],
) -> Adaptation | None:
    """`MuonUpdate` by kernels: of dense fp32 weights, if they adapt as matrices, a rate that the
    host knows, and copies in one half precision. A buffer that came in another layout, from a
    checkpoint, takes its weight's."""
    matrices = settings.trust is None or all(w.ndim > 1 and w.numel() for w in weights)
    if isinstance(settings.rate, Tensor) or not matrices or not takes(weights, copies):
        return update_plain(weights, gradients, buffers, lengths, settings, good, copies)
    gradients = lay_alike(weights, gradients, buffers)
    lengths = [length.to(w) for length, w in zip(lengths, weights, strict=False)]
    lists = [weights, gradients, buffers]
    table = addresses_of(copies, *lists, *([lengths] if lengths else []))
    if settings.trust is None:
        _descend(weights, table, settings, good, half_of(copies))
        return None
    return _turn(weights, table, settings, good, half_of(copies))


def _descend(
    weights: list[Tensor],
    addresses: tuple[int, ...],
    settings: MuonSettings,
    good: Tensor | None,
    half: int,
) -> None:
    """SGD's step."""
    device, sizes = weights[0].device, tuple(w.numel() for w in weights)
    chunks = chunks_of(sizes, device)
    _descended[(chunks.number,)](
        table_of(addresses, device), chunks.chunk, chunks.sizes, good, len(weights), chunks.number,
        float(settings.rate), float(settings.momentum), float(settings.weight_decay),
        settings.weight_decay != 0, settings.maximize, settings.nesterov, good is not None, half,
        aligned(sizes, addresses), CHUNK, num_warps=WARPS,
    )  # fmt: skip


def _turn(
    weights: list[Tensor],
    addresses: tuple[int, ...],
    settings: MuonSettings,
    good: Tensor | None,
    half: int,
) -> Adaptation:
    """Steps that are a share of their weights, which keep their lengths."""
    count, device = len(weights), weights[0].device
    sizes = tuple(w.numel() for w in weights)
    chunks, table = chunks_of(sizes, device), table_of(addresses, device)
    packed = _packed(tuple((len(w), w.numel() // len(w)) for w in weights), device)
    found = torch.empty((5, count), dtype=torch.float64, device=device)
    slots = torch.empty((2, max(chunks.number, packed.tiles)), dtype=torch.float64, device=device)
    momentum, gated = float(settings.momentum), good is not None
    _moved[(chunks.number,)](
        table, chunks.chunk, chunks.sizes, slots, good, count, chunks.number, momentum,
        settings.maximize, settings.nesterov, gated, aligned(sizes, addresses), CHUNK,
        num_warps=WARPS,
    )  # fmt: skip
    _summed[(count,)](slots, chunks.begins, found, chunks.number, count, num_warps=1)
    # Singular values need not be more alike than bf16 can tell.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrices = torch.zeros(packed.length, dtype=dtype, device=device)
    _pack[(packed.tiles,)](
        table, packed.tile, packed.place, found, matrices, count, packed.tiles, momentum,
        settings.maximize, settings.nesterov, _SIDE, num_warps=WARPS,
    )  # fmt: skip
    for begin, shape in packed.batches:
        batch = matrices[begin : begin + math.prod(shape)].view(shape)
        iterated(batch, out=batch)
    _multiplied[(packed.tiles,)](
        table, packed.tile, packed.place, matrices, slots, count, packed.tiles, _SIDE,
        num_warps=WARPS,
    )  # fmt: skip
    _ratios[(count,)](
        table, slots, packed.begins, found, good, packed.tiles, count, float(settings.rate),
        float(settings.trust or 0.0), _EPS, gated, num_warps=1,
    )  # fmt: skip
    _turned[(packed.tiles,)](
        table, packed.tile, packed.place, matrices, found, good, count, packed.tiles, gated, half,
        _SIDE, num_warps=WARPS,
    )  # fmt: skip
    return Adaptation(*found[:3])


@functools.lru_cache(maxsize=64)
def _packed(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Matrices:
    """Of weights that are matrices of these shapes, as they lie."""
    alike: dict[int, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        alike[min(shape)].append(index)
    places = [[0]] * len(shapes)
    batches = []
    length = 0
    for rows, members in alike.items():
        most = max(max(shapes[index]) for index in members)
        batches.append((length, (len(members), rows, most)))
        for number, index in enumerate(members):
            tall = shapes[index][0] > shapes[index][1]  # turned, so that all are wide
            apart = (1, most) if tall else (most, 1)
            places[index] = [*shapes[index], length + number * rows * most, *apart]
        length += -(-len(members) * rows * most // _UNIT) * _UNIT
    tiles = [
        (index, row, column)
        for index, (rows, columns) in enumerate(shapes)
        for row in range(0, rows, _SIDE)
        for column in range(0, columns, _SIDE)
    ]
    counts = [-(-rows // _SIDE) * -(-columns // _SIDE) for rows, columns in shapes]
    with torch.device("cpu"):  # whatever a caller has made the default
        begins = torch.tensor([0, *counts]).cumsum(0)
        tile, place = (torch.tensor(rows).mT.contiguous() for rows in (tiles, places))
    tile, begins, place = (sent(each, device) for each in (tile, begins, place))
    return Matrices(tile, begins, place, tuple(batches), len(tiles), length)


@triton.jit  # type: ignore[untyped-decorator]
def _moved(  # type: ignore[no-untyped-def]
    table, chunk, sizes, slots, good, count, chunks, momentum,
    NEGATED: tl.constexpr, NESTEROV: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Move a chunk's momentum; sums of squares of its weights and of where that points. In float64:
    in fp32 those of a momentum that decays would be 0 long before it is."""
    number = tl.program_id(0)
    owner = tl.load(chunk + number)
    offset = tl.multiple_of(tl.load(chunk + chunks + number), CHUNK)
    place = offset + tl.arange(0, CHUNK)
    valid = place < size_of(sizes, owner, ALIGNED)
    w = tl.load(at(table, owner, tl.float32, ALIGNED) + place, valid, 0).to(tl.float64)
    g = tl.load(at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0)
    if NEGATED:
        g = -g
    buffer = at(table, 2 * count + owner, tl.float32, ALIGNED) + place
    v = tl.load(buffer, valid, 0)
    moved = v * momentum + g
    if GATED:
        moved = tl.where(tl.load(good) != 0, moved, v)
    tl.store(buffer, moved, valid)
    u = (g + momentum * moved if NESTEROV else moved).to(tl.float64)
    tl.store(slots + number, tl.sum(w * w))
    tl.store(slots + chunks + number, tl.sum(u * u))


@triton.jit  # type: ignore[untyped-decorator]
def _total(slots, begin, end, BLOCK: tl.constexpr = 256):  # type: ignore[no-untyped-def]
    index = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        found += tl.load(slots + first + index, first + index < end, 0)
    return tl.sum(found)


@triton.jit  # type: ignore[untyped-decorator]
def _summed(slots, begins, found, chunks, count):  # type: ignore[no-untyped-def]
    """A weight's norm, and that of where its momentum points."""
    tensor = tl.program_id(0)
    begin, end = tl.load(begins + tensor), tl.load(begins + tensor + 1)
    tl.store(found + count + tensor, tl.sqrt(_total(slots, begin, end)))
    tl.store(found + 2 * count + tensor, tl.sqrt(_total(slots + chunks, begin, end)))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(tile, place, count, tiles, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's owner, where its elements lie in the weight and in the batch, and which of them
    there are."""
    number = tl.program_id(0)
    owner = tl.load(tile + number)
    row = tl.load(tile + tiles + number) + tl.arange(0, SIDE)[:, None]
    column = tl.load(tile + 2 * tiles + number) + tl.arange(0, SIDE)[None, :]
    rows, columns = tl.load(place + owner), tl.load(place + count + owner)
    begin = tl.load(place + 2 * count + owner)
    down, along = tl.load(place + 3 * count + owner), tl.load(place + 4 * count + owner)
    return (
        owner,
        row * columns + column,
        begin + row * down + column * along,
        (row < rows) & (column < columns),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    table, tile, place, found, matrices, count, tiles, momentum,
    NEGATED: tl.constexpr, NESTEROV: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Where a tile's momentum points, over its norm, to the batch."""
    owner, here, there, valid = _tile(tile, place, count, tiles, SIDE)
    u = tl.load(at(table, 2 * count + owner, tl.float32, False) + here, valid, 0)
    if NESTEROV:
        g = tl.load(at(table, count + owner, tl.float32, False) + here, valid, 0)
        u = momentum * u + (-g if NEGATED else g)
    norm = tl.load(found + 2 * count + owner)
    # In float64: of a norm below 1e-38 fp32 has no inverse.
    x = u.to(tl.float64) / tl.where(norm > 0, norm, 1.0)
    tl.store(matrices + there, x.to(matrices.dtype.element_ty), valid)


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(  # type: ignore[no-untyped-def]
    table, tile, place, matrices, slots, count, tiles, SIDE: tl.constexpr
):
    """A tile's sums of its step's squares, and of its products with the weight."""
    owner, here, there, valid = _tile(tile, place, count, tiles, SIDE)
    w = tl.load(at(table, owner, tl.float32, False) + here, valid, 0).to(tl.float64)
    o = tl.load(matrices + there, valid, 0).to(tl.float64)
    number = tl.program_id(0)
    tl.store(slots + number, tl.sum(o * o))
    tl.store(slots + tiles + number, tl.sum(w * o))


@triton.jit  # type: ignore[untyped-decorator]
def _ratios(  # type: ignore[no-untyped-def]
    table, slots, begins, found, good, tiles, count, rate, trust, eps, GATED: tl.constexpr
):
    """A weight's ratio and norms; and how far it goes, and what brings it back to its length: that
    of w - a o follows from the sums, and no weight is read again for it."""
    tensor = tl.program_id(0)
    begin, end = tl.load(begins + tensor), tl.load(begins + tensor + 1)
    squares, products = _total(slots, begin, end), _total(slots + tiles, begin, end)
    weight_norm, step_norm = tl.load(found + count + tensor), tl.sqrt(squares)
    length = tl.load(at(table, 3 * count + tensor, tl.float32, False)).to(tl.float64)
    known = (weight_norm > 0) & (step_norm > 0) & (length > 0)
    ratio = trust * tl.where(known, weight_norm / tl.where(known, step_norm, 1.0), 1.0)
    step = rate * ratio
    now = weight_norm * weight_norm - 2 * step * products + step * step * squares
    now = tl.sqrt(tl.where(now > 0, now, 0.0))
    kept = (length > 0) & (length < float("inf")) & (now > 0)
    back = length / tl.where(kept, now, 1.0)
    # What is as long as its dtype can tell stays as it is, however often it is asked for.
    back = tl.where(kept & (tl.abs(back - 1) > eps), back, 1.0)
    if GATED:
        passes = tl.load(good) != 0
        step = tl.where(passes, step, 0.0)
        back = tl.where(passes, back, 1.0)
    tl.store(found + tensor, ratio)
    tl.store(found + 2 * count + tensor, step_norm)
    tl.store(found + 3 * count + tensor, step)
    tl.store(found + 4 * count + tensor, back)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    table, tile, place, matrices, found, good, count, tiles,
    GATED: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tile of a weight after its step, as long as it was."""
    owner, here, there, valid = _tile(tile, place, count, tiles, SIDE)
    weight = at(table, owner, tl.float32, False) + here
    w = tl.load(weight, valid, 0)
    o = tl.load(matrices + there, valid, 0).to(tl.float32)
    step = tl.load(found + 3 * count + owner).to(tl.float32)
    new = (w - step * o) * tl.load(found + 4 * count + owner).to(tl.float32)
    if GATED:
        new = tl.where(tl.load(good) != 0, new, w)
    tl.store(weight, new, valid)
    store_copy(table, 4 * count + owner, here, new, valid, HALF, False)


@triton.jit  # type: ignore[untyped-decorator]
def _descended(  # type: ignore[no-untyped-def]
    table, chunk, sizes, good, count, chunks, rate, momentum, decay,
    DECAY: tl.constexpr, NEGATED: tl.constexpr, NESTEROV: tl.constexpr, GATED: tl.constexpr,
    HALF: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(chunk + number)
    offset = tl.multiple_of(tl.load(chunk + chunks + number), CHUNK)
    place = offset + tl.arange(0, CHUNK)
    valid = place < size_of(sizes, owner, ALIGNED)
    weight = at(table, owner, tl.float32, ALIGNED) + place
    buffer = at(table, 2 * count + owner, tl.float32, ALIGNED) + place
    w, v = tl.load(weight, valid, 0), tl.load(buffer, valid, 0)
    g = tl.load(at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0)
    if NEGATED:
        g = -g
    moved = v * momentum + g
    u = g + momentum * moved if NESTEROV else moved
    if DECAY:
        u += decay * w
    new = w - rate * u
    if GATED:
        passes = tl.load(good) != 0
        moved, new = tl.where(passes, moved, v), tl.where(passes, new, w)
    tl.store(buffer, moved, valid)
    tl.store(weight, new, valid)
    store_copy(table, 3 * count + owner, place, new, valid, HALF, ALIGNED)
