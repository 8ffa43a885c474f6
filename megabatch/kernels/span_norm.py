"""Batch norm by spans for autograd, with ReLU and a residual: what any module's layer may call.

The plain twin is `megabatch.batchnorm.normalise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabatch.kernels.batchnorm import Affine, affine, apply
from megabatch.kernels.batchnorm_backward import backward, join


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        span: int,
        eps: float,
        relu: bool,
        statistics: Tensor,
    ) -> Tensor:
        found = affine(x, weight, bias, span, eps, statistics)
        out, _ = apply(x, found, span, relu, residual)
        ctx.span, ctx.relu, ctx.residual = span, relu, residual is not None
        # With a residual the mask needs the sum, so the result is kept in its stead.
        ctx.save_for_backward(x, *found, *([out] if ctx.residual and relu else []))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *kept = ctx.saved_tensors
        found, relu = Affine(*kept[:4]), ctx.relu
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if ctx.residual and relu:
            gradient, _ = join(gradient, None, kept[4], ctx.span)
            relu = False
        d_x, d_weight, d_bias = backward(gradient, x, found, ctx.span, relu)
        d_residual = gradient if ctx.residual else None
        return d_x, d_weight, d_bias, d_residual, None, None, None, None


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    span: int,
    eps: float = 1e-5,
    relu: bool = True,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """relu(batch norm of x by spans + residual), and each span's means and unbiased variances
    (spans x 2 channels, fp32)."""
    shape = (len(x) // span, 2 * x.shape[1])
    statistics = torch.empty(shape, dtype=torch.float32, device=x.device)
    out = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, residual, span, eps, relu, statistics
    )
    return out, statistics
