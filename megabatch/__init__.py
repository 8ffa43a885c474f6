"""megabatch: image classifiers trained by synchronous SGD with very large batches.

The public names are imported when they are first used, so that the planner and `--help` need no
torch; type checkers and editors see them as if they were imported here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megabatch.version import __version__

if TYPE_CHECKING:
    from megabatch import models, plans, recipes
    from megabatch.batch import Stage
    from megabatch.between_steps import Summary
    from megabatch.cluster import Cluster
    from megabatch.config import Config, Data, Hybrid, LearningRate, Noise, OptimizerConfig
    from megabatch.data.own_loop import Loader
    from megabatch.errors import RunFailed, UserError
    from megabatch.evaluation import evaluate
    from megabatch.optim import LAMB, LARS, Muon, parameter_groups
    from megabatch.planner import forecast
    from megabatch.runs.loggers import Logger
    from megabatch.schedule import constant, cosine, join, linear_scaling, poly, step_decay, warmup
    from megabatch.sync.ddp import GradSync
    from megabatch.training import train

__all__ = [
    "LAMB",
    "LARS",
    "Cluster",
    "Config",
    "Data",
    "GradSync",
    "Hybrid",
    "LearningRate",
    "Loader",
    "Logger",
    "Muon",
    "Noise",
    "OptimizerConfig",
    "RunFailed",
    "Stage",
    "Summary",
    "UserError",
    "__version__",
    "constant",
    "cosine",
    "evaluate",
    "forecast",
    "join",
    "linear_scaling",
    "models",
    "parameter_groups",
    "plans",
    "poly",
    "recipes",
    "step_decay",
    "train",
    "warmup",
]

# Where the names live; tests/test_public.py holds this to what a type checker sees above.
_HOMES = {
    "batch": ["Stage"],
    "cluster": ["Cluster"],
    "config": ["Config", "Data", "Hybrid", "LearningRate", "Noise", "OptimizerConfig"],
    "data.own_loop": ["Loader"],
    "errors": ["RunFailed", "UserError"],
    "optim": ["LAMB", "LARS", "Muon", "parameter_groups"],
    "planner": ["forecast"],
    "runs.loggers": ["Logger"],
    "schedule": ["constant", "cosine", "join", "linear_scaling", "poly", "step_decay", "warmup"],
    "sync.ddp": ["GradSync"],
    "evaluation": ["evaluate"],
    "between_steps": ["Summary"],
    "training": ["train"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # where a type checker would take it for a promise of any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'megabatch' has no attribute {name!r}")
        if name in _HOME:
            value = getattr(import_module(f"megabatch.{_HOME[name]}"), name)
        else:
            value = import_module(f"megabatch.{name}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
