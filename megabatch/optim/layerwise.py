"""What layer-wise optimisers share: torch's own options, the step around an update, what is loaded,
which kernel takes a step.

An optimiser is a subclass with `defaults`, a `_check` of them, and `_update`, which takes a group's
weights through one step and notes the ratios.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megabatch import kernels
from megabatch.optim.groups import Group

Number = float | Tensor
"""a float, or a 0-dim tensor on the device, which the host never reads"""

_WEIGHT = "weight"
"""among what is kept of a weight, the weight itself"""
_CACHED_BYTES = 1 << 20
"""of weights, beside which lie as many of gradients, momentum and the update"""

# Without the decorator that keeps torch's compiler away from them: it imports the whole of the
# compiler first, seconds of every start.
_ADD_GROUP, _STATE_DICT, _LOAD_STATE_DICT = (
    inspect.unwrap(method)
    for method in (
        torch.optim.Optimizer.add_param_group,
        torch.optim.Optimizer.state_dict,
        torch.optim.Optimizer.load_state_dict,
    )
)


class Adaptation(NamedTuple):
    """What one weight saw in the last step, or what a list of weights did: float64, on the device.

    0-dim tensors for one weight, vectors in the weights' order for a list.
    """

    ratio: Tensor
    weight_norm: Tensor
    gradient_norm: Tensor  # in LAMB, the norm of Adam's step


class Layerwise(torch.optim.Optimizer):
    """An optimiser whose groups may set `adapt` (False: ratio 1) and `share` (of the rate).

    maximize, foreach, capturable, fused: as torch's optimisers have them. `foreach=False` takes the
    weights one by one, which needs less memory; the default takes them together, on any device.
    `capturable` keeps what changes from step to step on the device, for CUDA graphs and
    torch.compile: give `lr` as a tensor there. A tensor lr is otherwise read by the host.
    """

    GROUP: ClassVar[Group] = {"adapt": True, "share": 1.0}
    """what a group has beside the settings of the constructor"""
    STATE: ClassVar[tuple[str, ...]] = ()
    """what `state` holds of each weight"""
    SOMETIMES: ClassVar[tuple[str, ...]] = ()
    """what it holds of some weights beside that"""
    KERNEL: ClassVar[bool] = False
    """whether `fused` may be asked for"""
    rounds_freely = False
    """steps on a CPU may round otherwise than torch's own optimisers, if that is faster"""

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        self._record: list[tuple[list[Tensor], Adaptation]] = []
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        super().__init__(params, {**defaults, **self.GROUP})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch has it: settings that an older or another optimiser did not write are ours.

        A group keeps its own, `adapt` above all; nothing is taken over if something is refused.
        """
        arguments = inspect.signature(type(self).__init__).parameters.values()
        optional = {each.name: each.default for each in arguments if each.default is not each.empty}
        before = vars(self)
        defaults = {**optional, **self.GROUP, **{**before, **state}["defaults"]}
        present = before.get("param_groups") or [{} for _ in state["param_groups"]]
        for group, own in zip(state["param_groups"], present, strict=True):
            written = set(group)
            for name, value in defaults.items():
                group.setdefault(name, own.get(name, value))
            self._check(group)
            if state["state"]:
                self._check_written(group, written)
        for held in state["state"].values():
            if held and not set(self.STATE) <= set(held) <= {*self.STATE, *self.SOMETIMES}:
                raise ValueError(
                    f"this is not the state of {type(self).__name__}, which keeps "
                    f"{' and '.join(self.STATE)} of each weight: it has {', '.join(held)}."
                )
        super().__setstate__({**state, "defaults": defaults})
        self._record, self._kept = [], {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it may set any setting of its own, `adapt` and `share` among them."""
        if isinstance(param_group, dict):  # torch says what else is wrong
            self._check({**self.defaults, **param_group})
        _ADD_GROUP(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch has it."""
        found: dict[str, Any] = _STATE_DICT(self)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch has it."""
        _LOAD_STATE_DICT(self, state_dict)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        good: Tensor | None = None,
        copies: Mapping[Tensor, Tensor] | None = None,
        reached: Mapping[Tensor, Tensor] | None = None,
    ) -> float | None:
        """Update the weights that have a gradient; the host never waits for the device.

        `good`, a boolean on the device, says whether the step counts: where it is false weights and
        buffers stay as they were. Gradients must be finite then too: set them to 0. `copies` maps
        weights to tensors that hold them in another precision; they are written with the weight.
        `reached`, a boolean on the device for some weights, whose gradient is then 0: where it is
        false a weight and its state stay as if it had no gradient, which the host need not know.
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
        if reached:
            self._kept = {
                weight: self._keep(group, weight)
                for group, weights in work
                for weight in weights
                if weight in reached
            }
        for group, weights in work:
            if weights:
                self._update(group, weights, good, copies or {})
        if reached:
            self._put_back(reached, copies or {})
        return loss

    def _keep(self, group: Group, weight: Tensor) -> dict[str, Tensor]:
        """A weight and its state before a step, copied; what is counted by the host goes on."""
        held = {name: v for name, v in self.state[weight].items() if isinstance(v, Tensor)}
        return {name: value.clone() for name, value in {**held, _WEIGHT: weight}.items()}

    def _put_back(self, reached: Mapping[Tensor, Tensor], copies: Mapping[Tensor, Tensor]) -> None:
        """Where they were not reached, weights and their state as they were kept."""
        for weight, kept in self._kept.items():
            for name, before in kept.items():
                now = weight if name == _WEIGHT else self.state[weight][name]
                now.copy_(torch.where(reached[weight], now, before))
        write_copies(list(self._kept), copies)
        self._kept = {}

    @property
    def ratios(self) -> dict[Tensor, Adaptation]:
        """The last step's ratio and norms of each adapted weight; reading a value synchronises."""
        return {
            weight: Adaptation(*values)
            for weights, vectors in self._record
            for weight, *values in zip(weights, *vectors, strict=True)
        }

    def _check(self, group: Group) -> None:
        mine = type(self).__name__
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError(f"a tensor lr must have one element, got {group['lr'].numel()}.")
        for name in ("lr", "weight_decay", "eps", "share"):
            if not group[name] >= 0:  # so that nan is refused too
                raise ValueError(f"{name} must not be negative, got {group[name]}.")
        if group["differentiable"]:
            raise ValueError(f"differentiable is not offered: {mine} changes weights in place.")
        if group["fused"] and group["foreach"]:
            raise ValueError("fused and foreach are two ways of one step: ask for one of them.")
        if group["fused"] and not self.KERNEL:
            raise ValueError(f"{mine} has no fused kernel: leave fused at None.")
        if not 0 <= group.get("momentum", 0.0) < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']}.")
        if group.get("nesterov") and group["momentum"] == 0:
            raise ValueError("nesterov needs a momentum above 0.")

    def _check_written(self, group: Group, written: set[str]) -> None:
        """Refuse the state of a group that another optimiser wrote, told by the settings that it
        named: what it holds under our names may mean another thing."""
        mine = type(self).__name__
        if group.get("dampening"):
            raise ValueError(
                f"this is the state of SGD with a dampening of {group['dampening']}, which {mine} "
                f"has not: it takes gradients in full."
            )
        if "ns_steps" in written:
            raise ValueError(
                f"this is the state of torch.optim.Muon, whose momentum is an average of "
                f"gradients: {mine} takes them in full."
            )

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        good: Tensor | None,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        """Take these weights of a group, which all have a gradient, through one step."""
        raise NotImplementedError

    def _note(self, weights: list[Tensor], seen: Adaptation | None) -> None:
        """Keep the ratios for whoever logs."""
        if seen is not None:
            self._record.append((weights, seen))


