"""A module as the planner's workload: its layers, their tensors, work and outputs, by one forward
pass over an image.

Work is counted where it is done, by the operations that torch runs: products of matrices and
convolutions, attention included, wherever a module makes them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megabatch.errors import UserError
from megabatch.planner.nets import Layer
from megabatch.planner.workload import Workload


def imported(name: str) -> nn.Module:
    """The module that `package.file:thing` names: thing is one, or makes one when it is called."""
    where, _, thing = name.partition(":")
    sys.path.insert(0, "")  # as python -m does
    try:
        found = getattr(importlib.import_module(where), thing)
        made = found if isinstance(found, nn.Module) else found()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"no model comes of {name}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(made, nn.Module):
        raise UserError(f"{name} makes {type(made).__name__}, not a torch.nn.Module")
    return made


def describe(module: nn.Module, images: Tensor, name: str) -> Workload:
    """The workload of a module: a layer for each module that owns parameters, or that does work
    beside those it holds (attention)."""
    paths = {layer: path for path, layer in module.named_modules()}
    outputs: dict[nn.Module, int] = {}
    work: dict[nn.Module, int] = {}
    inside: list[tuple[nn.Module, int]] = []

    def enter(layer: nn.Module, _: Any) -> None:
        inside.append((layer, counted.get_total_flops()))

    def leave(layer: nn.Module, _: Any, output: Any) -> None:
        _, before = inside.pop()
        done = counted.get_total_flops() - before
        work[layer] = work.get(layer, 0) + done
        if inside:  # what a module holds does is not its own work
            outer = inside[-1][0]
            work[outer] = work.get(outer, 0) - done
        if isinstance(output, tuple):
            output = output[0]
        if isinstance(output, Tensor):
            outputs[layer] = outputs.get(layer, 0) + output[:1].numel()

    hooks = [layer.register_forward_pre_hook(enter) for layer in paths]
    hooks += [layer.register_forward_hook(leave) for layer in paths]
    training = module.training
    fast = torch.backends.mha.get_fastpath_enabled()
    counted = FlopCounterMode(display=False)
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it is one operation that nobody counts
        with torch.no_grad(), counted:
            module.eval()(images[:1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shape = " x ".join(map(str, images[:1].shape))
        raise UserError(
            f"{name} cannot be described: its forward pass over {shape} failed ({error})"
        ) from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        module.train(training)
        for hook in hooks:
            hook.remove()
    layers = []
    for layer, path in paths.items():
        sizes = tuple(p.numel() for p in layer.parameters(recurse=False) if p.requires_grad)
        done = work.get(layer, 0) // 2  # two operations a multiply-add
        if sizes or done > 0:
            layers.append(Layer(path, sizes, max(0, done), outputs.get(layer, 0)))
    return Workload(name, tuple(layers))
