"""Flags of dataclasses, by tyro; a mistake in them becomes one sentence.

tyro's public interface prints its errors and exits. Its hook for parse errors hands them over as
values instead, but is marked unstable: it is used here alone, and pyproject.toml bounds tyro.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from tyro import _errors as mistakes

from megabatch.batch import Stage
from megabatch.errors import DONE, UserError, nearest
from megabatch.verbs.help import ASKED, show_help

Flags = TypeVar("Flags")


def parse(
    kind: type[Flags],
    words: str,
    arguments: list[str],
    default: Flags | None = None,
    usage: str = "",
) -> Flags:
    """The flags of `megabatch WORDS ...` as an instance of a dataclass; help begins with an
    example. `usage`: what follows the flags on the line, where they are not all of it."""
    if asked := ASKED & {*arguments}:
        show_help(kind, words, default, usage, full="--help-all" in asked)
        raise SystemExit(DONE)
    _refuse_empty(words, arguments, default)
    with mistakes.on_parse_error(functools.partial(_refuse, kind, arguments)):
        flags: Flags = tyro.cli(kind, prog=f"megabatch {words}", args=arguments, **_how(default))
        return flags


def parse_some(kind: type[Flags], words: str, arguments: list[str]) -> Flags:
    """Those of the flags that a dataclass has; the others are somebody else's to read."""
    with mistakes.on_parse_error(functools.partial(_refuse, kind, arguments)):
        found: tuple[Flags, list[str]] = tyro.cli(
            kind,
            prog=f"megabatch {words}",
            args=arguments,
            return_unknown_args=True,
            add_help=False,
            **_how(None),
        )
        return found[0]


def _how(default: Any) -> dict[str, Any]:
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_stage_rule)
    return {"default": tyro.MISSING_NONPROP if default is None else default, "registry": registry}


def flags_of(kind: Any) -> Iterator[str]:
    """The flags that a dataclass becomes; both of a boolean's."""
    return (flag for flag, _ in _flags(kind))


