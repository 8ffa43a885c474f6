"""Cross-entropy with label smoothing, its gradient and the top-1 and top-5 counts, in one launch.

Each image has a program of its own, which holds all of its logits: they are read once, and nothing
but the gradient is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_CLASSES = 1 << 15
"""whose logits one program holds"""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        images, classes = logits.shape
        # fp32: a probability below 6e-8 would be 0 in fp16, before the loss is scaled.
        gradient = torch.empty_like(logits, dtype=torch.float32)
        ctx.dtype = logits.dtype
        found = torch.empty((3, images), dtype=torch.float32, device=logits.device)
        block = triton.next_power_of_2(classes)
        _cross_entropy[(images,)](
            logits, labels, gradient, found, images, classes, logits.stride(0), gradient.stride(0),
            smoothing, block, num_warps=min(16, max(4, block // 2048)),
        )  # fmt: skip
        ctx.save_for_backward(gradient)
        counts = found.sum(1)
        ctx.mark_non_differentiable(counts)
        return counts[0].clone(), counts

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, outside: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * outside).to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and a vector of three, without gradient: that sum, and how many labels
    are the best and among the five best."""
    loss, counts = _CrossEntropy.apply(logits, labels, smoothing)  # type: ignore[no-untyped-call]
    return loss, counts


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, labels, gradient, found, images, classes, pitch, gradient_pitch, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < classes
    label = tl.load(labels + image)
    row = tl.load(logits + image * pitch + column, inside, float("-inf")).to(tl.float32)
    own = tl.sum(tl.where(column == label, row, 0.0))
    top = tl.max(row)
    exponents = tl.where(inside, tl.exp(row - top), 0.0)
    total = tl.sum(exponents)
    log_sum = tl.log(total) + top
    mean = tl.sum(tl.where(inside, row, 0.0)) / classes
    loss = log_sum - (1 - smoothing) * own - smoothing * mean
    # Of equal logits the first counts as the better one.
    above = (row > own) | ((row == own) & (column < label))
    rank = tl.sum(tl.where(inside & above, 1, 0))
    target = tl.where(column == label, 1 - smoothing, 0.0) + smoothing / classes
    d = exponents / total - target
    tl.store(gradient + image * gradient_pitch + column, d.to(gradient.dtype.element_ty), inside)
    tl.store(found + image, loss)
    tl.store(found + images + image, (rank < 1).to(tl.float32))
    tl.store(found + 2 * images + image, (rank < 5).to(tl.float32))
