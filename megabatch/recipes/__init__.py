"""Recipes: each a function that returns a Config, its docstring the command and what to expect of
it."""

from __future__ import annotations

from collections.abc import Callable

from megabatch.config import Config, UserError, nearest
from megabatch.recipes.digits import digits

RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__: recipe for recipe in (digits,)}


def named(name: str) -> Config:
    """The recipe of that name."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}: {nearest(name, RECIPES)}")
    return RECIPES[name]()


__all__ = ["RECIPES", "digits", "named"]
