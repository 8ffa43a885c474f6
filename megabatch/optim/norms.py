"""Norms of many tensors at once, as accurate as in float64: what the ratios of layer-wise
optimisers are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megabatch.optim.layout import flat

Tensors = list[Tensor] | tuple[Tensor, ...]

_LONG = 1 << 16
"""elements: below it the copy in float64 lies in a core's cache"""
_ROW = 256
"""elements whose squares float32 adds up to seven digits and more"""
_SURE = (1e-10, 1e15)
"""norms in which no square that counts was below float32's least number or above its largest"""


def norms(*lists: Tensors) -> tuple[Tensor, ...]:
    """The 2-norms of each list's tensors, a vector on the device for each list, by one call."""
    # float64 for every dtype. Summed in float32 on a CPU, the norm of 19 million values is off by
    # 8e-4, and gradients below 1e-23 have norm 0; in float16 a norm above 65504 is infinite.
    every = [tensor for tensors in lists for tensor in tensors]
    by_rows = [_by_rows(tensor) if _long(tensor) else None for tensor in every]
    rest = [tensor for tensor, norm in zip(every, by_rows, strict=True) if norm is None]
    others = iter(torch._foreach_norm(rest, 2, dtype=torch.float64) if rest else ())
    found = [next(others) if norm is None else norm for norm in by_rows]
    return torch.split(torch.stack(found), [len(tensors) for tensors in lists])


def _long(tensor: Tensor) -> bool:
    """Whether torch would write the tensor out in float64 first, and read it again from memory."""
    if tensor.numel() < _LONG or not tensor.is_cpu or tensor.dtype != torch.float32:
        return False
    return type(tensor) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


def _by_rows(tensor: Tensor) -> Tensor | None:
    """The norm of the norms of rows; None where float32 might not do for the rows."""
    numbers = flat(tensor)
    in_rows = len(numbers) // _ROW * _ROW
    rows = torch.linalg.vector_norm(numbers[:in_rows].view(-1, _ROW), dim=1)
    both = torch.cat([rows, numbers[in_rows:]])
    norm: Tensor = torch.linalg.vector_norm(both, dtype=torch.float64)
    least, most = _SURE
    if least < norm < most or (norm == 0 and not numbers.any()):
        return norm
    return None
