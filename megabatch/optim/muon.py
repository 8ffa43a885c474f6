"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal, with a length for each
weight.

A batch of a large share of the images leaves few steps, and each of them must do more: a step whose
singular values are all alike moves along every direction that the gradients have shown, not along
the few that are largest. The length is LARS's: a share of the weight's own. Such steps would make a
weight longer at every turn, and the next step with it, without end; behind batch norm a length
means nothing, so weights keep theirs and turn. The arithmetic of a step is in muon_step.py, or in
kernels/muon.py where that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.groups import Group
from megabatch.optim.layerwise import Layerwise, chosen, rate_of, real, together
from megabatch.optim.muon_step import MuonSettings, update
from megabatch.optim.norms import norms


class Muon(Layerwise):
    """u = momentum u + g; w -= lr trust |w| / |O(u)| O(u), where O makes a matrix orthogonal, and
    then w has the length again that it began with.

    A weight of more dimensions is a matrix of its first by the rest. One of fewer than two takes
    u's own direction, and its length is free. So is that of a matrix which began with zeros: its
    steps are lr trust O(u).
    Weights of a group that does not `adapt` take SGD's step, lr u, and they alone may decay:
    w -= lr weight_decay w. The last layer should be one of them (`parameter_groups(...,
    adapt_head=False)`): logits need a length that may grow.

    nesterov: O of g + momentum u.
    fused: True asks for Triton's kernels, False for foreach, None takes kernels where they can run.
    """

    STATE = ("momentum_buffer",)
    SOMETIMES = ("length",)
    KERNEL = True

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

    def _check_written(self, group: Group, written: set[str]) -> None:
        if "form" in written:
            raise ValueError(
                "this is the state of LARS, whose momentum has its ratios in it: beside Muon's "
                "gradients it would be nothing."
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
        settings = MuonSettings(
            rate=rate,
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            trust=group["trust"] if group["adapt"] else None,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        for part in together(group, weights):
            step = chosen("muon", group, part) or update
            seen = step(
                real(part),
                real([p.grad for p in part]),  # type: ignore[misc]
                real([self._buffer(p) for p in part]),
                self._lengths(part) if group["adapt"] else [],
                settings,
                None if good is None else good.to(part[0].device),
                [(i, copies[p]) for i, p in enumerate(part) if p in copies] if copies else [],
            )
            self._note(part, seen)

    def _lengths(self, weights: list[Tensor]) -> list[Tensor]:
        """That the weights had before their first step; infinite where it is free."""
        new = [weight for weight in weights if "length" not in self.state[weight]]
        for weight, length in zip(new, norms(real(new))[0].unbind() if new else (), strict=True):
            matrix = real([weight])[0].ndim > 1 and real([weight])[0].numel() > 1
            kept = length if matrix else torch.full_like(length, torch.inf)
            # In the weight's dtype, in which torch brings it back from a checkpoint.
            self.state[weight]["length"] = kept.to(weight.dtype, copy=True)
        return [self.state[weight]["length"] for weight in weights]

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
