"""Optimisers, by name: LARS with LARC (You 2017), LAMB (You 2019) and Muon (Jordan 2024), and the
groups they expect.

Each file here, but for the few they share, is an optimiser of its name with a function
`build(settings, groups)`: a new one is a new file. Names are known without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from megabatch.errors import UserError, nearest

if TYPE_CHECKING:
    from megabatch.optim.groups import NORMALISATIONS, Group, parameter_groups
    from megabatch.optim.lamb import LAMB
    from megabatch.optim.lars import LARS
    from megabatch.optim.layerwise import Adaptation, Layerwise
    from megabatch.optim.muon import Muon

__all__ = [
    "LAMB", "LARS", "NORMALISATIONS", "Adaptation", "Group", "Layerwise", "Muon", "build",
    "names", "parameter_groups",
]  # fmt: skip

_SHARED = (
    "groups", "layerwise", "layout", "lars_host", "lars_step", "muon_step", "norms"
)  # fmt: skip
_HOME = {
    "LARS": "lars",
    "LAMB": "lamb",
    "Muon": "muon",
    "Adaptation": "layerwise",
    "Layerwise": "layerwise",
    "Group": "groups",
    "NORMALISATIONS": "groups",
    "parameter_groups": "groups",
}


def names() -> tuple[str, ...]:
    """The names `build` knows."""
    return tuple(sorted(file.name for file in iter_modules(__path__) if file.name not in _SHARED))


def build(settings: Any, groups: list[Group]) -> Layerwise:
    """The optimiser a config's section asks for by its name; the caller sets `lr` at every step."""
    if settings.name not in names():
        raise UserError(
            f"there is no optimizer {settings.name!r}: {nearest(settings.name, names())}"
        )
    made: Layerwise = import_module(f"{__name__}.{settings.name}").build(settings, groups)
    return made


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
