"""Layers of somebody's module replaced by others of the same parameters, and put back."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_layers(
    module: nn.Module, make: Callable[[nn.Module], nn.Module | None]
) -> Callable[[], None]:
    """Replace each layer inside a module for which `make` gives another; returns what puts the old
    ones back, with the parameters and buffers that the new ones hold by then."""
    made: dict[nn.Module, nn.Module | None] = {}  # a layer used in two places stays one
    places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
    for parent in list(module.modules()):
        # Not named_children, which leaves out a layer's second name.
        for name, layer in list(parent._modules.items()):
            if layer is None:
                continue
            if layer not in made:
                made[layer] = make(layer)
            new = made[layer]
            if new is not None:
                setattr(parent, name, new)
                places.append((parent, name, layer, new))

    def put_back() -> None:
        for parent, name, layer, new in places:
            for own, tensor in (*new._parameters.items(), *new._buffers.items()):
                setattr(layer, own, tensor)
            setattr(parent, name, layer)

    return put_back
