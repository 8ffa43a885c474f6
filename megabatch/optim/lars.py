"""LARS, Algorithm 1 of You et al. 2017 (1708.03888), and LARC, its authors' later rule.

Goyal et al. 2017 (1706.02677) correct the momentum. The arithmetic of a step is in lars_step.py, or
in kernels/lars.py and lars_host.py where those run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.optim import lars_host
from megabatch.optim.groups import Group
from megabatch.optim.lars_step import Settings, update
from megabatch.optim.layerwise import Layerwise, Number, chosen, rate_of, real, together

FORMS = ("paper", "pytorch")
POLICIES = ("lars", "clip", "scale")


# LARC is LARS with another ratio and nothing else, so it is a policy of this class: the forms,
# momentum and groups are written, and tested, once. LAMB has another update and other state, so
# it is a class of its own.
class LARS(Layerwise):
    """SGD with a rate for each weight: lr times trust * |w| / (|g| + weight_decay * |w| + eps).

    form: "paper" keeps the rate in the momentum buffer, v = m v + lr ratio (g + decay w), w -= v;
        "pytorch" outside, u = m u + ratio (g + decay w), w -= lr u. They part when lr moves.
    momentum_correction: in the paper form, scale the old buffer by lr_t / lr_(t-1), which makes it
        lr_t u. A step at lr 0 empties the buffer: its gradient is forgotten, where u keeps it.
    trust: None or 0 turns adaptation off; the pytorch form is then torch.optim.SGD.
    policy: "lars"; or LARC's, which leave decay out of the ratio: "scale" is lr * ratio, "clip" is
        min(lr, ratio).
    fused: True asks for a kernel (Triton's, on a CPU torch's fused SGD, which rounds otherwise than
        SGD), False for foreach, None takes Triton's where it can.
    Groups may set `adapt` (False: ratio 1) and `share` (their rate as a share of lr). Gradients
    must be unscaled, as GradScaler leaves them: a loss scale would enter the ratio.
    """

    GROUP = {**Layerwise.GROUP, "previous_rate": 0.0}  # noqa: RUF012
    STATE = ("momentum_buffer",)
    KERNEL = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        form: str = "paper",
        momentum_correction: bool = False,
        policy: str = "lars",
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
            "eps": eps,
            "nesterov": nesterov,
            "form": form,
            "momentum_correction": momentum_correction,
            "policy": policy,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        self._on_host = lars_host.FusedSGD()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._on_host = lars_host.FusedSGD()

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["trust"] is not None and not group["trust"] >= 0:
            raise ValueError(f"trust must be None or not negative, got {group['trust']}.")
        if group["form"] not in FORMS:
            raise ValueError(f"form must be one of {FORMS}, got {group['form']!r}.")
        if group["policy"] not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {group['policy']!r}.")
        if group["momentum_correction"] and group["form"] != "paper":
            raise ValueError("momentum_correction is for the paper form alone.")

    def _check_written(self, group: Group, written: set[str]) -> None:
        # Taken for lr ratio u, SGD's u is a step thousands of times too long.
        if "dampening" in written and group["form"] == "paper":
            raise ValueError(
                "this is the state of SGD, whose momentum has no rate in it as the paper form has: "
                'make LARS with form="pytorch", which goes on from it.'
            )
        super()._check_written(group, written)

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        good: Tensor | None,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        rate = rate_of(group)
        settings = Settings(
            rate=rate,
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            trust=(group["trust"] or None) if group["adapt"] else None,
            eps=group["eps"],
            nesterov=group["nesterov"],
            form=group["form"],
            policy=group["policy"],
            maximize=group["maximize"],
            correction=self._correction(group, rate) if group["momentum_correction"] else 1.0,
        )
        for part in together(group, weights):
            on_host = self._on_host if group["fused"] or self.rounds_freely else None
            step = chosen("lars", group, part, on_host) or update
            seen = step(
                real(part),
                real([p.grad for p in part]),  # type: ignore[misc]
                real([self._buffer(p) for p in part]) if settings.momentum else [],
                settings.on(part[0].device),
                None if good is None else good.to(part[0].device),
                [(i, copies[p]) for i, p in enumerate(part) if p in copies] if copies else [],
            )
            self._note(part, seen)

    def _keep(self, group: Group, weight: Tensor) -> dict[str, Tensor]:
        if group["momentum"]:
            self._buffer(weight)  # what it would begin with: decay is in it after the first step
        return super()._keep(group, weight)

    def _buffer(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        buffer: Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            # Of -0: whatever is added to it comes out as it was, a -0 too, as if it were a copy.
            buffer = state["momentum_buffer"] = torch.empty_like(weight)
            real([buffer])[0].fill_(-0.0)
        return buffer

    def _correction(self, group: Group, rate: Number) -> Number:
        """By what the buffers are to be scaled because the rate has moved."""
        previous = group["previous_rate"]
        factor: Number
        if isinstance(rate, Tensor):
            previous = torch.as_tensor(previous).to(rate)
            factor = torch.where(previous > 0, rate / previous, 1.0)
            group["previous_rate"] = previous.copy_(rate)
        else:
            previous, group["previous_rate"] = float(previous), rate
            factor = 1.0 if previous in (0, rate) else rate / previous
        # Also the buffers of weights without a gradient in this step, which `update` does not see:
        # there is one previous rate for all of them.
        resting = [self.state.get(p, {}) for p in group["params"] if p.grad is None]
        resting += [self._kept[p] for p in group["params"] if p in self._kept]
        for buffer in (state.get("momentum_buffer") for state in resting):
            if buffer is not None:
                buffer.mul_(factor.to(buffer.device) if isinstance(factor, Tensor) else factor)
        return factor


def build(settings: Any, groups: list[Group]) -> LARS:
    """As a config's section has it."""
    return LARS(
        groups,
        lr=0.0,
        momentum=settings.momentum,
        trust=settings.trust,
        eps=settings.eps,
        nesterov=settings.nesterov,
        form=settings.form,
        momentum_correction=settings.momentum_correction,
        policy=settings.policy,
    )
