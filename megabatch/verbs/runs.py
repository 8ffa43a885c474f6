"""megabatch runs [FOLDER]: what is in runs/, newest first."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megabatch.errors import DONE, UserError, printable
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import say

_DEEPEST = 3


@dataclass(frozen=True)
class RunsFlags:
    """What lies in a folder of runs, newest first: accuracy, time and state of each."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = "runs"
    """where to look, folders below it too"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(RunsFlags, "runs", arguments)
    from megabatch.runs.record import began_at, glance

    top = Path(flags.folder)
    if not top.is_dir():
        raise UserError(f"there is no folder {top}: name one that holds runs, or train one first")
    now = time.time()
    records = [glance(path) for path in run_folders(top)]
    records.sort(key=lambda record: began_at(record) or record.written, reverse=True)
    rows = [run_numbers(record, now) for record in records]
    if rows:
        _show(rows)
    else:
        say(f"{top} holds no runs")
    if flags.json:
        print(json.dumps({"folder": str(top), "runs": rows}), flush=True)
    return DONE


def run_folders(top: Path, depth: int = 0) -> Iterator[Path]:
    """The runs at a folder and below; links to folders are not followed."""
    from megabatch.runs.record import is_run

    if is_run(top):
        yield top
    elif depth < _DEEPEST:
        try:
            with os.scandir(top) as entries:
                inner = sorted(
                    entry.name for entry in entries if entry.is_dir(follow_symlinks=False)
                )
        except (PermissionError, FileNotFoundError):  # somebody else's, or removed meanwhile
            return
        for name in inner:
            yield from run_folders(top / name, depth + 1)


def run_numbers(record: Any, now: float) -> dict[str, Any]:
    """A run in a few numbers; None where one is not known."""
    from megabatch.runs.record import images_per_second, number, seconds_of

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "run": str(record.path),
        "recipe": str(record.config.get("name", ""))[:80],
        "began": str(record.environment.get("began", ""))[:40],
        "state": record.state(now),
        "top1": known(record.result("top1")),
        "epoch": known(record.epoch),
        "epochs": known(number(record.config.get("epochs"))),
        "steps": known(record.steps_done),
        "batch": known(number(record.config.get("batch"))),
        "seconds": known(seconds_of(record)),
        "images_per_second": known(images_per_second(record)),
        "faults": record.faults,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    """A line a run; at a terminal without the columns that it has no room for. Names stay whole:
    one that would take half of a terminal stands above its line. What a run's files lack stands
    behind its numbers, at a terminal below them."""
    from rich.console import Console
    from rich.text import Text

    from megabatch.report.columns import aligned

    console = Console(soft_wrap=True, highlight=False)
    wide = console.width if console.is_terminal else sys.maxsize
    spare, left = ("images/s", "recipe", "batch", "steps", "time"), ("run", "recipe", "state")
    table = [_cells(row) for row in rows]
    above = [row["run"] if len(row["run"]) > wide // 2 else "" for row in table]
    for row, name in zip(table, above, strict=True):
        row["run"] = "" if name else row["run"]
    heads, *body = aligned(table, spare, left, wide)
    state = [head.strip() for head in heads].index("state")
    console.print("  ".join(heads))
    for cells, name, row in zip(body, above, rows, strict=True):
        if name:
            console.print(Text(name))
        words = [Text(cell) for cell in cells]
        words[state].stylize(_STYLES.get(cells[state].strip(), "yellow"))
        faults = Text(printable("; ".join(row["faults"])), "yellow")
        if faults and not console.is_terminal:
            words.append(faults)
        console.print(Text("  ").join(words))
        if faults and console.is_terminal:
            console.print(Text("    ") + faults, soft_wrap=False)


_STYLES = {"finished": "green", "target": "green", "running": "cyan", "failed": "red"}


def _cells(row: dict[str, Any]) -> dict[str, str]:
    from megabatch.report.numbers import UNKNOWN, count, duration, percent

    numbers = {n: math.nan if row[n] is None else row[n] for n in row if n != "faults"}
    done, total = numbers["epoch"], numbers["epochs"]
    return {
        "run": printable(row["run"]),
        "recipe": printable(row["recipe"]),
        "state": printable(row["state"]),
        "top-1": percent(numbers["top1"]),
        "epochs": f"{done:.3g}/{total:.3g}" if math.isfinite(done + total) else UNKNOWN,
        "steps": count(numbers["steps"]),
        "batch": count(numbers["batch"]),
        "time": duration(numbers["seconds"]),
        "images/s": count(numbers["images_per_second"]),
    }
