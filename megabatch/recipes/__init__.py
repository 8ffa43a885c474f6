"""Recipes: each a function that returns a Config, its docstring the command and what to expect of
it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megabatch.config import Config, check_setting
from megabatch.errors import UserError, nearest
from megabatch.recipes import imagenet
from megabatch.recipes.by_batch import (
    cut_short,
    few_in_a_span,
    in_doubt,
    proportional_batch,
    row_at,
)
from megabatch.recipes.digits import digits
from megabatch.recipes.goyal2017 import goyal2017, goyal2017_resnet101
from megabatch.recipes.jia2018 import jia2018
from megabatch.recipes.jia2018_alexnet import jia2018_alexnet
from megabatch.recipes.mikami2018 import mikami2018, mikami2018_54k, mikami2018_119k
from megabatch.recipes.mlperf import ROWS, mlperf
from megabatch.recipes.tiny import IMAGES, LONG, SHORT, tiny, tiny30
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


class ByBatch(NamedTuple):
    """A recipe with verified rows: a batch chooses its settings, not only the rate."""

    recipe: Callable[..., Config]
    rows: Sequence[Any]
    images: int
    """that the rows' batches are shares of"""


BY_BATCH = {
    "mlperf": ByBatch(mlperf, ROWS, imagenet.IMAGES),
    "tiny": ByBatch(tiny, LONG, IMAGES),
    "tiny30": ByBatch(tiny30, SHORT, IMAGES),
}


def named(
    name: str,
    epochs: float | None = None,
    batch: int | None = None,
    images: int | None = None,
    keep_epochs: bool = False,
) -> Config:
    """The recipe of that name, or the config of a run by its path (RUN/config.json), for another
    length or batch if one is given.

    A recipe with rows follows the batch in all its settings, as a share of so many images (None:
    of its own data set); its epochs too, unless they are to be kept.
    """
    for setting, value in (("epochs", epochs), ("batch", batch)):
        if value is not None:
            check_setting(Config, setting, value)
    if name.endswith(".json"):
        return Config.read(name).resized(epochs=epochs, batch=batch)
    written = os.path.join(name, "config.json")
    if os.path.isfile(written):
        raise UserError(f"{name} is the folder of a run: name its config, {written}")
    if os.path.isdir(name) and name not in RECIPES:
        raise UserError(f"{name} is a folder, not a recipe: name the config.json of a run")
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}: {nearest(name, RECIPES)}")
    recipe = RECIPES[name]()
    if name not in BY_BATCH:
        return recipe.resized(epochs=epochs, batch=batch)
    if keep_epochs and epochs is None:
        epochs = recipe.epochs
    # Its own batch too is another share of other images.
    asked = recipe.batch if batch is None else batch
    return BY_BATCH[name].recipe(asked, images).resized(epochs=epochs)


def doubts(name: str, config: Config, images: int | None = None) -> list[str]:
    """What the rows of a recipe say against a config of its making, a sentence each: a batch that
    was never verified, or cannot have its spans, fewer epochs than it needs."""
    if name not in BY_BATCH:
        return []
    rows = BY_BATCH[name].rows
    batch = proportional_batch(config.batch, images, BY_BATCH[name].images)
    row = row_at(rows, batch)
    sentences = (
        in_doubt(rows, batch, config.batch),
        few_in_a_span(config, getattr(row, "span", RECIPES[name]().span)),
        cut_short(config.epochs, row.epochs, config.batch),
    )
    return [sentence for sentence in sentences if sentence is not None]


__all__ = [
    "RECIPES",
    "digits",
    "doubts",
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
