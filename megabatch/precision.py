"""Precision: autocast, or half weights with fp32 masters; the loss scale; a step that is skipped.

Jia 2018: forward and backward in half precision, weights and gradients cast to fp32 for LARS and
the update, and cast back. The loss scale is undone before LARS takes norms. Whether a step is
skipped is decided on the device, from the control vector, so that it is the same on every worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from megabatch.config import Config
from megabatch.optim import NORMALISATIONS

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000


def full_dtype(config: Config) -> torch.dtype:
    """What images, sums and the optimizer are in: fp32, or fp64 for runs in double precision."""
    return torch.float64 if config.precision == "fp64" else torch.float32


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if config.precision not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(device.type, HALF[config.precision])


def _half_weights(net: nn.Module, config: Config) -> dict[str, nn.Parameter]:
    """The weights that are kept in half precision, by name: none unless the config says so, and
    never those of normalisation layers or those that a parametrization makes weights of, by means
    of its own. One that two layers share has one name."""
    found: dict[nn.Parameter, str] = {}
    if config.half_weights:
        for prefix, module in net.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if not isinstance(module, (*NORMALISATIONS, ParametrizationList)):
                    found.setdefault(weight, f"{prefix}.{name}".lstrip("."))
    return {name: weight for weight, name in found.items()}


@contextlib.contextmanager
def with_half_weights(net: nn.Module, config: Config) -> Iterator[None]:
    """The module's weights are half while this lasts, if the config asks for half weights: as
    evaluation needs them, without masters."""
    weights = _half_weights(net, config).values()
    for weight in weights:
        weight.data = weight.data.to(HALF[config.precision])
    try:
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.to(full_dtype(config))


class Masters:
    """fp32 twins of a module's weights, which become half; normalisation layers stay in fp32.

    Empty unless the config asks for half weights, and then everything here does nothing. After
    close() the module holds the masters themselves.
    """

    def __init__(self, net: nn.Module, config: Config) -> None:
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        self._names: dict[str, nn.Parameter] = {}
        for name, weight in _half_weights(net, config).items():
            twin = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            self.twins[weight] = self._names[name] = twin
            weight.data = weight.data.to(HALF[config.precision])

    def close(self) -> None:
        """Make the module's weights full again: the masters, not what they were rounded to."""
        for weight, twin in self.twins.items():
            weight.data = twin.data
        self.twins.clear()
        self._names.clear()

    def groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups of the module's weights as groups of what the optimizer updates."""
        return [{**group, "params": [self.of(p) for p in group["params"]]} for group in groups]

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        return self.twins.get(weight, weight)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the module's weights."""
        if self.twins:
            torch._foreach_copy_(list(self.twins), list(self.twins.values()))

    def tensors(self) -> dict[str, Tensor]:
        return {f"master.{name}": twin.detach() for name, twin in self._names.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, twin in self._names.items():
                twin.copy_(tensors[f"master.{name}"])
        self.write_back()


class LossScale:
    """The factor of the loss in backward, a number on the device.

    Dynamic (for fp16): halved when a step overflows, doubled after 2,000 steps that did not.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.dynamic = config.loss_scale is None and config.precision == "fp16"
        first = _FIRST_SCALE if self.dynamic else (config.loss_scale or 1.0)
        self.value = torch.tensor(first, dtype=torch.float32, device=device)
        self._good_steps = torch.tensor(0, device=device)
        self.on = self.dynamic or first != 1.0

    def update(self, good: Tensor) -> None:
        """After a step: `good` says, on the device, that it did not overflow."""
        if not self.dynamic:
            return
        count = torch.where(good, self._good_steps + 1, 0)
        grown = torch.where(count >= _GROWTH_STEPS, self.value * 2, self.value)
        # In place: a step that was captured once reads and writes the same memory always.
        self.value.copy_(torch.where(good, grown, self.value / 2))
        self._good_steps.copy_(torch.where(count >= _GROWTH_STEPS, 0, count))

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale.value": self.value, "loss_scale.good_steps": self._good_steps}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.value.copy_(tensors["loss_scale.value"])
        self._good_steps.copy_(tensors["loss_scale.good_steps"])
