"""How a tensor lies in memory: what takes weights, gradients and buffers as plain runs of numbers
must have all of them in one order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def dense(tensor: Tensor) -> bool:
    """Whether it is one run of numbers, row after row or channels last."""
    last = torch.channels_last
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=last)
    )


def overlaps(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether elements share memory, as an expanded tensor's do: nobody can write them one by
    one."""
    return any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))


def flat(tensor: Tensor) -> Tensor:
    """All of its numbers in the order in which they lie: a view of a dense tensor."""
    if tensor.dim() == 1:
        return tensor
    return _as_one_run(tensor) if dense(tensor) else tensor.reshape(-1)


def one_run(tensor: Tensor) -> Tensor:
    """The numbers of a dense tensor, contiguous: itself, or a flat view."""
    return tensor if tensor.is_contiguous() else _as_one_run(tensor)


def _as_one_run(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and one order in memory; where a dimension has one
    element any stride will do."""
    if one.shape != other.shape:
        return False
    if one.stride() == other.stride():
        return True
    both = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in both if size > 1)


def laid_as(tensor: Tensor, weight: Tensor) -> Tensor:
    """A tensor in its weight's dtype and layout: itself, where it is so."""
    if tensor.dtype == weight.dtype and laid_alike(tensor, weight):
        return tensor
    return torch.empty_like(weight).copy_(tensor)
