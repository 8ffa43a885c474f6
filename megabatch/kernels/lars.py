"""LARS (You et al. 2017, Algorithm 1) for all weights of a group in three launches.

Norms in float64, as partial sums in fixed slots; ratios; then decay, momentum, update and the half
copy of each weight in one pass. What it does is said by `megabatch.optim.lars_step.Update`, whose
plain form there takes what this one does not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.optim.lars_step import Settings
from megabatch.optim.lars_step import update as update_plain
from megabatch.optim.layerwise import Adaptation
from megabatch.optim.layout import dense, laid_alike, laid_as

_CHUNK = 4096
_WARPS = 8
_POLICIES = ("lars", "clip", "scale")
_HALF = {torch.bfloat16: 1, torch.float16: 2}


class Chunks(NamedTuple):
    """Weights cut into chunks, each one program's work; on the device."""

    chunk: Tensor
    """owner and offset of each chunk"""
    begins: Tensor
    """where each weight's chunks begin"""
    sizes: Tensor
    """of each weight"""

    number: int


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    settings: Settings,
    good: Tensor | None,
    copies: list[tuple[int, Tensor]],
) -> Adaptation | None:
    """`Update` by kernels: of dense fp32 weights, numbers that the host knows, and copies in one
    half precision. A buffer that came in another layout, from a checkpoint, takes its weight's."""
    if not _takes(weights, settings, copies):
        return update_plain(weights, gradients, buffers, settings, good, copies)
    gradients = [laid_as(g, w) for g, w in zip(gradients, weights, strict=True)]
    if settings.maximize:
        gradients = list(torch._foreach_neg(gradients))
    for buffer, weight in zip(buffers, weights, strict=False):
        if not laid_alike(buffer, weight):
            buffer.data = laid_as(buffer, weight)
    lists = (weights, gradients, buffers or weights)
    halves = {i: copy.data_ptr() for i, copy in copies}
    addresses = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    addresses += [halves.get(i, 0) for i in range(len(weights))]
    half = copies[0][1].dtype if copies else None
    return _step(weights, tuple(addresses), settings, good, half)


def _step(
    weights: list[Tensor],
    addresses: tuple[int, ...],
    settings: Settings,
    good: Tensor | None,
    half: torch.dtype | None,
) -> Adaptation | None:
    count, device = len(weights), weights[0].device
    sizes = tuple(w.numel() for w in weights)
    chunks = _chunks(sizes, device)
    table = _table(addresses, device)
    aligned = all(s % 4 == 0 for s in sizes) and all(a % 16 == 0 for a in addresses)
    rate, decay, correction = map(
        float, (settings.rate, settings.weight_decay, settings.correction)
    )
    paper = settings.form == "paper"
    inside, outside = (rate, 1.0) if paper else (1.0, rate)
    found = None
    if settings.trust is not None:
        found = torch.empty((3, count), dtype=torch.float64, device=device)
        slots = torch.empty((2, chunks.number), dtype=torch.float64, device=device)
        _norms[(chunks.number,)](
            table, chunks.chunk, chunks.sizes, slots, count, chunks.number, aligned, _CHUNK,
            num_warps=_WARPS,
        )  # fmt: skip
        _ratios[(count,)](
            slots, chunks.begins, found, chunks.number, count,
            float(settings.trust), decay, float(settings.eps), rate,
            _POLICIES.index(settings.policy), num_warps=1,
        )  # fmt: skip
    _update[(chunks.number,)](
        table, chunks.chunk, chunks.sizes, found, good, count, chunks.number,
        inside, outside, float(settings.momentum), decay, correction,
        decay != 0, found is not None, paper, settings.momentum != 0, correction != 1,
        settings.nesterov, good is not None, 0 if half is None else _HALF[half], aligned, _CHUNK,
        num_warps=_WARPS,
    )  # fmt: skip
    return None if found is None else Adaptation(*found)


def _takes(weights: list[Tensor], settings: Settings, copies: list[tuple[int, Tensor]]) -> bool:
    numbers = not isinstance(settings.rate, Tensor) and not isinstance(settings.correction, Tensor)
    dtypes = {copy.dtype for _, copy in copies}
    return (
        numbers
        and len(dtypes) <= 1
        and dtypes <= _HALF.keys()
        and all(w.dtype == torch.float32 and dense(w) for w in weights)
        and all(laid_alike(copy, weights[i]) for i, copy in copies)
    )


@functools.lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Chunks:
    counts = [triton.cdiv(size, _CHUNK) for size in sizes]
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    begins = torch.tensor([0, *counts]).cumsum(0)
    offset = (torch.arange(len(owner)) - begins[owner]) * _CHUNK
    tables = (torch.stack([owner, offset]), begins, torch.tensor(sizes))
    chunk, starts, lengths = (_sent(table, device) for table in tables)
    return Chunks(chunk, starts, lengths, len(owner))


