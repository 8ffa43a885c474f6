"""The config as JSON: written exactly, read strictly.

A file may leave settings away (they keep their defaults); a name that is no setting, a wrong type
or a value out of bounds is refused in one sentence, whoever wrote the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import types
import typing
from typing import Any

from megabatch.config.settings import kinds_of, shown
from megabatch.errors import UserError, nearest

LARGEST = 1 << 20  # bytes; a config of ours has about two thousand
_EXACT = 2**53  # whole numbers up to here are floats without rounding


def to_json(config: Any) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False) + "\n"


def from_json(kind: Any, text: str) -> Any:
    """The dataclass that a JSON object holds."""
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"it is not JSON: {error}") from None
    except UserError:
        raise
    except ValueError:  # CPython's, of more digits than it turns into a number
        raise UserError("it has a number of thousands of digits: no setting is so large") from None
    return _built(kind, value, "")


def read_text(path: str | os.PathLike[str]) -> str:
    """A plain file of no more than LARGEST bytes; a pipe or a device would never end."""
    where = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(where, "rb") as file:
        if not stat.S_ISREG(os.fstat(where).st_mode):
            raise UserError("it is no plain file")
        found = file.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise UserError(f"it has more than {LARGEST:,} bytes")
    try:
        return found.decode()
    except UnicodeDecodeError:
        raise UserError("it is not text") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"it has {shown(name)} twice")
        found[name] = value
    return found


def _no_number(word: str) -> Any:
    raise UserError(f"{word} is no number")


def _built(kind: Any, value: Any, where: str) -> Any:
    """JSON's value in the shape the annotation asks for: objects as dataclasses, lists as tuples,
    whole numbers as floats. What does not fit is left as it is, for the check to name."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            return tuple(value)
        return tuple(
            _built(one, item, f"{where}[{index}]")
            for index, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin in (types.UnionType, typing.Union) and value is not None:
        return _built(next(one for one in inner if one is not type(None)), value, where)
    if kind is float and type(value) is int and abs(value) <= _EXACT:
        return float(value)
    return value


def _section(kind: Any, value: Any, where: str) -> Any:
    subject = where or "it"
    if not isinstance(value, dict):
        raise UserError(f"{subject} is {shown(value)}: give an object of settings")
    kinds = kinds_of(kind)
    for name in value:
        if name not in kinds:
            inside = f" in {where}" if where else ""
            raise UserError(f"there is no setting {shown(name)}{inside}: {nearest(name, kinds)}")
    prefix = f"{where}." if where else ""
    for one in dataclasses.fields(kind):
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and one.name not in value:
            raise UserError(f"{prefix}{one.name} is missing")
    return kind(
        **{name: _built(kinds[name], item, f"{prefix}{name}") for name, item in value.items()}
    )
