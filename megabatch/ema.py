"""A moving average of the weights, kept beside them in full precision and used for evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.precision import Masters


class WeightAverage:
    """avg = decay * avg + (1 - decay) * weights after each step, over weights and float buffers.

    With decay 0 there is none, and everything here does nothing.
    """

    def __init__(self, net: nn.Module, config: Config, masters: Masters | None = None) -> None:
        self._decay = config.ema
        on = self._decay > 0
        tensors = net.state_dict().items() if on else ()
        self._weights = {name: tensor for name, tensor in tensors if tensor.is_floating_point()}
        # Of a half weight, its master is averaged.
        every_name = dict(net.named_parameters(remove_duplicate=False))
        named = every_name if masters is not None else {}
        self._sources = {
            name: masters.of(named[name]).detach() if masters and name in named else tensor
            for name, tensor in self._weights.items()
        }
        self._averages = {name: _full(tensor).clone() for name, tensor in self._sources.items()}

    def update(self, good: Tensor) -> None:
        """After a step; one that did not count (`good`, on the device, is false) leaves it be."""
        if self._averages:
            self._move(good)

    @torch.no_grad()
    def _move(self, good: Tensor) -> None:
        averages = list(self._averages.values())
        weights = [_full(self._sources[name]) for name in self._averages]
        # 0 for a step that did not count; in one dtype for each average.
        shift = {a.dtype: good.to(a) * (1 - self._decay) for a in averages}
        torch._foreach_lerp_(averages, weights, [shift[a.dtype] for a in averages])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The module holds the averages while this lasts."""
        kept = {name: tensor.clone() for name, tensor in self._weights.items()}
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._weights.items():
            tensor.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        return {f"ema.{name}": tensor for name, tensor in self._averages.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(tensors[f"ema.{name}"])


@torch.no_grad()
def put_averages(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the averages that a checkpoint holds, if it holds some, into the module."""
    for name, tensor in net.state_dict().items():
        if f"ema.{name}" in tensors:
            tensor.copy_(tensors[f"ema.{name}"])


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()
