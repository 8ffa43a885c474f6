"""Flags of dataclasses, by tyro; a mistake in them becomes one sentence.

tyro's public interface prints its errors and exits. Its hook for parse errors hands them over as
values instead, but is marked unstable: it is used here alone, and pyproject.toml bounds tyro.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from tyro import _errors as mistakes

from megabatch.batch import Stage
from megabatch.errors import UserError, nearest
from megabatch.verbs.examples import show_examples

Flags = TypeVar("Flags")
_WIDE = 80


def parse(
    kind: type[Flags], words: str, arguments: list[str], default: Flags | None = None
) -> Flags:
    """The flags of `megabatch WORDS ...` as an instance of a dataclass; help begins with an
    example."""
    if "-h" in arguments or "--help" in arguments:
        show_examples(words.split()[0])
        with _fitted():
            tyro.cli(kind, prog=f"megabatch {words}", args=["--help"], **_how(default))
    with mistakes.on_parse_error(functools.partial(_refuse, kind)):
        flags: Flags = tyro.cli(kind, prog=f"megabatch {words}", args=arguments, **_how(default))
        return flags


@contextlib.contextmanager
def _fitted() -> Iterator[None]:
    """What is printed inside, its long lines broken: tyro breaks those in its boxes alone."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            if len(line) > _WIDE and line.startswith("usage:"):
                line = re.sub(r" \[--.*\]", " [OPTIONS]", line)
            print(textwrap.fill(line, _WIDE) if len(line) > _WIDE else line)


def parse_some(kind: type[Flags], words: str, arguments: list[str]) -> Flags:
    """Those of the flags that a dataclass has; the others are somebody else's to read."""
    with mistakes.on_parse_error(functools.partial(_refuse, kind)):
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


def flags_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The flags that a dataclass becomes; both of a boolean's."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        hint, about = hints[one.name], None
        if typing.get_origin(hint) is Annotated:
            hint, about = typing.get_args(hint)[:2]
        if dataclasses.is_dataclass(hint):
            # A section named "" has flags without a prefix.
            unnamed = getattr(about, "name", None) == ""
            yield from flags_of(hint, prefix if unnamed else f"{prefix}{one.name}.")
        elif about is not tyro.conf.Positional:
            name = one.name.replace("_", "-")
            yield f"--{prefix}{name}"
            if hint is bool:
                yield f"--{prefix}no-{name}"


def _refuse(kind: type, mistake: mistakes.ParseErrorEvent) -> NoReturn:
    """What tyro found wrong, as one sentence."""
    listed = f"{mistake.prog} --help lists what there is"
    match mistake:
        case mistakes.UnrecognizedArgs(tokens=tokens):
            word = next((token for token in tokens if token.startswith("-")), tokens[0])
            close = difflib.get_close_matches(word.partition("=")[0], flags_of(kind), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"{word} is no flag of {mistake.prog}: {hint}{listed}")
        case mistakes.InvalidChoice(argument=argument, value=value, choices=choices):
            raise UserError(f"{argument.display_name()} is {value!r}: {nearest(value, choices)}")
        case mistakes.BadValue(argument=argument):
            raise UserError(f"{_usage(argument)}: its value is missing; {listed}")
        case mistakes.MissingArgs(missing_arguments=missing):
            words = ", ".join(one.arg.display_name().upper() for one in missing)
            raise UserError(f"{mistake.prog} needs {words}: {listed}")
        case mistakes.InstantiationFailure(argument=None, message=message):
            raise UserError(message)  # a dataclass that refuses what it is given
        case mistakes.InstantiationFailure(argument=argument):
            raise UserError(f"{_usage(argument)}: what was given is not that; {listed}")
    raise UserError(f"{mistake.prog} does not understand its flags: {listed}")


def _usage(argument: Any) -> str:
    metavar = argument.lowered.metavar.removeprefix("{None}|")
    return f"{argument.display_name()} takes {metavar}"


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

    def write(stage: Stage) -> list[str]:
        momentum = "" if stage.momentum is None else f":{stage.momentum:g}"
        return [f"{stage.epoch:g}:{stage.batch}{momentum}"]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="EPOCH:BATCH[:MOMENTUM]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, Stage),
        str_from_instance=write,
    )