def chosen(name: str, group: Group, weights: list[Tensor], on_host: Any = None) -> Any:
    """What takes these weights of a group through a step in the place of the plain one, if anything
    does: the optimiser's kernel, or `on_host` on a CPU."""
    fused = group["fused"]
    if fused is None and (group["foreach"] is not None or torch.compiler.is_compiling()):
        fused = False  # the compiler fuses the plain one
    if fused is False:
        return None
    if on_host is not None and weights[0].is_cpu and _plain(weights):
        return on_host
    found = kernel(name) if kernel_takes(weights) else None
    if fused and found is None:
        places = "with Triton, on a CUDA device"
        raise ValueError(
            f"fused=True needs plain weights of floating point, "
            f"{places if on_host is None else f'on a CPU or, {places}'}: these are "
            f"{weights[0].dtype} on {weights[0].device}; leave it at None."
        )
    return found


@functools.cache
def kernel(name: str) -> Any:
    """The fused `update` of an optimiser, where Triton has what it needs and the file is there."""
    home = f"megabatch.kernels.{name}"
    if kernels.lacking() or find_spec(home) is None:
        return None
    return _on_their_device(import_module(home).update)


def _on_their_device(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step where its weights lie: Triton launches on the current device, which may be another."""

    @functools.wraps(step)
    def there(weights: list[Tensor], *others: Any) -> Any:
        with torch.cuda.device_of(weights[0]):
            return step(weights, *others)

    return there


def kernel_takes(weights: list[Tensor]) -> bool:
    """Whether a kernel may take these: plain tensors on CUDA."""
    return weights[0].is_cuda and _plain(weights)


def _plain(weights: list[Tensor]) -> bool:
    """Tensors of real numbers and nothing else: a shard, say, would lose its norm."""
    return weights[0].is_floating_point() and set(map(type, weights)) <= {Tensor, nn.Parameter}


def rate_of(group: Group) -> Number:
    """The group's share of lr: read by the host, as torch does, unless it must not be."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        on_device = group["capturable"] or torch.compiler.is_compiling()
        lr = lr.reshape(()) if on_device else lr.item()
    rate: Number = lr * group["share"]
    return rate


def together(group: Group, weights: list[Tensor]) -> list[list[Tensor]]:
    """Weights that one call may take together: of one device and dtype, and on a CPU no more than
    its caches hold, so that the second pass over them finds what the first one has read."""
    if group["foreach"] is False and not group["fused"]:
        return [[weight] for weight in weights]
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    full: list[list[Tensor]] = []
    nbytes = 0
    for weight in weights:
        kind = weight.device, weight.dtype
        lists.setdefault(kind, []).append(weight)
        nbytes += weight.nbytes if weight.is_cpu else 0
        if nbytes >= _CACHED_BYTES:
            full.append(lists.pop(kind))
            nbytes = 0
    return [*full, *lists.values()]


def subtract(weights: list[Tensor], steps: list[Tensor] | tuple[Tensor, ...], rate: Number) -> None:
    """Take a rate's share of the steps off the weights."""
    values = real(weights)
    if isinstance(rate, Tensor):
        torch._foreach_mul_(steps, rate.to(weights[0].device))
        torch._foreach_sub_(values, steps)
    else:
        torch._foreach_add_(values, steps, alpha=-rate)


def write_copies(weights: list[Tensor], copies: Mapping[Tensor, Tensor]) -> None:
    """Of those weights that have one in another precision."""
    held = [weight for weight in weights if weight in copies]
    if held:
        torch._foreach_copy_([copies[weight] for weight in held], held)


def real(tensors: list[Tensor]) -> list[Tensor]:
    """Complex tensors as their real and imaginary parts, as torch's optimisers see them."""
    if not tensors[0].is_complex():
        return tensors
    return [torch.view_as_real(t) for t in tensors]


def adaptation(ratios: Tensor, weight_norms: Tensor, gradient_norms: Tensor) -> Adaptation:
    """The ratios, 1 where either norm is 0."""
    both = torch.minimum(weight_norms, gradient_norms) > 0
    return Adaptation(torch.where(both, ratios, 1.0), weight_norms, gradient_norms)


def unrounded(factor: Number, like: Tensor) -> Number:
    """A factor for foreach, which on a CPU would round a Python number to half before it uses it;
    torch's optimisers, one by one, do not."""
    if isinstance(factor, Tensor) or not like.is_cpu or like.dtype.itemsize >= 4:
        return factor
    return torch.tensor(factor, dtype=torch.float32)  # whatever dtype a caller has made the default


def gated(factor: Number, good: Tensor | None, like: Tensor, closed: float) -> Number:
    """A factor of tensors such as this one; `closed` where the step does not count."""
    if good is None:
        return unrounded(factor, like)
    if not isinstance(factor, Tensor):
        # Of half tensors too the factor is not rounded to half. On the device: of a number on the
        # host `where` would make a copy, for which the host waits.
        wide = torch.promote_types(like.dtype, torch.float32)
        factor = torch.full((), factor, dtype=wide, device=good.device)
    return torch.where(good, factor, closed)
