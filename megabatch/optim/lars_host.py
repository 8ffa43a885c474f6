"""One step of LARS on a CPU by torch's fused SGD: one pass over each weight behind its norms.

SGD with dampening d is v = m v + (1 - d) (g + decay w), w -= lr v, which is `Update` where 1 - d is
the ratio, times the rate in the paper form. It rounds otherwise than the plain twin in
lars_step.py, since nothing between is written to memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.optim.lars_step import Settings, ratios_of, update
from megabatch.optim.layerwise import Adaptation
from megabatch.optim.layout import dense, laid_alike, laid_as, one_run

_LEAST = 1e-8
"""of a factor: 1 - (1 - factor) has lost half of its digits there"""


class _Lying(NamedTuple):
    """How some weights and their buffers lie, and both as torch's kernel wants them, contiguous:
    what is channels last it would copy there and back."""

    places: list[tuple[int, torch.Size]]
    strides: list[tuple[int, ...]]
    weights: list[Tensor]
    buffers: list[Tensor]


class FusedSGD:
    """`Update` of dense fp32 weights by numbers that the host knows, without Nesterov's step; a
    buffer that came in another layout, from a checkpoint, takes its weight's.

    From one step to the next it keeps how they lie: to look at each again takes longer than the
    update of a small net.
    """

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        """by the first weight, for as long as that is somebody's"""

    def __call__(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
        settings: Settings,
        good: Tensor | None,
        copies: list[tuple[int, Tensor]],
    ) -> Adaptation | None:
        plain = weights, gradients, buffers, settings, good, copies
        if good is not None or settings.nesterov:
            return update(*plain)
        if isinstance(settings.rate, Tensor) or isinstance(settings.correction, Tensor):
            return update(*plain)
        momentum = settings.momentum * settings.correction
        if buffers and momentum == 0:  # emptied by a step at rate 0, which SGD does not know
            return update(*plain)
        lying = self._lying(weights, buffers)
        if lying is None:
            return update(*plain)
        gradients = _laid_as(gradients, weights, lying.strides)
        inside, outside = (settings.rate, 1.0) if settings.form == "paper" else (1.0, settings.rate)
        seen, factors = None, [inside]
        parts: list[slice] = [slice(None)]
        if settings.trust is not None:
            seen = ratios_of(settings, weights, gradients)
            factors = (inside * seen.ratio).tolist()
            parts = [slice(i, i + 1) for i in range(len(weights))]
        if any(0 < factor < _LEAST for factor in factors):
            return update(*plain)
        runs = [one_run(gradient) for gradient in gradients]
        for part, factor in zip(parts, factors, strict=True):
            torch._fused_sgd_(
                lying.weights[part],
                runs[part],
                lying.buffers[part],
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

    def _lying(self, weights: list[Tensor], buffers: list[Tensor]) -> _Lying | None:
        """None for weights that the kernel does not take."""
        # What is kept keeps its memory: nothing else can come to lie at the same address.
        places = _places(weights, buffers)
        strides = [weight.stride() for weight in weights]
        kept: _Lying | None = self._kept.get(weights[0])
        if kept is not None and (kept.places, kept.strides) == (places, strides):
            return kept
        first = weights[0]
        if first.dtype != torch.float32 or not first.is_cpu or not all(map(dense, weights)):
            return None
        for buffer, weight in zip(buffers, weights, strict=False):
            if not laid_alike(buffer, weight):
                buffer.data = laid_as(buffer, weight)
        kept = self._kept[first] = _Lying(
            _places(weights, buffers),
            strides,
            [one_run(weight.detach()) for weight in weights],
            [one_run(buffer) for buffer in buffers],
        )
        return kept


def _places(weights: list[Tensor], buffers: list[Tensor]) -> list[tuple[int, torch.Size]]:
    """Where they lie and how far: what was cut off in place begins where it did."""
    return [(tensor.data_ptr(), tensor.shape) for tensor in (*weights, *buffers)]


def _laid_as(
    gradients: list[Tensor], weights: list[Tensor], strides: list[tuple[int, ...]]
) -> list[Tensor]:
    """Gradients in their weights' dtype and layout."""
    alike = [gradient.stride() for gradient in gradients] == strides
    if alike and all(gradient.dtype == torch.float32 for gradient in gradients):
        return gradients
    return [laid_as(g, w) for g, w in zip(gradients, weights, strict=True)]
