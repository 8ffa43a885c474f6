"""Recipes: each a function that returns a Config, its docstring the command and what to expect of
it."""

from __future__ import annotations

import os
from collections.abc import Callable

from megabatch.config import Config, check_setting
from megabatch.errors import UserError, nearest
from megabatch.recipes.digits import digits
from megabatch.recipes.goyal2017 import goyal2017, goyal2017_resnet101
from megabatch.recipes.jia2018 import jia2018
from megabatch.recipes.jia2018_alexnet import jia2018_alexnet
from megabatch.recipes.mikami2018 import mikami2018, mikami2018_54k, mikami2018_119k
from megabatch.recipes.mlperf import mlperf
from megabatch.recipes.tiny import tiny, tiny30
from megabatch.recipes.you2018 import you2018
from megabatch.recipes.you2018_alexnet import you2018_alexnet

RECIPES: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "goyal2017": goyal2017,
    "goyal2017_resnet101": goyal2017_resnet101,
    "you2018": you2018,
    "you2018_alexnet": you2018_alexnet,
    "jia2018": jia2018,
    "jia2018_alexnet": jia2018_alexnet,
    "mikami2018": mikami2018,
    "mikami2018_54k": mikami2018_54k,
    "mikami2018_119k": mikami2018_119k,
    "mlperf": mlperf,
    "tiny": tiny,
    "tiny30": tiny30,
}
# Recipes that were published for several batches: a batch chooses the settings, not only the rate.
BY_BATCH: dict[str, Callable[[int], Config]] = {
    "mlperf": mlperf,
    "tiny": tiny,
    "tiny30": tiny30,
}


def named(name: str, epochs: float | None = None, batch: int | None = None) -> Config:
    """The recipe of that name, or the config of a run by its path (RUN/config.json), for another
    length or batch if one is given."""
    for setting, value in (("epochs", epochs), ("batch", batch)):
        if value is not None:
            check_setting(Config, setting, value)
    if name.endswith(".json"):
        return Config.read(name).resized(epochs=epochs, batch=batch)
    written = os.path.join(name, "config.json")
    if os.path.isfile(written):
        raise UserError(f"{name} is the folder of a run: name its config, {written}")
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}: {nearest(name, RECIPES)}")
    if batch is not None and name in BY_BATCH:
        return BY_BATCH[name](batch).resized(epochs=epochs)
    return RECIPES[name]().resized(epochs=epochs, batch=batch)


__all__ = [
    "RECIPES",
    "digits",
    "goyal2017",
    "goyal2017_resnet101",
    "jia2018",
    "jia2018_alexnet",
    "mikami2018",
    "mikami2018_54k",
    "mikami2018_119k",
    "mlperf",
    "named",
    "tiny",
    "tiny30",
    "you2018",
    "you2018_alexnet",
]
