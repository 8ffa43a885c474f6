"""LAMB, Algorithm 2 of You et al. 2019 (1904.00962): Adam's step with a length for each weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.groups import Group
from megabatch.optim.layerwise import (
    Layerwise,
    adaptation,
    gated,
    rate_of,
    real,
    subtract,
    together,
    write_copies,
)
from megabatch.optim.norms import Tensors, norms


class LAMB(Layerwise):
    """Adam with decoupled decay whose step is scaled, weight by weight, by |w| / |step|.

    As in the MLPerf reference, both moments are bias-corrected and the ratio is not bounded. The
    reference clips the gradient's global norm to 1 first; that is left to the caller. A step that
    does not count, or of which only the device knows that it did not reach a weight, still counts
    in the bias correction, whose clock is the host's; with `capturable` it is the device's, and
    such a step does not count there either.
    """

    STATE = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The clock of a run whose `capturable` was another, or of torch's Adam.
        for group in self.param_groups:
            for weight in group["params"]:
                held = self.state.get(weight)
                if held:
                    held["step"] = _clock(group, weight, held["step"])

    def _check(self, group: Group) -> None:
        super()._check(group)
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}.")

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        good: Tensor | None,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        for part in together(group, weights):
            states = [self._state(group, weight) for weight in part]
            gate = None if good is None else good.to(part[0].device)
            values, means, squares = (
                real(tensors)
                for tensors in (
                    part,
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                )
            )
            gradients = real([p.grad for p in part])  # type: ignore[misc]
            corrections = _tick(group, states, gate)
            steps = _adam_steps(group, gradients, means, squares, corrections, gate)
            if group["weight_decay"] != 0:
                torch._foreach_add_(steps, values, alpha=group["weight_decay"])
            if group["adapt"]:
                weight_norms, step_norms = norms(values, steps)
                seen = adaptation(weight_norms / step_norms, weight_norms, step_norms)
                scales = seen.ratio if gate is None else seen.ratio * gate
                torch._foreach_mul_(steps, scales.unbind())
                self._note(part, seen)
            elif gate is not None:
                torch._foreach_mul_(steps, gate.to(values[0].dtype))
            subtract(part, steps, rate_of(group))
            write_copies(part, copies)

    def _state(self, group: Group, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = _clock(group, weight, 0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


def build(settings: Any, groups: list[Group]) -> LAMB:
    """As a config's section has it; eps 0 stands for LAMB's own."""
    return LAMB(groups, lr=0.0, betas=(settings.momentum, 0.999), eps=settings.eps or 1e-6)


def _clock(group: Group, weight: Tensor, steps: Any) -> int | Tensor:
    """How many steps a weight has taken: the host's count, or the device's for a captured graph."""
    if group["capturable"]:
        return torch.as_tensor(steps, dtype=torch.float32, device=weight.device)
    return int(steps)


def _tick(
    group: Group, states: list[dict[str, Any]], good: Tensor | None
) -> tuple[list[float] | Tensors, list[float] | Tensors]:
    """Count the step, and return the corrections of both moments for their start at 0."""
    beta1, beta2 = group["betas"]
    if not group["capturable"]:
        for state in states:
            state["step"] += 1
        taken = [state["step"] for state in states]
        return [1 - beta1**count for count in taken], [1 - beta2**count for count in taken]
    clocks = [state["step"] for state in states]
    if good is None:
        torch._foreach_add_(clocks, 1.0)
    else:
        torch._foreach_add_(clocks, [good.to(clocks[0].dtype)] * len(clocks))
    # float64, because 1 - 0.999 has four digits in float32. A clock that stands at 0 is gated.
    counts = torch.stack(clocks).double().clamp(min=1)
    return (1 - beta1**counts).unbind(), (1 - beta2**counts).unbind()


def _adam_steps(
    group: Group,
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    corrections: tuple[list[float] | Tensors, list[float] | Tensors],
    good: Tensor | None,
) -> Tensors:
    """Move both moments, and return Adam's step without the rate."""
    beta1, beta2 = group["betas"]
    direction = -1.0 if group["maximize"] else 1.0
    # Through a closed gate the gradients are 0: the moments stay if they do not decay either.
    torch._foreach_mul_(means, gated(beta1, good, means[0], closed=1.0))
    torch._foreach_add_(means, gradients, alpha=direction * (1 - beta1))
    torch._foreach_mul_(squares, gated(beta2, good, squares[0], closed=1.0))
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)

    steps: Tensors = torch._foreach_div(means, corrections[0])
    scales = torch._foreach_div(squares, corrections[1])
    torch._foreach_sqrt_(scales)
    torch._foreach_add_(scales, group["eps"])
    torch._foreach_div_(steps, scales)
    return steps
