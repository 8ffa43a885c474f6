"""Recipes: each a function that returns a Config, its docstring the command and what to expect of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megabatch.config import Config, UserError
from megabatch.recipes.digits import digits

RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__: recipe for recipe in (digits,)}


def named(name: str) -> Config:
    """The recipe of that name."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]}?" if close else "the recipes are " + ", ".join(RECIPES)
        raise UserError(f"there is no recipe {name!r}: {hint}")
    return RECIPES[name]()


__all__ = ["RECIPES", "digits", "named"]
