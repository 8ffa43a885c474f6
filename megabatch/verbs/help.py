"""Help that fits a screen: an example, then a line a flag. --help-all has the whole words, and
the flags that a recipe's help only names.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union

import tyro

from megabatch.batch import Stage
from megabatch.verbs.examples import examples

WIDE, LINES = 80, 23
"""of a screen, less one for the prompt"""
ASKED = frozenset({"-h", "--help", "--help-all"})
"""what asks for help"""

# Wider than this, and what a flag does stands below it.
_LEFT = 26
_TAKES = {int: "N", float: "NUMBER", str: "WORD", Stage: "EPOCH:BATCH[:MOMENTUM]"}


class Flag(NamedTuple):
    name: str
    takes: str
    """what follows it, in a word; nothing follows a switch"""
    says: str
    default: str
    section: str
    """what stands before the dot in its name"""
    positional: bool


def show_help(
    kind: Any, words: str, default: Any = None, usage: str = "", full: bool = False, also: str = ""
) -> None:
    """The help of `megabatch WORDS`, whose flags a dataclass has: in whole words where those fit a
    screen, or are asked for. `usage`: what follows the flags; `also`: what else there is."""
    lines = _help(kind, words, default, usage, True, also)
    if not full and len(lines) > LINES:
        lines = _help(kind, words, default, usage, False, also)
    if not full and len(lines) > LINES:
        lines = _help(kind, words, default, usage, False, also, folded=True)
    print("\n".join(lines))


def _help(
    kind: Any,
    words: str,
    default: Any,
    usage: str,
    full: bool,
    also: str,
    folded: bool = False,
) -> list[str]:
    """`folded`: a section is one line that names its flags."""
    found = [*flags_said(kind, default)]
    places = [flag.takes for flag in found if flag.positional]
    line = " ".join(["usage: megabatch", words, "[OPTIONS]", *places, *filter(None, [usage])])
    more = "" if full else "   (--help-all says more)"
    lines = [*examples(words), "", line + more * (len(line + more) <= WIDE)]
    if about := _about(kind):
        lines += ["", *textwrap.wrap(about, WIDE)]
    sections: dict[str, list[Flag]] = {}
    for flag in found:
        sections.setdefault(flag.section, []).append(flag)
    for section, flags in sections.items():
        if section and folded:
            names = ", ".join(flag.name.rpartition(".")[2] for flag in flags)
            lines.append(f"  {f'--{section}.*':19} {names}")
            continue
        lines += [*([""] if full or not section else []), *([f"{section}:"] if section else [])]
        lines += flag_lines(flags, full)
    return [*lines, *filter(None, [also])]


def flag_lines(flags: Iterable[Flag], full: bool) -> Iterator[str]:
    """A line a flag, or all that is said of it."""
    named = [(f"  {_named(flag)}", flag) for flag in flags]
    left = 2 + max((len(name) for name, _ in named if len(name) <= _LEFT), default=_LEFT)
    for name, flag in named:
        words = _in_full(flag) if full else _in_short(flag, WIDE - left)
        lines = textwrap.wrap(words, WIDE - left, break_on_hyphens=False)
        beside = len(name) <= _LEFT and lines
        yield f"{name:{left}}{lines.pop(0)}" if beside else name
        yield from (" " * left + line for line in lines)


def _named(flag: Flag) -> str:
    if flag.positional:
        return flag.takes
    if not flag.takes and flag.default:  # on, so what is typed is the other
        before, _, name = flag.name.rpartition(".")
        negated = f"{before}.no-{name}" if before else f"--no-{name.removeprefix('--')}"
        return f"{flag.name}, {negated}"
    return f"{flag.name} {flag.takes}".rstrip()


def _in_full(flag: Flag) -> str:
    known = not flag.default or f"({flag.default}:" in flag.says
    return flag.says if known else f"{flag.says} (default: {flag.default})"


def _in_short(flag: Flag, wide: int) -> str:
    """All that is said where that fits, else its first clause; words that are left out even of
    that show as dots."""
    known = not flag.default or f"({flag.default}:" in flag.says
    first, ending = re.split(r"[:;]| \(", flag.says)[0], f" ({flag.default})"
    for words in (flag.says + ending * (not known), first + ending * bool(flag.default), first):
        if len(words) <= wide:
            return words
    return textwrap.shorten(first, wide, placeholder=" ...")


# --- what a dataclass says of its flags --------------------------------------------------------


def flags_said(kind: Any, default: Any = None, section: str = "") -> Iterator[Flag]:
    """The flags that a dataclass becomes, with what its source says of each and the value that it
    has if it is left away."""
    hints = typing.get_type_hints(kind, include_extras=True)
    says = _field_docs(kind)
    for one in dataclasses.fields(kind):
        hint, notes = hints[one.name], tuple[Any, ...]()
        if typing.get_origin(hint) is Annotated:
            hint, *rest = typing.get_args(hint)
            notes = tuple(rest)
        value = getattr(default, one.name) if default is not None else _default(one)
        if dataclasses.is_dataclass(hint):
            # A section named "" has flags without a prefix.
            unnamed = any(getattr(note, "name", None) == "" for note in notes)
            inner = section if unnamed else f"{section}.{one.name}".removeprefix(".")
            yield from flags_said(hint, value, inner)
            continue
        name = f"{section}.{one.name}".removeprefix(".").replace("_", "-")
        metavar = next((note.metavar for note in notes if getattr(note, "metavar", None)), None)
        positional = tyro.conf.Positional in notes
        yield Flag(
            f"--{name}",
            metavar or _takes(hint) or ("" if hint is bool else "WORD"),
            says.get(one.name, ""),
            _shown(value),
            section,
            positional,
        )


def _default(one: Any) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return None if one.default is dataclasses.MISSING else one.default


def _field_docs(kind: Any) -> dict[str, str]:
    """The string that follows each field in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(before.target): " ".join(ast.literal_eval(after.value).split())
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def _about(kind: Any) -> str:
    """A dataclass's own docstring; without one, dataclass would make one of its fields."""
    words = " ".join((kind.__doc__ or "").split())
    return "" if words.startswith(f"{kind.__name__}(") else words


def _takes(hint: Any) -> str:
    """What a flag of this type takes, in a word."""
    inner = typing.get_args(hint)
    match typing.get_origin(hint):
        case origin if origin is Literal:
            return "|".join(inner)
        case origin if origin in (Union, types.UnionType):
            return _takes(next(one for one in inner if one is not type(None)))
        case origin if origin is tuple and inner[-1] is ...:
            return f"{_takes(inner[0])} ..."
        case origin if origin is tuple:
            return " ".join(map(_takes, inner))
    return _TAKES.get(hint, "")


def _shown(value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
