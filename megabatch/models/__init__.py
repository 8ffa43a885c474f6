"""The models, by name: ResNet (Goyal 2017), AlexNet (You 2018, Jia 2018) and a small net for CPUs.

A file here declares its models as MODELS, a plain literal of names and the only image size each
takes (None: any), and has a function of each name: a new model is a new file. The literals are
read without importing the files, hence without torch: `--help` and a wrong name answer at once.
Models of timm and torchvision have their library's name before their own: see zoo.py.
"""

from __future__ import annotations

import ast
import difflib
import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megabatch.errors import UserError
from megabatch.models import zoo

if TYPE_CHECKING:
    from torch import nn


class _Entry(NamedTuple):
    module: str  # where a function of the model's name makes it
    image_size: int | None = None  # the only size the net takes; None: it pools what it is given


@functools.cache
def _models() -> dict[str, _Entry]:
    return {
        name: _Entry(file.stem, size)
        for file in sorted(Path(__file__).parent.glob("[!_]*.py"))
        for statement in ast.parse(file.read_text()).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MODELS"
        for name, size in ast.literal_eval(statement.value).items()
    }


def names() -> tuple[str, ...]:
    """The names `build` knows, family by family."""
    return tuple(_models())


def check(name: str, image_size: int | None = None) -> None:
    """Refuse, in one sentence, for an unknown name or a size the model cannot take."""
    if zoo.is_foreign(name):
        zoo.check(name)
        return
    if name not in _models():
        close = difflib.get_close_matches(name, _models(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(
            f"no model is called {name!r}{hint}; the models are {', '.join(_models())}, "
            f"and timm:NAME and torchvision:NAME where those are installed"
        )
    only = _models()[name].image_size
    if only is not None and image_size not in (None, only):
        raise UserError(f"model {name!r} takes images of {only} px, not of {image_size} px")


def build(
    name: str, num_classes: int, channels: int = 3, image_size: int | None = None
) -> nn.Module:
    """The named model, its weights drawn from torch's default generator: seed that first.

    `image_size` is checked and does not change the model; None leaves the check to the first image.
    """
    if zoo.is_foreign(name):
        return zoo.build(name, num_classes, channels, image_size)
    check(name, image_size)
    make = getattr(import_module(f"{__name__}.{_models()[name].module}"), name)
    model: nn.Module = make(num_classes=num_classes, channels=channels)
    return model
