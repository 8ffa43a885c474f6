"""What each setting says of itself: its type, its bounds, and whether it may change on resume.

A section of the config is a dataclass whose fields are made by `setting`; `check_settings` holds
every value to its annotation and its bounds, whoever set it: Python, a flag or a file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from megabatch.errors import UserError, nearest

LONGEST = 4096  # characters of a text; a path is no longer
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


@dataclass(frozen=True)
class Rule:
    """The bounds of a setting's numbers, and whether it may change when a run is resumed."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    may_change: bool = False
    hint: str = ""

    def holds(self, number: float) -> bool:
        return self.least <= number <= self.most and self.above < number < self.below

    def __str__(self) -> str:
        low = f"above {self.above:g}" if self.above > -math.inf else f"at least {self.least:g}"
        high = f"below {self.below:g}" if self.below < math.inf else f"at most {self.most:g}"
        return f"{low} and {high}"


def setting(
    default: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    may_change: bool = False,
    hint: str = "",
) -> Any:
    """A field of a section. `may_change`: a run that is resumed with another value is still the
    same run, because the value does not shape its result."""
    rule = Rule(least, most, above, below, may_change, hint)
    return field(default=default, metadata={"rule": rule})


def rule_of(one: dataclasses.Field[Any]) -> Rule:
    found: Rule = one.metadata.get("rule", Rule())
    return found


def need(holds: bool, sentence: str) -> None:
    """Refuse what does not hold, in one sentence."""
    if not holds:
        raise UserError(sentence)


@functools.cache
def kinds_of(kind: Any) -> dict[str, Any]:
    """The annotations of a section's fields, as types."""
    return typing.get_type_hints(kind)


def settings_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Rule, Any]]:
    """Name, rule and value of every setting, those of sections inside it included."""
    for one in dataclasses.fields(section):
        value, name = getattr(section, one.name), f"{prefix}{one.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from settings_of(value, f"{name}.")
        else:
            yield name, rule_of(one), value


def check_settings(section: Any, prefix: str = "") -> None:
    """Refuse a value of another type than its field is annotated with, or out of its bounds."""
    for one in dataclasses.fields(section):
        check_value(
            getattr(section, one.name),
            kinds_of(section.__class__)[one.name],
            rule_of(one),
            f"{prefix}{one.name}",
        )


def check_setting(section: type, name: str, value: Any) -> None:
    """Refuse a value that the named setting of a section could not take."""
    one = next(one for one in dataclasses.fields(section) if one.name == name)
    check_value(value, kinds_of(section)[name], rule_of(one), name)


def check_value(value: Any, kind: Any, rule: Rule, name: str) -> None:
    wanted = _wanted(value, kind)
    if wanted is not None:
        raise UserError(f"{name} is {shown(value)}: {wanted}")
    for number in _numbers(value):
        if not rule.holds(number):
            hint = f": {rule.hint}" if rule.hint else ""
            raise UserError(f"{name} is {shown(value)}; it must be {rule}{hint}")


def shown(value: Any) -> str:
    """A value in a sentence: short, whatever it is, and as a person would write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(shown, value)) or "empty"
    if dataclasses.is_dataclass(value):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else " ".join(_SHOWN.repr(value).split())


def _wanted(value: Any, kind: Any) -> str | None:
    """None where the value is what the annotation says, else what it should be, in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        # True == 1 and 1.0 == 1: the type counts.
        right = any(type(value) is type(option) and value == option for option in inner)
        return None if right else nearest(str(value), map(str, inner))
    if origin in (types.UnionType, typing.Union):
        found = [_wanted(value, option) for option in inner]
        return None if None in found else " or ".join(str(words) for words in found)
    if origin is tuple:
        return _wanted_tuple(value, inner)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return None if isinstance(value, kind) else f"give a {kind.__name__}"
    right, words = _PLAIN[kind](value)
    if not right and isinstance(value, numbers.Number) and not isinstance(value, int | float):
        words += " of Python's own, int(...) or float(...)"  # numpy's, say, which JSON has not
    return None if right else words


def _wanted_tuple(value: Any, inner: tuple[Any, ...]) -> str | None:
    several = inner[-1] is Ellipsis
    count = "any number of" if several else str(len(inner))
    if not isinstance(value, tuple) or not (several or len(value) == len(inner)):
        return f"give {count} values" + (", as a tuple" if isinstance(value, list) else "")
    kinds = inner[:1] * len(value) if several else inner
    wrong = (_wanted(item, one) for item, one in zip(value, kinds, strict=True))
    return next((words for words in wrong if words is not None), None)


def _is_number(value: Any) -> bool:
    integer = isinstance(value, int) and not isinstance(value, bool)
    return integer or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: Any) -> bool:
    """Text that a file's name could be: what a system call or a terminal would trip over is out."""
    if not isinstance(value, str) or len(value) > LONGEST or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


_PLAIN: dict[Any, typing.Callable[[Any], tuple[bool, str]]] = {
    bool: lambda value: (isinstance(value, bool), "give true or false"),
    int: lambda value: (
        isinstance(value, int) and not isinstance(value, bool),
        "give a whole number",
    ),
    float: lambda value: (_is_number(value), "give a finite number"),
    str: lambda value: (_is_text(value), f"give a text of up to {LONGEST} characters"),
    types.NoneType: lambda value: (value is None, "none"),
}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