# A step's tensors lie where the step before's lay, or where an earlier one's did.
@functools.lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return _sent(torch.tensor(addresses), device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        table = table.pin_memory()  # a copy from any other memory would wait for the device
    return table.to(device, non_blocking=True)


@triton.jit  # type: ignore[untyped-decorator]
def _at(table, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tensor's address from the table, as a pointer."""
    pointer = tl.load(table + index).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit  # type: ignore[untyped-decorator]
def _size(sizes, index, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.load(sizes + index)
    if ALIGNED:  # else each element would be loaded by itself
        size = tl.multiple_of(size, 4)
    return size


@triton.jit  # type: ignore[untyped-decorator]
def _norms(  # type: ignore[no-untyped-def]
    table, chunk, sizes, slots, count, chunks, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    """A chunk's sums of squares. In float64: in fp32 a gradient below 1e-23 would have norm 0."""
    number = tl.program_id(0)
    owner = tl.load(chunk + number)
    offset = tl.multiple_of(tl.load(chunk + chunks + number), CHUNK)
    place = offset + tl.arange(0, CHUNK)
    valid = place < _size(sizes, owner, ALIGNED)
    w = tl.load(_at(table, owner, tl.float32, ALIGNED) + place, valid, 0).to(tl.float64)
    g = tl.load(_at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0).to(tl.float64)
    tl.store(slots + number, tl.sum(w * w))
    tl.store(slots + chunks + number, tl.sum(g * g))


@triton.jit  # type: ignore[untyped-decorator]
def _ratios(  # type: ignore[no-untyped-def]
    slots, begins, found, chunks, count, trust, decay, eps, rate,
    POLICY: tl.constexpr, BLOCK: tl.constexpr = 256,
):  # fmt: skip
    """A tensor's norms and ratio: 1 where either norm is 0."""
    tensor = tl.program_id(0)
    begin = tl.load(begins + tensor)
    end = tl.load(begins + tensor + 1)
    index = tl.arange(0, BLOCK)
    weight = tl.zeros([BLOCK], tl.float64)
    gradient = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        valid = first + index < end
        weight += tl.load(slots + first + index, valid, 0)
        gradient += tl.load(slots + chunks + first + index, valid, 0)
    weight_norm = tl.sqrt(tl.sum(weight))
    gradient_norm = tl.sqrt(tl.sum(gradient))
    below = gradient_norm + eps
    if POLICY == 0:
        below += decay * weight_norm
    both = (weight_norm > 0) & (gradient_norm > 0)
    ratio = trust * weight_norm / tl.where(both, below, 1.0)
    if POLICY == 1:
        # The ratio is itself the rate there; divided by the rate it fits the same update.
        ratio = tl.where(ratio < rate, ratio / rate, 1.0)
    ratio = tl.where(both, ratio, 1.0)
    tl.store(found + tensor, ratio)
    tl.store(found + count + tensor, weight_norm)
    tl.store(found + 2 * count + tensor, gradient_norm)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    table, chunk, sizes, found, good, count, chunks, inside, outside, momentum, decay, correction,
    DECAY: tl.constexpr, ADAPT: tl.constexpr, INSIDE: tl.constexpr, MOMENTUM: tl.constexpr,
    CORRECT: tl.constexpr, NESTEROV: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(chunk + number)
    offset = tl.multiple_of(tl.load(chunk + chunks + number), CHUNK)
    place = offset + tl.arange(0, CHUNK)
    valid = place < _size(sizes, owner, ALIGNED)
    weight = _at(table, owner, tl.float32, ALIGNED) + place
    w = tl.load(weight, valid, 0)
    u = tl.load(_at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0)
    if GATED:
        passes = tl.load(good) != 0
    if DECAY:
        u += decay * w
    if ADAPT:
        u *= (tl.load(found + owner) * inside).to(tl.float32)
    elif INSIDE:
        u *= inside
    if MOMENTUM:
        buffer = _at(table, 2 * count + owner, tl.float32, ALIGNED) + place
        v = tl.load(buffer, valid, 0)
        if CORRECT:
            v *= correction
        moved = v * momentum + u
        if GATED:
            moved = tl.where(passes, moved, v)
        tl.store(buffer, moved, valid)
        u = u + momentum * moved if NESTEROV else moved
    new = w - outside * u
    if GATED:
        new = tl.where(passes, new, w)
    tl.store(weight, new, valid)
    if HALF > 0:  # address 0: this weight has no copy
        valid = valid & (tl.load(table + 3 * count + owner) != 0)
    if HALF == 1:
        copy = _at(table, 3 * count + owner, tl.bfloat16, ALIGNED) + place
        tl.store(copy, new.to(tl.bfloat16), valid)
    if HALF == 2:
        copy = _at(table, 3 * count + owner, tl.float16, ALIGNED) + place
        tl.store(copy, new.to(tl.float16), valid)
