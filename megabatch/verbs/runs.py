"""megabatch runs [FOLDER]: what is in runs/, newest first."""

from __future__ import annotations

import json
import math
import os
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
    """the last line on standard output is the result as one JSON object"""


def run(arguments: list[str]) -> int:
    flags = parse(RunsFlags, "runs", arguments)
    from megabatch.runs.record import began_at, glance

    top = Path(flags.folder)
    if not top.is_dir():
        raise UserError(f"there is no folder {top}: name one that holds runs, or train one first")
    now = time.time()
    records = [glance(path) for path in run_folders(top)]
    records.sort(key=lambda record: began_at(record) or record.written, reverse=True)
    rows = [describe(record, now) for record in records]
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
        except PermissionError:
            return
        for name in inner:
            yield from run_folders(top / name, depth + 1)


def describe(record: Any, now: float) -> dict[str, Any]:
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
        "batch": known(number(record.config.get("batch"))),
        "seconds": known(seconds_of(record)),
        "images_per_second": known(images_per_second(record)),
        "faults": record.faults,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megabatch.report.numbers import UNKNOWN, count, duration, percent

    styles = {"finished": "green", "target": "green", "running": "cyan", "failed": "red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold")
    for head in ("recipe", "state"):
        table.add_column(head, no_wrap=True)
    for head in ("top-1", "epochs", "batch", "time", "images/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        far, whole = (math.nan if row[n] is None else row[n] for n in ("epoch", "epochs"))
        numbers = {n: math.nan if row[n] is None else row[n] for n in row if n != "faults"}
        table.add_row(
            Text(printable(row["run"])),
            Text(printable(row["recipe"])),
            Text(printable(row["state"]), styles.get(row["state"], "yellow")),
            percent(numbers["top1"]),
            f"{far:.3g}/{whole:.3g}" if math.isfinite(far + whole) else UNKNOWN,
            count(numbers["batch"]),
            duration(numbers["seconds"]),
            count(numbers["images_per_second"]),
        )
    console = Console()
    # In a pipe every row is one line, however long its name.
    console.print(table) if console.is_terminal else Console(width=400).print(table)
