"""Models of other libraries: timm:NAME and torchvision:NAME, where those are installed.

Their names are read from their files, without importing them: a wrong one is refused at once. A run
builds them for its classes, channels and size; their own pretrained weights come from their cache.
"""

from __future__ import annotations

import difflib
import functools
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.errors import UserError

if TYPE_CHECKING:
    from torch import nn

PRETRAINED = "pretrained"
"""as a run's first weights: those that the library has"""
LIBRARIES = ("timm", "torchvision")
# Both mark the functions that make a model with this decorator; detection and the like lie deeper.
_REGISTERED = re.compile(r"^@register_model\b.*?^def (\w+)\(", re.DOTALL | re.MULTILINE)
_AUXILIARY = ("googlenet", "inception_v3")
"""torchvision's nets that give a second opinion in training, unless they are told not to"""


def is_foreign(name: str) -> bool:
    """Whether a model is another library's to make."""
    library, colon, _ = name.partition(":")
    return bool(colon) and library in LIBRARIES


def check_init(init: str) -> None:
    """Refuse a file of first weights that is not there."""
    if init not in ("", PRETRAINED) and not Path(init).is_file():
        raise UserError(
            f"there is no file {init}: --init takes a safetensors file, or a .pth of torch's"
        )


@functools.cache
def names_in(library: str) -> tuple[str, ...]:
    """The names of a library's image classifiers."""
    found = find_spec(library)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"{library} is not installed here: pip install {library}")
    files = sorted((Path(found.submodule_search_locations[0]) / "models").glob("*.py"))
    return tuple(sorted({name for file in files for name in _REGISTERED.findall(file.read_text())}))


def check(name: str) -> None:
    """Refuse, in one sentence, a library that is not there or a name that it does not have."""
    library, _, model = name.partition(":")
    known = names_in(library)
    made = model.partition(".")[0] if library == "timm" else model  # timm's NAME.WEIGHTS
    if made not in known:
        close = [f"{library}:{one}" for one in difflib.get_close_matches(made, known, n=3)]
        hint = f"did you mean {' or '.join(close)}?" if close else _listing(library)
        raise UserError(f"{library} has no model {model!r}: {hint}")


def _listing(library: str) -> str:
    where = "timm" if library == "timm" else "torchvision.models"
    return f"{where}.list_models() lists its {len(names_in(library)):,}"


def build(
    name: str,
    num_classes: int | None,
    channels: int = 3,
    image_size: int | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """The named model, from its library. `num_classes` None: as many as it was trained for;
    `pretrained`: with the weights that the library has for it."""
    check(name)
    library, _, model = name.partition(":")
    make = _by_timm if library == "timm" else _by_torchvision
    return make(_imported(library), model, num_classes, channels, image_size, pretrained)


def _imported(library: str) -> Any:
    try:
        return import_module(library)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"{library} is installed but does not import ({reason}): install one that is made for "
            f"this torch"
        ) from error


def _by_timm(
    timm: Any,
    model: str,
    num_classes: int | None,
    channels: int,
    image_size: int | None,
    pretrained: bool,
) -> nn.Module:
    known = timm.models.get_pretrained_cfg(model)
    size: dict[str, Any] = {}
    if known is not None and image_size not in (None, known.input_size[-1]):
        size = {"img_size": image_size} if known.fixed_input_size else {}
    how = {"num_classes": num_classes, "in_chans": channels, **size}
    try:
        made: nn.Module = timm.create_model(model, pretrained=pretrained, **how)
    except TypeError as error:
        if size and "img_size" in str(error):
            raise UserError(
                f"model 'timm:{model}' takes images of {known.input_size[-1]} px, not of "
                f"{image_size} px"
            ) from None
        raise
    return made


def _by_torchvision(
    torchvision: Any,
    model: str,
    num_classes: int | None,
    channels: int,
    image_size: int | None,
    pretrained: bool,
) -> nn.Module:
    if channels != 3:
        raise UserError(f"torchvision:{model} takes images in colour: give --data.channels 3")
    how: dict[str, Any] = {"weights": "DEFAULT"} if pretrained else {}
    if num_classes is not None:
        how["num_classes"] = num_classes
    if model in _AUXILIARY:
        how["aux_logits"] = False
        how |= {} if pretrained else {"init_weights": True}
    if model.startswith("vit_") and image_size is not None and not pretrained:
        how["image_size"] = image_size
    made: nn.Module = torchvision.models.get_model(model, **how)
    return made
