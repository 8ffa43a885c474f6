"""Which kernel an optimiser's step takes: that of its name in `kernels/`, where it can run and
nothing else was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import kernels
from megabatch.optim.groups import Group


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
