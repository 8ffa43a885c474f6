"""megabatch: image classifiers trained by synchronous SGD with very large batches.

The public names are imported when they are first used, so that the planner and `--help` need no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "megabatch.config": ["Config", "Data", "LearningRate", "Optimizer"],
    "megabatch.errors": ["UserError"],
    "megabatch.batch": ["Stage"],
    "megabatch.schedule": [
        "linear_scaling", "warmup", "constant", "poly", "cosine", "steps", "join",
    ],
    "megabatch.optim": ["LARS", "LAMB", "parameter_groups"],
    "megabatch.cluster": ["Cluster"],
    "megabatch.sync.ddp": ["GradSync"],
    "megabatch.planner": ["forecast"],
    "megabatch.training": ["train", "evaluate", "Summary"],
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("recipes", "plans", "models")

__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"megabatch.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'megabatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