def _flags(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each flag with its type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        hint, about = hints[one.name], None
        if typing.get_origin(hint) is Annotated:
            hint, about = typing.get_args(hint)[:2]
        if dataclasses.is_dataclass(hint):
            # A section named "" has flags without a prefix.
            unnamed = getattr(about, "name", None) == ""
            yield from _flags(hint, prefix if unnamed else f"{prefix}{one.name}.")
        elif about is not tyro.conf.Positional:
            name = one.name.replace("_", "-")
            yield f"--{prefix}{name}", hint
            if hint is bool:
                yield f"--{prefix}no-{name}", hint


# --- what was typed wrong ----------------------------------------------------------------------


def _refuse_empty(words: str, typed: list[str], default: Any) -> None:
    """An empty word that changes nothing is a variable of the shell that is not set."""
    for before, word in itertools.pairwise(["", *typed]):
        if word == "" or re.fullmatch(r"--[\w.-]+=", word):
            flag = word.removesuffix("=") or before
            if not flag.startswith("--"):
                raise UserError(f"{words} was given an empty word: is a variable not set?")
            if not _already(default, flag):
                raise UserError(f"{flag} is empty: give it a value, or leave the flag away")


def _already(default: Any, flag: str) -> Any:
    """What a flag is, where it is left away; None where nobody says."""
    names = flag.removeprefix("--").replace("-", "_").split(".")
    holders = [default, *(vars(default).values() if default else ())]  # and unnamed sections
    for holder in holders:
        for name in names:
            holder = getattr(holder, name, None)
        if holder is not None:
            return holder
    return None


def _refuse(kind: type, typed: list[str], mistake: mistakes.ParseErrorEvent) -> NoReturn:
    """What tyro found wrong, as one sentence."""
    listed = f"{mistake.prog} --help lists what there is"
    match mistake:
        case mistakes.UnrecognizedArgs(tokens=tokens):
            word = next((token for token in tokens if token.startswith("-")), None)
            if word is None and (sentence := _too_many(kind, typed, tokens[0])) is not None:
                raise UserError(sentence)
            if word is None:
                raise UserError(f"{mistake.prog} has no place for {tokens[0]}: {listed}")
            # Without the dashes, which all of them share.
            wanted = word.partition("=")[0].lstrip("-")
            known = {flag.removeprefix("--"): flag for flag in flags_of(kind)}
            close = difflib.get_close_matches(wanted, known, n=1)
            hint = f"did you mean {known[close[0]]}? " if close else ""
            raise UserError(f"{word} is no flag of {mistake.prog}: {hint}{listed}")
        case mistakes.InvalidChoice(argument=argument, value=value, choices=choices):
            raise UserError(f"{argument.display_name()} is {value}: {nearest(value, choices)}")
        case mistakes.MissingArgs(missing_arguments=missing):
            names = (one.arg.display_name() for one in missing)
            words = ", ".join(n if n.startswith("--") else n.upper() for n in names)
            raise UserError(f"{mistake.prog.removeprefix('megabatch ')} needs {words}: {listed}")
        case mistakes.InstantiationFailure(argument=None, message=message):
            raise UserError(message)  # a dataclass that refuses what it is given
        case mistakes.InstantiationFailure() | mistakes.BadValue():
            wrong: Any = mistake.argument
            given = textwrap.shorten(" ".join(_values(wrong.display_name(), typed)), 60)
            wrong_value = f"{wrong.display_name()} {f'is {given}' if given else 'stands alone'}"
            raise UserError(f"{wrong_value}: it takes {_in_words(wrong.lowered.metavar)}")
    raise UserError(f"{mistake.prog} does not understand its flags: {listed}")


def _too_many(kind: type, typed: list[str], word: str) -> str | None:
    """The way out for a value too many, where it is clear whose it is."""
    joined = next((one for one in typed if one.endswith(f"={word}")), None)
    before = typed[: typed.index(word)] if word in typed else [joined or ""]
    flag = next((one for one in reversed(before) if one.startswith("--")), "").partition("=")[0]
    flag = flag.replace("_", "-")
    hint = dict(_flags(kind)).get(flag)
    if hint is None:
        return None
    if hint is bool:
        return f"{flag} takes no value: leave {word} away"
    values = [one for one in (*_values(flag, before), word) if one]
    if hint in (str, str | None) and all(re.fullmatch(r"[\d.,]+", one) for one in values):
        numbers = ",".join(one.strip(",") for one in values)
        return f"{flag} takes one word, its numbers with commas between: {flag} {numbers}"
    return f"{flag} takes one value: leave {word} away"


def _values(flag: str, typed: list[str]) -> list[str]:
    """The words that stand behind a flag."""
    for at, word in enumerate(typed):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            after = itertools.takewhile(lambda one: not one.startswith("--"), typed[at + 1 :])
            return [value] if equals else [*after]
    return []


_KINDS = {"INT": "whole number", "FLOAT": "number", "STR": "word"}


def _in_words(metavar: str) -> str:
    """What a flag takes, as a person would say it."""
    wanted = metavar.removeprefix("{None}|").strip(
        "{}"
    )  # nobody types None: it is the flag left away
    if again := re.fullmatch(r"\[(.+) \[\1 \.\.\.\]\]", wanted):
        one = _KINDS.get(again[1])
        return f"{f'{one}s' if one else f'{again[1]}, as many as you like'}, with spaces between"
    words = wanted.split()
    if len(words) > 1 and len({*words}) == 1 and words[0] in _KINDS:
        return f"{len(words)} {_KINDS[words[0]]}s with spaces between"
    return f"a {_KINDS[wanted]}" if wanted in _KINDS else wanted


def _stage_rule(info: Any) -> Any:
    """A stage of the batch is written EPOCH:BATCH or EPOCH:BATCH:MOMENTUM."""
    if info.type is not Stage:
        return None

    def read(words: list[str]) -> Stage:
        match words[0].split(":"):
            case [epoch, batch]:
                return Stage(float(epoch), int(batch))
            case [epoch, batch, momentum]:
                return Stage(float(epoch), int(batch), float(momentum))
        raise ValueError("a stage is EPOCH:BATCH or EPOCH:BATCH:MOMENTUM")

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="EPOCH:BATCH[:MOMENTUM]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, Stage),
        str_from_instance=lambda stage: [str(stage)],
    )
