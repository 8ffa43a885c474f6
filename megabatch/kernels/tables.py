"""Many tensors in one launch: tables of their addresses and sizes on the device, cut into chunks of
which each is one program's work."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.optim.layout import dense, laid_alike, laid_as

CHUNK = 4096
WARPS = 8
HALF = {torch.bfloat16: 1, torch.float16: 2}
"""what a kernel calls the dtype of copies; 0 where there are none"""


class Chunks(NamedTuple):
    """Tensors cut into chunks; on the device."""

    chunk: Tensor
    """owner and offset of each chunk"""
    begins: Tensor
    """where each tensor's chunks begin"""
    sizes: Tensor
    """of each tensor"""

    number: int


def takes(weights: list[Tensor], copies: list[tuple[int, Tensor]]) -> bool:
    """Whether these are dense fp32 weights, their copies in one half precision and laid alike; not
    for a CUDA graph, which would hold no table that is kept here or made on the host."""
    dtypes = {copy.dtype for _, copy in copies}
    return (
        not _captured(weights[0].device)
        and len(dtypes) <= 1
        and dtypes <= HALF.keys()
        and all(w.dtype == torch.float32 and dense(w) for w in weights)
        and all(laid_alike(copy, weights[i]) for i, copy in copies)
    )


def _captured(device: torch.device) -> bool:
    """Whether launches are kept for a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lay_alike(
    weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor]
) -> list[Tensor]:
    """The gradients as their weights lie; a buffer that came in another layout, from a checkpoint,
    takes its weight's, and so does one of a net that was cast or moved after its first step: of a
    table's addresses nobody asks what lies there."""
    for buffer, weight in zip(buffers, weights, strict=False):
        there = buffer.dtype == weight.dtype and buffer.device == weight.device
        if not there or not laid_alike(buffer, weight):
            buffer.data = torch.empty_like(weight).copy_(buffer)
    # What torch negates when it is read is not negated in memory.
    return [laid_as(g, w).resolve_neg() for g, w in zip(gradients, weights, strict=True)]


def addresses_of(copies: list[tuple[int, Tensor]], *lists: list[Tensor]) -> tuple[int, ...]:
    """Of the tensors in lists of one length, and then of the copies, 0 where there is none."""
    halves = {i: copy.data_ptr() for i, copy in copies}
    every = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    return tuple(every + [halves.get(i, 0) for i in range(len(lists[0]))])


def half_of(copies: list[tuple[int, Tensor]]) -> int:
    """What a kernel calls their dtype."""
    return HALF[copies[0][1].dtype] if copies else 0


@functools.lru_cache(maxsize=64)
def chunks_of(sizes: tuple[int, ...], device: torch.device) -> Chunks:
    """Of tensors with so many elements."""
    counts = [triton.cdiv(size, CHUNK) for size in sizes]
    with torch.device("cpu"):  # whatever a caller has made the default
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        begins = torch.tensor([0, *counts]).cumsum(0)
        offset = (torch.arange(len(owner)) - begins[owner]) * CHUNK
        tables = (torch.stack([owner, offset]), begins, torch.tensor(sizes))
    chunk, starts, lengths = (sent(table, device) for table in tables)
    return Chunks(chunk, starts, lengths, len(owner))


# A step's tensors lie where the step before's lay, or where an earlier one's did.
@functools.lru_cache(maxsize=256)
def table_of(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on the device."""
    return sent(torch.tensor(addresses, device="cpu"), device)


def sent(table: Tensor, device: torch.device) -> Tensor:
    """A table, made on the CPU, on the device, for which the host does not wait."""
    if device.type == "cuda":
        table = table.pin_memory()  # a copy from any other memory would wait for the device
    return table.to(device, non_blocking=True)


def aligned(sizes: tuple[int, ...], addresses: tuple[int, ...]) -> bool:
    """Whether four elements can be read at once wherever a tensor or a chunk begins."""
    return all(s % 4 == 0 for s in sizes) and all(a % 16 == 0 for a in addresses)


@triton.jit  # type: ignore[untyped-decorator]
def at(table, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tensor's address from the table, as a pointer."""
    pointer = tl.load(table + index).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit  # type: ignore[untyped-decorator]
def size_of(sizes, index, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.load(sizes + index)
    if ALIGNED:  # else each element would be loaded by itself
        size = tl.multiple_of(size, 4)
    return size


@triton.jit  # type: ignore[untyped-decorator]
def store_copy(  # type: ignore[no-untyped-def]
    table, index, place, values, valid, HALF: tl.constexpr, ALIGNED: tl.constexpr
):
    """Values in half precision to the tensor at an index; address 0: there is none."""
    if HALF > 0:
        valid = valid & (tl.load(table + index) != 0)
    if HALF == 1:
        copy = at(table, index, tl.bfloat16, ALIGNED) + place
        tl.store(copy, values.to(tl.bfloat16), valid)
    if HALF == 2:
        copy = at(table, index, tl.float16, ALIGNED) + place
        tl.store(copy, values.to(tl.float16), valid)
