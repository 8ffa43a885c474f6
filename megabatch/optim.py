"""Layer-wise adaptive optimisers, LARS with LARC and LAMB, and the parameter groups they expect.

LARS is Algorithm 1 of You et al. 2017 (1708.03888) and LARC its authors' later rule; LAMB is
Algorithm 2 of You et al. 2019 (1904.00962); Goyal et al. 2017 (1706.02677) correct the momentum.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORMS = ("paper", "pytorch")
POLICIES = ("lars", "clip", "scale")

Tensors = list[Tensor] | tuple[Tensor, ...]
Group = dict[str, Any]

# _NormBase is the parent of every batch norm and instance norm.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(module: nn.Module, weight_decay: float, *, share: float = 1.0) -> list[Group]:
    """One group of weights that decay and adapt, one of all the rest, which does neither.

    The rest is what normalises and what has fewer than two dimensions; it learns at `share` of the
    rate. Frozen parameters and empty groups are left out.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    normalising = {
        p for m in module.modules() if isinstance(m, NORMALISATIONS) for p in m.parameters()
    }
    adapted: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in trainable:
        (plain if p.ndim < 2 or p in normalising else adapted).append(p)
    assert len(adapted) + len(plain) == len(trainable) == len({*adapted, *plain})
    groups: list[Group] = [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True, "share": 1.0},
        {"params": plain, "weight_decay": 0.0, "adapt": False, "share": share},
    ]
    return [group for group in groups if group["params"]]


class Gate:
    """Lets a step through, or leaves everything as it was, without the host knowing which."""

    def __init__(self, good: Tensor) -> None:
        self._good = good

    def passed(self, updates: Tensors) -> Tensors:
        """Updates, or zeros."""
        return torch._foreach_mul(updates, self._good.to(updates[0].dtype))

    def decay(self, factor: float, buffers: Tensors) -> Tensor:
        """A factor of buffers: 1 where the step does not count."""
        return torch.where(self._good, buffers[0].new_full((), factor), 1.0)


class Adaptation(NamedTuple):
    """What one weight saw in the last step: 0-dim float64 tensors on its device."""

    ratio: Tensor
    weight_norm: Tensor
    gradient_norm: Tensor  # in LAMB, the norm of Adam's step


class _Layerwise(torch.optim.Optimizer):
    """What LARS and LAMB share: checks of the groups, the step around the update, the record."""

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        self._record: list[tuple[Tensors, Tensor, Tensor, Tensor]] = []
        super().__init__(params, {**defaults, "adapt": True, "share": 1.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._record = []

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it may set any setting of its own, `adapt` and `share` among them."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, good: Tensor | None = None
    ) -> float | None:
        """Update the weights that have a gradient; the host never waits for the device.

        `good`, a boolean on the device, says whether the step counts: where it is false weights and
        buffers stay as they were. Gradients must be finite then too: set them to 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._record = []
        work = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        if any(p.grad.layout != torch.strided for _, weights in work for p in weights):
            raise ValueError(f"{type(self).__name__} needs dense gradients, got a sparse one.")
        gate = None if good is None else Gate(good)
        for group, weights in work:
            if weights:
                self._update(group, weights, [p.grad for p in weights], gate)
        return loss

    @property
    def ratios(self) -> dict[Tensor, Adaptation]:
        """The last step's ratio and norms of each adapted weight; reading a value synchronises."""
        return {
            weight: Adaptation(*values)
            for weights, *vectors in self._record
            for weight, *values in zip(weights, *vectors, strict=True)
        }

    def _check(self, group: Group) -> None:
        for name in ("lr", "weight_decay", "eps", "share"):
            if not group[name] >= 0:  # so that nan is refused too
                raise ValueError(f"{name} must not be negative, got {group[name]}.")

    def _update(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor], gate: Gate | None
    ) -> None:
        raise NotImplementedError

    def _note(
        self, weights: list[Tensor], ratios: Tensor, weight_norms: Tensor, gradient_norms: Tensor
    ) -> Tensor:
        """Keep the ratios for whoever logs and return them, 1 where either norm is 0."""
        ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
        self._record.append((weights, ratios, weight_norms, gradient_norms))
        return ratios


