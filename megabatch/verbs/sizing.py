"""The recipe that a command line names, at the length and batch that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megabatch import recipes
from megabatch.config import Config, Data
from megabatch.errors import UserError
from megabatch.verbs.help import ASKED
from megabatch.verbs.parsing import parse_some


@dataclass(frozen=True)
class WhichImages:
    path: str = ""


@dataclass(frozen=True)
class Size:
    """The settings that change a whole recipe, and the images that a batch is a share of."""

    epochs: float | None = None
    batch: int | None = None
    keep_epochs: bool = False
    data: WhichImages = field(default_factory=WhichImages)


def recipe_named(verb: str, arguments: list[str], also: str) -> str | None:
    """What a line names first: a recipe, or what it says `also`; None: the line asks for help."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    if ASKED & {*arguments}:
        return None
    if late := next((word for word in arguments if word in recipes.RECIPES), None):
        raise UserError(f"{late} comes first, flags follow: megabatch {verb} {late} ...")
    raise UserError(f"{verb} needs a recipe: one of {', '.join(recipes.RECIPES)}, {also}")


def sized(name: str, words: str, arguments: list[str], batch: int | None = None) -> Config:
    """The recipe for what `megabatch WORDS ...` gives, or for another batch."""
    size = parse_some(Size, words, arguments)
    follows = name in recipes.BY_BATCH
    check_keeping(name, size.keep_epochs)
    batch = size.batch if batch is None else batch
    images = _images_in(size.data.path) if follows else None
    config = recipes.named(name, size.epochs, batch, images, size.keep_epochs)
    if size.data.path and not config.data.path:
        # The recipe's share is for its own few images; any others have what packing has.
        config = replace(config, data=replace(config.data, val_share=Data.val_share))
    return config


def check_keeping(name: str, keep_epochs: bool) -> None:
    """Refuse to keep the length of a recipe that keeps it anyway."""
    if keep_epochs and name not in recipes.BY_BATCH:
        raise UserError(
            f"{name} keeps its epochs at any batch: --keep-epochs is for recipes whose length "
            f"follows the batch, {', '.join(recipes.BY_BATCH)}"
        )


def doubts(name: str, config: Config) -> Iterator[str]:
    """What is not known of a config of a recipe that follows its batch, a sentence each."""
    if name not in recipes.BY_BATCH:
        return
    path = config.data.path
    if path and not path.endswith(".arrow"):
        yield (
            f"a batch is taken as a share of {recipes.BY_BATCH[name].images:,} images: those of "
            f"{path} are not counted before they are read, those of a pack are (megabatch pack)"
        )
    yield from recipes.doubts(name, config, _images_in(path))


def _images_in(path: str) -> int | None:
    """How many training images a pack has; None for anything else, which would have to be read."""
    if not path.endswith(".arrow"):
        return None
    from megabatch.data.packs.reading import Pack, PackError

    try:
        first, last = Pack(path).about.splits.get("train", (0, 0))
    except PackError:  # whoever opens it to train says why
        return None
    return last - first or None
