"""LARS (You et al. 2017, Algorithm 1) for all weights of a group in three launches.

Norms in float64, as partial sums in fixed slots; ratios; then decay, momentum, update and the half
copy of each weight in one pass. What it does is said by `megabatch.optim.lars_step.Update`, whose
plain form there takes what this one does not.
"""

from __future__ import annotations

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
    size_of,
    store_copy,
    table_of,
    takes,
)
from megabatch.optim.lars_step import Settings
from megabatch.optim.lars_step import update as update_plain
from megabatch.optim.layerwise import Adaptation

_POLICIES = ("lars", "clip", "scale")


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
    numbers = not isinstance(settings.rate, Tensor) and not isinstance(settings.correction, Tensor)
    if not numbers or not takes(weights, copies):
        return update_plain(weights, gradients, buffers, settings, good, copies)
    gradients = lay_alike(weights, gradients, buffers)
    if settings.maximize:
        gradients = list(torch._foreach_neg(gradients))
    addresses = addresses_of(copies, weights, gradients, buffers or weights)
    count, device = len(weights), weights[0].device
    sizes = tuple(w.numel() for w in weights)
    chunks = chunks_of(sizes, device)
    table = table_of(addresses, device)
    fours = aligned(sizes, addresses)
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
            table, chunks.chunk, chunks.sizes, slots, count, chunks.number, fours, CHUNK,
            num_warps=WARPS,
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
        settings.nesterov, good is not None, half_of(copies), fours, CHUNK,
        num_warps=WARPS,
    )  # fmt: skip
    return None if found is None else Adaptation(*found)


@triton.jit  # type: ignore[untyped-decorator]
def _norms(  # type: ignore[no-untyped-def]
    table, chunk, sizes, slots, count, chunks, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    """A chunk's sums of squares. In float64: in fp32 a gradient below 1e-23 would have norm 0."""
    number = tl.program_id(0)
    owner = tl.load(chunk + number)
    offset = tl.multiple_of(tl.load(chunk + chunks + number), CHUNK)
    place = offset + tl.arange(0, CHUNK)
    valid = place < size_of(sizes, owner, ALIGNED)
    w = tl.load(at(table, owner, tl.float32, ALIGNED) + place, valid, 0).to(tl.float64)
    g = tl.load(at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0).to(tl.float64)
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
    valid = place < size_of(sizes, owner, ALIGNED)
    weight = at(table, owner, tl.float32, ALIGNED) + place
    w = tl.load(weight, valid, 0)
    u = tl.load(at(table, count + owner, tl.float32, ALIGNED) + place, valid, 0)
    if GATED:
        passes = tl.load(good) != 0
    if DECAY:
        u += decay * w
    if ADAPT:
        u *= (tl.load(found + owner) * inside).to(tl.float32)
    elif INSIDE:
        u *= inside
    if MOMENTUM:
        buffer = at(table, 2 * count + owner, tl.float32, ALIGNED) + place
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
    store_copy(table, 3 * count + owner, place, new, valid, HALF, ALIGNED)