# LARC is LARS with another ratio and nothing else, so it is a policy of this class: the forms,
# momentum and groups are written, and tested, once. LAMB has another update and other state, so
# it is a class of its own.
class LARS(_Layerwise):
    """SGD with a rate for each weight: lr times trust * |w| / (|g| + weight_decay * |w| + eps).

    form: "paper" keeps the rate in the momentum buffer, v = m v + lr ratio (g + decay w), w -= v;
        "pytorch" outside, u = m u + ratio (g + decay w), w -= lr u. They part when lr moves.
    momentum_correction: in the paper form, scale the old buffer by lr_t / lr_(t-1), which makes it
        lr_t u. A step at lr 0 empties the buffer: its gradient is forgotten, where u keeps it.
    trust: None or 0 turns adaptation off; the pytorch form is then torch.optim.SGD.
    policy: "lars"; or LARC's, which leave decay out of the ratio: "scale" is lr * ratio, "clip" is
        min(lr, ratio).
    Groups may set `adapt` (False: ratio 1) and `share` (their rate as a share of lr); a group lies
    on one device. Gradients must be unscaled: a loss scale would enter the ratio.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        form: str = "paper",
        momentum_correction: bool = False,
        policy: str = "lars",
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
            "previous_rate": 0.0,  # written by momentum correction; here to be in the state_dict
        }
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["trust"] is not None and not group["trust"] >= 0:
            raise ValueError(f"trust must be None or not negative, got {group['trust']}.")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']}.")
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov needs a momentum above 0.")
        if group["form"] not in FORMS:
            raise ValueError(f"form must be one of {FORMS}, got {group['form']!r}.")
        if group["policy"] not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {group['policy']!r}.")
        if group["momentum_correction"] and group["form"] != "paper":
            raise ValueError("momentum_correction is for the paper form alone.")

    def _update(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor], gate: Gate | None
    ) -> None:
        rate = group["lr"] * group["share"]
        # The forms differ in nothing but the side of the momentum buffer on which the rate stands.
        inside, outside = (rate, 1.0) if group["form"] == "paper" else (1.0, rate)

        updates: Tensors = gradients
        if group["weight_decay"] != 0:
            updates = torch._foreach_add(updates, weights, alpha=group["weight_decay"])
        if group["adapt"] and group["trust"]:
            ratios = self._ratios(group, rate, weights, gradients)
            updates = torch._foreach_mul(updates, (inside * ratios).unbind())
        elif group["form"] == "paper":
            updates = torch._foreach_mul(updates, inside)

        if group["momentum_correction"]:
            self._correct_momentum(group, rate)
        if gate is not None:
            updates = gate.passed(updates)
        if group["momentum"] != 0:
            decay = group["momentum"] if gate is None else gate.decay(group["momentum"], weights)
            buffers = self._accumulate(decay, weights, updates)
            if group["nesterov"]:
                updates = torch._foreach_add(updates, buffers, alpha=group["momentum"])
            else:
                updates = buffers
            if gate is not None:
                updates = gate.passed(updates)
        torch._foreach_add_(weights, updates, alpha=-outside)

    def _ratios(
        self, group: Group, rate: float, weights: list[Tensor], gradients: list[Tensor]
    ) -> Tensor:
        weight_norms, gradient_norms = _norms(weights), _norms(gradients)
        decay = group["weight_decay"] if group["policy"] == "lars" else 0.0
        denominators = gradient_norms + decay * weight_norms + group["eps"]
        ratios = group["trust"] * weight_norms / denominators
        if group["policy"] == "clip":
            # Here the ratio is itself the rate; divided by the rate, it fits the same update.
            ratios = (ratios / rate).clamp(max=1.0)
        return self._note(weights, ratios, weight_norms, gradient_norms)

    def _correct_momentum(self, group: Group, rate: float) -> None:
        previous, group["previous_rate"] = group["previous_rate"], rate
        # All buffers of the group, also those of weights without a gradient in this step: there is
        # one previous rate for all of them.
        states = [self.state.get(p, {}) for p in group["params"]]
        buffers = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        if buffers and previous not in (0, rate):
            torch._foreach_mul_(buffers, rate / previous)

    def _accumulate(
        self, momentum: float | Tensor, weights: list[Tensor], updates: Tensors
    ) -> list[Tensor]:
        states = [self.state[p] for p in weights]
        moving = [i for i, state in enumerate(states) if "momentum_buffer" in state]
        if moving:
            buffers = [states[i]["momentum_buffer"] for i in moving]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, [updates[i] for i in moving])
        for state, update in zip(states, updates, strict=True):
            if "momentum_buffer" not in state:  # a copy: the update may be the gradient itself
                state["momentum_buffer"] = update.clone()
        return [state["momentum_buffer"] for state in states]


class LAMB(_Layerwise):
    """Adam with decoupled decay whose step is scaled, weight by weight, by |w| / |step|.

    As in the MLPerf reference, both moments are bias-corrected and the ratio is not bounded. The
    reference clips the gradient's global norm to 1 first; that is left to the caller. A step that
    does not count still counts in the bias correction, whose clock is the host's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas must lie in [0, 1), got {group['betas']}.")

    def _update(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor], gate: Gate | None
    ) -> None:
        rate = group["lr"] * group["share"]
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in weights]
        for state, weight in zip(states, weights, strict=True):
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
            state["step"] += 1
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]

        # Through a closed gate the gradients are 0: the moments stay if they do not decay either.
        torch._foreach_mul_(means, beta1 if gate is None else gate.decay(beta1, means))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2 if gate is None else gate.decay(beta2, squares))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)

        steps: Tensors = torch._foreach_div(means, [1 - beta1 ** state["step"] for state in states])
        scales = torch._foreach_div(squares, [1 - beta2 ** state["step"] for state in states])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(steps, scales)
        if group["weight_decay"] != 0:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            weight_norms, step_norms = _norms(weights), _norms(steps)
            ratios = self._note(weights, weight_norms / step_norms, weight_norms, step_norms)
            torch._foreach_mul_(steps, ratios.unbind())
        if gate is not None:
            steps = gate.passed(steps)
        torch._foreach_add_(weights, steps, alpha=-rate)


def _norms(tensors: Tensors) -> Tensor:
    """The 2-norm of each tensor, in one vector on the device."""
    # float64 for every dtype. Summed in float32 on a CPU, the norm of 19 million values is off by
    # 8e-4, and gradients below 1e-23 have norm 0; in float16 a norm above 65504 is infinite.
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
