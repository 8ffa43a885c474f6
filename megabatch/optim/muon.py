"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal, with a length for each
weight.

A batch of a large share of the images leaves few steps, and each of them must do more: a step whose
singular values are all alike moves along every direction that the gradients have shown, not along
the few that are largest. The length is LARS's: a share of the weight's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.groups import Group
from megabatch.optim.layerwise import (
    Adaptation,
    Layerwise,
    gated,
    rate_of,
    real,
    subtract,
    together,
)
from megabatch.optim.norms import norms

# Of an odd polynomial that, applied five times, brings singular values from 0.003 to 1 into about
# 0.7 to 1.2: steep at 0, it does not settle at 1 (kellerjordan.github.io/posts/muon).
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_TIMES = 5


class Muon(Layerwise):
    """u = momentum u + g; w -= lr trust |w| / |O(u)| O(u), where O makes a matrix orthogonal.

    A weight of more dimensions is a matrix of its first by the rest; one of fewer than two keeps
    its direction. Weights of a group that does not `adapt` take SGD's step, lr u. Decay is apart
    from the gradient: w -= lr trust weight_decay w, and without trust where weights do not adapt.

    nesterov: O of g + momentum u.
    """

    STATE = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "nesterov": nesterov,
            "eps": 0.0,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not group["trust"] > 0:
            raise ValueError(f"trust must be positive, got {group['trust']}.")

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        good: Tensor | None,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        for part in together(group, weights):
            gate = None if good is None else good.to(part[0].device)
            values, steps = real(part), self._directions(group, part, gate)
            decay = group["weight_decay"]
            if group["adapt"]:
                seen = _lengths(group["trust"], values, steps)
                torch._foreach_mul_(steps, seen.ratio.unbind())
                self._note(part, seen)
                decay *= group["trust"]
            if decay != 0:
                torch._foreach_add_(steps, values, alpha=decay)
            if gate is not None:
                torch._foreach_mul_(steps, gate.to(values[0].dtype))
            subtract(part, steps, rate_of(group), copies)

    def _directions(self, group: Group, weights: list[Tensor], good: Tensor | None) -> list[Tensor]:
        """Move the momentum, and return where it points: orthogonal, where weights adapt."""
        momentum, direction = group["momentum"], -1.0 if group["maximize"] else 1.0
        gradients = real([p.grad for p in weights])  # type: ignore[misc]
        buffers = real([self._buffer(weight) for weight in weights])
        # Through a closed gate the gradients are 0: the buffers stay if they do not decay either.
        torch._foreach_mul_(buffers, gated(momentum, good, buffers[0], closed=1.0))
        torch._foreach_add_(buffers, gradients, alpha=direction)
        if group["nesterov"]:
            moved = list(torch._foreach_mul(buffers, momentum))
            torch._foreach_add_(moved, gradients, alpha=direction)
        else:
            moved = [buffer.clone() for buffer in buffers]
        return orthogonal(moved) if group["adapt"] else moved

    def _buffer(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def build(settings: Any, groups: list[Group]) -> Muon:
    """As a config's section has it."""
    return Muon(
        groups,
        lr=0.0,
        momentum=settings.momentum,
        trust=settings.trust,
        nesterov=settings.nesterov,
    )


def orthogonal(tensors: list[Tensor]) -> list[Tensor]:
    """Each as the nearest matrix with about equal singular values; vectors as they are."""
    found = list(tensors)
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.ndim >= 2 and tensor.numel():
            alike[tensor.shape, tensor.dtype].append(index)
    for members in alike.values():  # in one product each: a net has many layers of one shape
        matrices = torch.stack([tensors[index].flatten(1) for index in members])
        for index, matrix in zip(members, _iterated(matrices), strict=True):
            found[index] = torch.empty_like(tensors[index]).copy_(matrix.view_as(tensors[index]))
    return found


def _iterated(matrices: Tensor) -> Tensor:
    """The polynomial of each matrix's singular values, without taking it apart."""
    a, b, c = _POLYNOMIAL
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    if matrices.is_cuda and matrices.dtype == torch.float32:
        x = x.bfloat16()  # singular values need not be more alike than it can tell
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    for _ in range(_TIMES):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    found: Tensor = x.mT if tall else x
    return found


def _lengths(trust: float, weights: list[Tensor], steps: list[Tensor]) -> Adaptation:
    """What makes each step a share of its weight; one of a weight of zeros stays as long as it is,
    times the share."""
    weight_norms, step_norms = norms(weights, steps)
    known = torch.minimum(weight_norms, step_norms) > 0
    ratios = trust * torch.where(known, weight_norms / step_norms, 1.0)
    return Adaptation(ratios, weight_norms, step_norms)
