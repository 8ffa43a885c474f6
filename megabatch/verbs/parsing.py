"""Flags of dataclasses, by tyro; a mistake in them becomes one sentence."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

from megabatch.batch import Stage
from megabatch.errors import UserError

Flags = TypeVar("Flags")


def parse(
    kind: type[Flags], words: str, arguments: list[str], default: Flags | None = None
) -> Flags:
    """The flags of `megabatch WORDS ...` as an instance of a dataclass."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_stage_rule)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=f"megabatch {words}",
                args=arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                registry=registry,
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise UserError(_sentence(said.getvalue(), f"megabatch {words} --help")) from None


def _sentence(box: str, way_out: str) -> str:
    """The first part of tyro's framed message as one line, with the nearest flag if it has one."""
    parts = [""]
    # The frame is of lines, or of ASCII where the terminal has no lines.
    for line in (line.strip(" │╭╮╰╯|+") for line in box.splitlines()[1:]):
        if re.fullmatch("[─-]{5,}", line):
            parts.append("")
        else:
            parts[-1] += f" {line}"
    parts = [part for part in parts if part.strip()]
    sentence = parts[0].strip().rstrip(".")
    near = re.search(r"(?:similar to \S+|Perhaps you meant:)\s+(--[\w.-]+)", " ".join(parts[1:]))
    hint = f"did you mean {near[1]}? " if near else ""
    return f"{sentence}: {hint}{way_out} lists what there is"


def _stage_rule(info: Any) -> Any:
    """A stage of the batch is written EPOCH:BATCH or EPOCH:BATCH:MOMENTUM."""
    if info.type is not Stage:
        return None

    def read(words: list[str]) -> Stage:
        epoch, batch, *momentum = words[0].split(":")
        return Stage(float(epoch), int(batch), float(momentum[0]) if momentum else None)

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
