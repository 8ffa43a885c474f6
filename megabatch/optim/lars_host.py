"""One step of LARS on a CPU by torch's fused SGD: one pass over each weight behind its norms.

SGD with dampening d is v = m v + (1 - d) (g + decay w), w -= lr v, which is `Update` where 1 - d is
the ratio, times the rate in the paper form. It rounds otherwise than the plain twin in
lars_step.py, since nothing between is written to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.optim.lars_step import Settings, ratios_of
from megabatch.optim.lars_step import update as update_plain
from megabatch.optim.layerwise import Adaptation
from megabatch.optim.layout import dense, flat, laid_alike, laid_as

_LEAST = 1e-8
"""of a factor: 1 - (1 - factor) has lost half of its digits there"""


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    settings: Settings,
    good: Tensor | None,
    copies: list[tuple[int, Tensor]],
) -> Adaptation | None:
    """`Update` of dense fp32 weights by numbers that the host knows, without Nesterov's step; a
    buffer that came in another layout, from a checkpoint, takes its weight's."""
    plain = weights, gradients, buffers, settings, good, copies
    if good is not None or settings.nesterov or not all(map(_takes, weights)):
        return update_plain(*plain)
    if isinstance(settings.rate, Tensor) or isinstance(settings.correction, Tensor):
        return update_plain(*plain)
    momentum = settings.momentum * settings.correction
    if buffers and momentum == 0:  # emptied by a step at rate 0, which SGD does not know
        return update_plain(*plain)
    gradients = [laid_as(g, w) for g, w in zip(gradients, weights, strict=True)]
    for buffer, weight in zip(buffers, weights, strict=False):
        if not laid_alike(buffer, weight):
            buffer.data = laid_as(buffer, weight)
    inside, outside = (settings.rate, 1.0) if settings.form == "paper" else (1.0, settings.rate)
    seen, factors = None, [inside]
    parts: list[slice] = [slice(None)]
    if settings.trust is not None:
        seen = ratios_of(settings, weights, gradients)
        factors = (inside * seen.ratio).tolist()
        parts = [slice(i, i + 1) for i in range(len(weights))]
    if any(0 < factor < _LEAST for factor in factors):
        return update_plain(*plain)
    # As runs of numbers: of channels-last tensors torch's kernel makes copies, there and back.
    runs = [list(map(flat, tensors)) for tensors in (weights, gradients, buffers)]
    for part, factor in zip(parts, factors, strict=True):
        torch._fused_sgd_(
            *(tensors[part] for tensors in runs),
            weight_decay=settings.weight_decay,
            momentum=momentum,
            lr=outside if buffers else outside * factor,
            dampening=1 - factor if buffers else 0.0,
            nesterov=False,
            maximize=settings.maximize,
            is_first_step=False,
        )
    if copies:
        torch._foreach_copy_([copy for _, copy in copies], [weights[i] for i, _ in copies])
    return seen


def _takes(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu and dense(weight)
