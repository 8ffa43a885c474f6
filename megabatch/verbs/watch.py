"""megabatch watch RUN: follow a run that was started elsewhere, until it ends."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import tyro

from megabatch.errors import DONE, FAILED, STOPPED, UserError, printable
from megabatch.report.numbers import count, duration, percent, short
from megabatch.runs.begun import check_run, runs_in
from megabatch.runs.record import Record, Tail, glance_files, is_run, number, recent_speed
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import say, say_result

_LOOK_SECONDS = 0.5
_FROM_FILES = ("config", "environment", "summary", "diagnosis", "faults", "written", "resumed")
"""of a record, what is not read line by line"""
_WIDE = 120
"""columns that a whole line and its bar need"""


@dataclass(frozen=True)
class WatchFlags:
    """Follow a run that was started elsewhere: a bar on a terminal, otherwise a line every so
    often. It ends when the run ends, with the run's exit status.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run"""
    wait: bool = False
    """for a run that is not there yet, as long as --patience says"""
    every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 10.0
    """from line to line, where there is no terminal"""
    patience: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """a run without a word for so long (and for ten of its steps) is given up"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


class Watched:
    """What is known of the run so far."""

    def __init__(self, path: Path, patience: float) -> None:
        self.path, self._patience = path, patience
        self._tail, self._began = Tail(path / "metrics.jsonl"), time.monotonic()
        self.record = Record(path)
        self.state = "missing"
        self._fault: str | None = None

    def look(self) -> bool:
        """Read what is new; whether there may be more."""
        if not is_run(self.path):
            return time.monotonic() - self._began <= self._patience
        # The small files first: what a run wrote before its summary is then read as well.
        files = glance_files(self.path)
        for name in _FROM_FILES:
            setattr(self.record, name, getattr(files, name))
        for line in self._tail.new_lines():
            self.record.take(line)
        self.state = self.record.state()
        if self.state in ("running", "silent"):  # how long that may last is the caller's to say
            patience = max(self._patience, self.record.ten_steps)
            self.state = "silent" if self.record.silent_seconds() > patience else "running"
        return self.state == "running"

    def new_fault(self) -> str | None:
        """What is wrong with its config, by which its progress is measured; each thing once."""
        before, self._fault = self._fault, self.record.config_fault
        return self._fault if self._fault != before else None

    @property
    def progress(self) -> float:
        fraction = self.record.epoch / (number(self.record.config.get("epochs")) or math.nan)
        return min(1.0, fraction) if fraction > 0 else 0.0

    def seconds_left(self) -> float:
        record = self.record
        left = number(record.config.get("epochs")) - record.epoch
        return max(0.0, left) * (record.images or math.nan) / recent_speed(record)

    def line(self, brief: bool = False) -> str:
        """Where it stands; `brief`, for terminals, leaves out what is known or matters little."""
        if self.state == "missing":
            return f"waiting for {self.path}"
        last = self.record.steps.last()
        if not last:
            return "begun; no step yet"
        of = count(number(self.record.config.get("epochs")), 2)
        words = [
            f"step {count(self.record.steps_done)}" if not brief else "",
            f"epoch {count(self.record.epoch, 2)}/{of}",
            f"{count(recent_speed(self.record))} images/s",
            f"loss {short(last['loss'])}",
            f"rate {short(last['lr'])}" if not brief else "",
            f"batch {count(last['batch'])}" if not brief else "",
        ]
        if self.state == "running":
            words.append(f"{duration(self.seconds_left())} left")
        return "  ".join(word for word in words if word)

    def result(self) -> dict[str, Any]:
        record, last = self.record, self.record.steps.last()
        numbers = {name: record.result(name) for name in ("top1", "top5", "loss")}
        numbers |= {"epoch": record.epoch, "steps": record.steps_done}
        numbers |= {"seen": last.get("seen", math.nan), "images_per_second": recent_speed(record)}
        return {
            "run": str(self.path),
            "state": self.state,
            **{name: v if math.isfinite(v) else None for name, v in numbers.items()},
        }


class WatchedLines:
    """A line now and then, and one for each evaluation, on standard error."""

    def __init__(self, every: float) -> None:
        self._every, self._due, self._shown = every, 0.0, 0

    def __enter__(self) -> WatchedLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, run: Watched) -> None:
        for words in evaluations(run.record, self._shown):
            say(words, progress=True)
        self._shown = len(run.record.evaluations)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            say(f"{time.strftime('%H:%M:%S')}  {run.line()}", progress=True)


class WatchedBar:
    """A line that is written over and over, with each evaluation above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._brief = console.width < _WIDE
        self._progress = Progress(
            BarColumn(bar_width=8 if self._brief else 16),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._bar, self._shown = self._progress.add_task("", total=1.0), 0

    def __enter__(self) -> WatchedBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, run: Watched) -> None:
        for words in evaluations(run.record, self._shown):
            self._progress.console.print(words, markup=False, highlight=False, soft_wrap=True)
        self._shown = len(run.record.evaluations)
        self._progress.update(
            self._bar, completed=run.progress, description=printable(run.line(self._brief))
        )


def evaluations(record: Record, since: int) -> list[str]:
    return [
        f"epoch {short(number(e.get('epoch')))}  top-1 {percent(number(e.get('top1')))}  "
        f"top-5 {percent(number(e.get('top5')))}  loss {short(number(e.get('loss')))}"
        for e in record.evaluations[since:]
    ]


def run(arguments: list[str]) -> int:
    flags = parse(WatchFlags, "watch", arguments)
    if not flags.every > 0 or not flags.patience > 0:
        raise UserError("--every and --patience are seconds, more than 0")
    path = Path(flags.run)
    if not flags.wait or path.is_file() or runs_in(path):
        check_run(path, "; --wait waits until it is")
    watched = Watched(path, flags.patience)
    show: WatchedLines | WatchedBar = (
        WatchedBar() if sys.stderr.isatty() else WatchedLines(flags.every)
    )
    try:
        with show:
            while watched.look():
                _say_fault(watched)
                show.update(watched)
                time.sleep(min(_LOOK_SECONDS, flags.every))
            _say_fault(watched)
            show.update(watched)
    except KeyboardInterrupt:
        say("megabatch: no longer watching; the run itself goes on", progress=True)
    result = watched.result()
    say_result(_outcome(watched, flags.patience))
    if flags.json:
        print(json.dumps(result), flush=True)
    ends = {"failed": FAILED, "silent": FAILED, "missing": FAILED, "stopped": STOPPED}
    return ends.get(watched.state, DONE)


def _say_fault(run: Watched) -> None:
    if (fault := run.new_fault()) is not None:
        say(f"megabatch: {run.path}: {fault}", progress=True)


def _outcome(run: Watched, patience: float) -> str:
    outcome = {
        "finished": "finished",
        "target": "reached the target",
        "stopped": "stopped on request (--resume goes on)",
        "failed": "failed: diagnosis.json says what is known"
        if run.record.diagnosis
        else "failed: its process is gone",
        "silent": f"silent for {duration(run.record.silent_seconds())} (was it killed?)",
        "missing": f"not there after {duration(patience)}",
    }.get(run.state, run.state)
    return f"{run.path}: {outcome}; top-1 {percent(run.record.result('top1'))}, {run.line()}"
