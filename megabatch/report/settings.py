"""What runs were given: numbers derived from their configs, settings, environments; of several runs
what differs first.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from megabatch.config import Config
from megabatch.report.look import called, table, text
from megabatch.report.named import Named
from megabatch.report.numbers import UNKNOWN
from megabatch.runs.record import Record, number

_MOST_OPEN = 20
"""rows of a single run's table that are shown at once"""
_LONGEST = 2000
"""characters of a value, as a command may have"""
_MOST_STEPS = 5_000_000
"""a config that would take more is not walked through"""


def derived_numbers(runs: Sequence[Named]) -> str:
    """The table that a run began with: with its formulas, or what differs between several."""
    if len(runs) == 1:
        rows = [
            (text(name), f"<b>{text(value)}</b>", f'<span class="soft">{text(how)}</span>')
            for name, value, how in derived(runs[0].record)
        ]
        return table(("", "", ""), rows, words=3) if rows else ""
    tables = {run.at: {name: value for name, value, _ in derived(run.record)} for run in runs}
    return _compared(runs, lambda run: tables[run.at], "", "Numbers that are the same")


def derived(record: Record) -> list[tuple[str, str, str]]:
    """What follows from a run's config; nothing where it is not a config of this version."""
    images = record.images
    world = number(record.summary.get("world", record.environment.get("world")))
    if not images or record.config_fault is not None:
        return []
    try:
        config = Config.from_json(json.dumps(record.config)).check()
        least = min(stage.batch for stage in config.all_stages)
        if config.epochs * images / least > _MOST_STEPS:
            raise ValueError("too many steps to count")
        rows = config.derived(round(images), int(world) if 1 <= world <= 1e6 else 1)
    except Exception as error:  # what another version wrote, or nobody, raises nearly anything
        reason = (str(error) or repr(error)).splitlines()[0][:200]
        record.faults.append(f"no derived numbers: {reason}")
        return []
    unknown = () if world >= 1 else ("world", "micro-batches a worker")
    return [row for row in rows if row[0] not in unknown]


def dotted(value: Any, name: str = "", depth: int = 0) -> dict[str, str]:
    """A config as names with dots and words."""
    if isinstance(value, dict) and depth < 4 and (value or not name):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= dotted(item, f"{name}.{key}" if name else str(key), depth + 1)
        return found
    words = _words(value)
    return {name: words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."}


def _words(value: Any) -> str:
    """A value of a config: words as they are, lists of records as a person would say them."""
    if value is None:  # shown as a dash
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "; ".join(
            ", ".join(f"{name} {_words(part)}" for name, part in item.items() if part is not None)
            for item in value
        )
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    # 6.0 and 6 are one setting, and 1.4000000000000001 is 1.4 to a reader.
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def settings(runs: Sequence[Named]) -> str:
    def words(run: Named) -> dict[str, str]:
        found = dotted(run.record.config)
        if found.get("optimizer.name") == "muon":  # whatever the config has, as head_adapts says
            found["optimizer.adapt_head"] = "false"
        return found

    return _compared(runs, words, "", "Settings that are the same")


def environment_table(runs: Sequence[Named]) -> str:
    def words(run: Named) -> dict[str, str]:
        found = dict(run.record.environment)
        command = found.get("command")
        if isinstance(command, list):
            found["command"] = shlex.join(str(word) for word in command)
        found.pop("process", None)  # for machines
        return {"folder": str(run.record.path), **dotted(found)}

    return _compared(runs, words, "", "What is the same")


def _compared(
    runs: Sequence[Named], table_of: Callable[[Named], dict[str, str]], head: str, rest: str
) -> str:
    """What differs between runs in a table, the rest behind a word to click."""
    tables = [table_of(run) for run in runs]
    if not any(tables):
        return ""
    every = list(dict.fromkeys(name for found in tables for name in found))
    differs = [name for name in every if len({found.get(name) for found in tables}) > 1]
    heads = (head, *(called(run.at, run.name) for run in runs))

    def rows(chosen: Sequence[str]) -> list[tuple[str, ...]]:
        return [(text(name), *(_code(found.get(name, "")) for found in tables)) for name in chosen]

    if len(runs) == 1:
        shown = table(("", ""), rows(every), words=2)
        few = len(every) <= _MOST_OPEN
        return shown if few else f"<details><summary>All of them</summary>{shown}</details>"
    shown = '<p class="note">No differences.</p>'
    if differs:
        shown = table(heads, rows(differs), words=len(heads))
    same = [name for name in every if name not in set(differs)]
    if not same:
        return shown
    hidden = table(("", "all runs"), [row[:2] for row in rows(same)], words=2)
    return f"{shown}<details><summary>{rest}</summary>{hidden}</details>"


def _code(words: str) -> str:
    """Words that are broken between each other, not inside."""
    parts = "".join(f"<span>{text(word)} </span>" for word in words.split())
    return f"<code>{parts or UNKNOWN}</code>"
