"""The arithmetic of one step of LARS: `Update` says what it is, `update` does it on any device.

Kernels are another `Update` each, under the name `update`: in `kernels/lars.py` for CUDA, in
`lars_host.py` for a CPU; this one is their plain twin. The ratio is that of You et al. 2017
(1708.03888), or LARC's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.optim.layerwise import Adaptation, Number, adaptation, gated, unrounded
from megabatch.optim.norms import Tensors, norms


class Settings(NamedTuple):
    """What a step needs of a group, each number ready to use."""

    rate: Number  # lr times share
    momentum: float
    weight_decay: float
    trust: float | None  # None: no adaptation, the ratio is 1
    eps: float
    nesterov: bool
    form: str
    policy: str
    maximize: bool
    correction: Number  # of the old momentum buffers, before they fade

    def on(self, device: torch.device) -> Settings:
        """The same with its tensors on a device."""
        if not isinstance(self.rate, Tensor):
            return self
        correction = self.correction
        if isinstance(correction, Tensor):
            correction = correction.to(device)
        return self._replace(rate=self.rate.to(device), correction=correction)


class Update(Protocol):
    """One step of LARS over weights of one device and dtype; the seam for a kernel.

    weights, buffers: changed in place. Buffers are the weights' momentum, [] where momentum is 0; a
        fresh one holds -0.
    gradients: not changed; of the weights' shapes, perhaps of another dtype or memory layout.
    good: a 0-dim boolean on the device, or None for true. Where it is false weights and buffers
        stay as they were, but for the correction, and gradients are finite. Never read by the host.
    copies: (i, tensor) for each weight that has a copy in another precision, which then is written.
    Returns ratios and norms as three float64 vectors in the weights' order, None without trust. The
    norms are of the weights before the step and of the gradients without decay; their squares are
    summed as accurately as in float64, in an order that is the same at every call.

    Per weight, with g = -gradient under `maximize`, inside = rate in the paper form and 1 in the
    other, outside = 1 and rate: u = (g + decay w) ratio inside; v = v correction momentum + u;
    w -= outside (u + momentum v under nesterov, else v; u where momentum is 0).
    """

    def __call__(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
        settings: Settings,
        good: Tensor | None,
        copies: list[tuple[int, Tensor]],
    ) -> Adaptation | None: ...


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    settings: Settings,
    good: Tensor | None,
    copies: list[tuple[int, Tensor]],
) -> Adaptation | None:
    """`Update` by torch's foreach operations, on any device."""
    rate, momentum = settings.rate, settings.momentum
    # The forms differ in nothing but the side of the momentum buffer on which the rate stands.
    inside, outside = (rate, 1.0) if settings.form == "paper" else (1.0, rate)

    updates: Tensors = gradients
    if settings.maximize:
        updates = torch._foreach_neg(updates)
    if settings.weight_decay != 0:
        updates = torch._foreach_add(updates, weights, alpha=settings.weight_decay)
    seen = None
    if settings.trust is not None:
        seen = ratios_of(settings, weights, gradients)
        # The gate goes along in the vector of ratios, which costs no pass over the weights.
        scales = inside * seen.ratio if good is None else inside * seen.ratio * good
        updates = _scaled(updates, scales.unbind(), keep=gradients)
    elif settings.form == "paper" or good is not None:
        updates = _scaled(updates, gated(inside, good, weights[0], closed=0.0), keep=gradients)

    if momentum != 0:
        if isinstance(settings.correction, Tensor) or settings.correction != 1:
            torch._foreach_mul_(buffers, unrounded(settings.correction, buffers[0]))
        torch._foreach_mul_(buffers, gated(momentum, good, buffers[0], closed=1.0))
        torch._foreach_add_(buffers, updates)
        if settings.nesterov:
            updates = torch._foreach_add(updates, buffers, alpha=momentum)
        else:
            updates = buffers
        if good is not None:  # the buffers still hold earlier steps
            updates = _scaled(updates, good.to(buffers[0].dtype), keep=buffers)
    if isinstance(outside, Tensor):
        torch._foreach_sub_(weights, torch._foreach_mul(updates, outside))
    else:
        torch._foreach_add_(weights, updates, alpha=-outside)
    if copies:
        torch._foreach_copy_([copy for _, copy in copies], [weights[i] for i, _ in copies])
    return seen


def ratios_of(settings: Settings, weights: list[Tensor], gradients: list[Tensor]) -> Adaptation:
    """The ratio of each weight, and the norms that it is made of."""
    weight_norms, gradient_norms = norms(weights, gradients)
    denominators = gradient_norms
    if settings.policy == "lars" and settings.weight_decay != 0:
        denominators = denominators + settings.weight_decay * weight_norms
    if settings.eps != 0:
        denominators = denominators + settings.eps
    assert settings.trust is not None
    ratios = settings.trust * weight_norms / denominators
    if settings.policy == "clip":
        # Here the ratio is itself the rate; divided by the rate, it fits the same update.
        ratios = (ratios / settings.rate).clamp(max=1.0)
    return adaptation(ratios, weight_norms, gradient_norms)


def _scaled(tensors: Tensors, factor: Number | Tensors, keep: Tensors) -> Tensors:
    """Tensors times a factor or one each: in place, unless these are the ones to keep."""
    if tensors is keep:
        return torch._foreach_mul(tensors, factor)
    torch._foreach_mul_(tensors, factor)
    return tensors
