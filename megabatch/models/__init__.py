"""The models, by name: ResNet (Goyal 2017), AlexNet (You 2018, Jia 2018) and a small net for CPUs.

Names and image sizes are checked without importing torch: `--help` and a wrong name answer at once.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class _Entry(NamedTuple):
    module: str  # where a function of the model's name makes it
    image_size: int | None = None  # the only size the net takes; None: it pools what it is given


_MODELS = {
    "alexnet": _Entry("alexnet", 227),
    "alexnet_bn": _Entry("alexnet", 227),
    "alexnet_bn_pool5": _Entry("alexnet", 227),
    "resnet18": _Entry("resnet"),
    "resnet34": _Entry("resnet"),
    "resnet50": _Entry("resnet"),
    "resnet101": _Entry("resnet"),
    "resnet152": _Entry("resnet"),
    "small": _Entry("small"),
    "small20": _Entry("small"),
}


def names() -> tuple[str, ...]:
    """The names `build` knows, family by family."""
    return tuple(_MODELS)


def check(name: str, image_size: int | None = None) -> None:
    """Raise ValueError, in one sentence, for an unknown name or a size the model cannot take."""
    if name not in _MODELS:
        close = difflib.get_close_matches(name, _MODELS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"no model is called {name!r}{hint}; the models are {', '.join(_MODELS)}")
    only = _MODELS[name].image_size
    if only is not None and image_size not in (None, only):
        raise ValueError(f"model {name!r} takes images of {only} px, not of {image_size} px")


def build(
    name: str, num_classes: int, channels: int = 3, image_size: int | None = None
) -> nn.Module:
    """The named model, its weights drawn from torch's default generator: seed that first.

    `image_size` is checked and does not change the model; None leaves the check to the first image.
    """
    check(name, image_size)
    make = getattr(import_module(f"{__name__}.{_MODELS[name].module}"), name)
    model: nn.Module = make(num_classes=num_classes, channels=channels)
    return model
