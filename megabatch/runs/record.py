"""What a run left in its folder, read by those who did not write it: reports, lists, watchers.

Anything in a folder may be missing, torn or nonsense: what cannot be used is counted and left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.host.durable import is_plain, open_plain, read_plain
from megabatch.runs.alive import gone

STEP_NUMBERS = (
    "step", "seen", "epoch", "loss", "top1", "lr", "momentum", "batch", "images_per_second",
    "gradient_norm", "noise_scale", "loss_scale", "skipped",
)  # fmt: skip
_MOST_LINE = 1 << 20
_MOST_JSON = 16 << 20
_MOST_METRICS = 4 << 30
"""bytes of ten million steps"""
_SILENT_SECONDS = 120.0
"""a run that says nothing for so long, and for ten of its own steps, may have been killed"""
_GONE_SECONDS = 20.0
"""a run whose process is gone may be begun again by whoever watches over it"""
_LARGEST = 1e60
_RECENT = 50
"""steps that a present speed is the mean of"""
_COPIED_SECONDS = 1.0
"""copies of a folder's files may differ in age by this much"""


class Columns:
    """Many records of the same numbers, a column each: eight bytes a number, nan where there is
    none."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._columns = {name: array("d") for name in names}

    def add(self, record: dict[str, Any]) -> None:
        for name, column in self._columns.items():
            column.append(number(record.get(name)))

    def __getitem__(self, name: str) -> array[float]:
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def last(self) -> dict[str, float]:
        return {name: column[-1] for name, column in self._columns.items()} if len(self) else {}


@dataclass
class Record:
    """A run as its folder tells it."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    steps: Columns = field(default_factory=lambda: Columns(STEP_NUMBERS))
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: int = 0
    faults: list[str] = field(default_factory=list)
    """files that are missing or cannot be read, a sentence each"""
    written: float = 0.0
    """when it last wrote of itself, as time.time() counts; 0: never"""
    resumed: bool = False
    """it was begun again after its summary was written"""

    @property
    def name(self) -> str:
        return self.path.resolve().name or str(self.path)

    @property
    def config_fault(self) -> str | None:
        """Why its config cannot be used, a sentence, if it cannot."""
        return next((fault for fault in self.faults if fault.startswith("config.json ")), None)

    @property
    def images(self) -> float | None:
        """Images an epoch, as far as its records tell."""
        for record in reversed(self.evaluations):
            seen, epoch = number(record.get("seen")), number(record.get("epoch"))
            if seen > 0 and epoch > 0:
                return seen / epoch
        last = self.steps.last()
        if last and last["epoch"] > 0:
            return (last["seen"] - last["batch"]) / last["epoch"]
        return None

    @property
    def epoch(self) -> float:
        """How far it came (nan: unknown)."""
        last = self.steps.last()
        # A step tells the epoch that it began at, and the images seen when it was over.
        known = [last["epoch"], last["seen"] / (self.images or math.nan)] if last else []
        known += [number(record.get("epoch")) for record in self.evaluations[-1:]]
        known += [number(self.summary.get("epochs"))] if not self.resumed else []
        return max((epoch for epoch in known if math.isfinite(epoch)), default=math.nan)

    @property
    def steps_done(self) -> float:
        """How many steps it has taken (nan: unknown)."""
        known = [self.steps["step"][-1] + 1] if len(self.steps) else []
        known += [number(self.summary.get("steps"))] if not self.resumed else []
        return max((steps for steps in known if math.isfinite(steps)), default=math.nan)

    def result(self, name: str) -> float:
        """A number of the last evaluation: top1, top5 or loss (nan: none yet)."""
        # A run that ended before its first evaluation has no loss of one.
        ended = not self.resumed and self.summary.get("loss", 0.0) is not None
        for record in (*self.evaluations[-1:], self.summary if ended else {}):
            found = number(record.get(name))
            if math.isfinite(found):
                return found
        return math.nan

    def take(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        kind = record.get("kind")
        if kind == "train":
            self.steps.add(record)
        elif kind == "evaluation":
            self.evaluations.append(record)
        elif kind == "waits":
            self.waits.append(record)
        elif kind == "layer":
            self.layers.append(record)

    def state(self, now: float | None = None) -> str:
        """running, silent (for too long), finished, target, stopped or failed."""
        if self.diagnosis and not self.resumed:
            return "failed"
        ended = self.summary.get("ended")
        if isinstance(ended, str) and not self.resumed:
            return ended[:40]
        quiet = self.silent_seconds(now)
        if quiet > _GONE_SECONDS and gone(self.environment.get("process")):
            return "failed"
        return "silent" if quiet > self.patience else "running"

    def silent_seconds(self, now: float | None = None) -> float:
        return max(0.0, (time.time() if now is None else now) - self.written)

    @property
    def patience(self) -> float:
        """How long this run may say nothing before it counts as silent, in seconds."""
        return max(_SILENT_SECONDS, self.ten_steps)

    @property
    def ten_steps(self) -> float:
        """How long ten steps take it, in seconds (0: unknown)."""
        last = self.steps.last()
        batch, rate = last.get("batch", math.nan), last.get("images_per_second", math.nan)
        return 10 * batch / rate if batch > 0 and rate > 0 else 0.0


def number(value: Any) -> float:
    """A number, or nan for anything that is none or that no run can have."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if abs(found) < _LARGEST and not 0 < abs(found) < 1 / _LARGEST else math.nan


def seconds_of(record: Record) -> float:
    """How long a run took, or has taken since it was begun."""
    recorded = number(record.summary.get("seconds"))
    if math.isfinite(recorded) and not record.resumed:
        return recorded
    began = began_at(record)
    return record.written - began if began and record.written > began else math.nan


def began_at(record: Record) -> float | None:
    recorded = str(record.environment.get("began"))
    try:
        return datetime.strptime(recorded, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def images_per_second(record: Record) -> float:
    """Of the whole run, or of its last steps."""
    recorded = number(record.summary.get("images_per_second"))
    return recorded if math.isfinite(recorded) and not record.resumed else recent_speed(record)


def recent_speed(record: Record) -> float:
    steps = record.steps
    return speed(steps["batch"][-_RECENT:], steps["images_per_second"][-_RECENT:])


def speed(batches: Sequence[float], rates: Sequence[float]) -> float:
    """Images by seconds over some steps: a step told right after another does not count for more
    than the moment it took."""
    pairs = [(b, r) for b, r in zip(batches, rates, strict=True) if b > 0 and r > 0]
    seconds = sum(batch / rate for batch, rate in pairs)
    return sum(batch for batch, _ in pairs) / seconds if seconds > 0 else math.nan


def speeds(record: Record) -> tuple[list[float], list[float]]:
    """Epochs and images/s, over windows of a hundredth of the run."""
    epochs, batches, rates = (record.steps[n] for n in ("epoch", "batch", "images_per_second"))
    wide = max(4, len(epochs) // 100)
    ends = [*range(wide, len(epochs) - wide + 1, wide), len(epochs)] if epochs else []
    begins = [0, *ends][: len(ends)]
    return (
        [epochs[end - 1] for end in ends],
        [speed(batches[a:b], rates[a:b]) for a, b in zip(begins, ends, strict=True)],
    )


def is_run(path: Path) -> bool:
    return is_plain(path / "metrics.jsonl") or is_plain(path / "config.json")


def read(path: str | os.PathLike[str]) -> Record:
    """All that a run's folder holds."""
    record = glance_files(Path(path))
    tail = Tail(record.path / "metrics.jsonl")
    for line in tail.all_lines():
        record.take(line)
    record.bad_lines = tail.bad
    return record


def glance(path: str | os.PathLike[str]) -> Record:
    """As `read`, but of the metrics only the last step and the last evaluation: fast for a list."""
    record = glance_files(Path(path))
    last: dict[bytes, bytes] = {}
    with _opened(record.path / "metrics.jsonl") as file:
        for line in _bounded_lines(file):
            head = line[:40]
            for kind in (b'"train"', b'"evaluation"'):
                if kind in head:
                    last[kind] = line
    for line in last.values():
        parsed = _parsed(line)
        if parsed is not None:
            record.take(parsed)
    return record


def glance_files(path: Path) -> Record:
    """A run's small files, and when it last wrote."""
    if not is_run(path):
        raise UserError(f"{path} is not the folder of a run")
    record = Record(path)
    for name in ("config", "environment", "summary", "diagnosis"):
        file = path / f"{name}.json"
        if is_plain(file):
            setattr(record, name, _object(file, record.faults))
        elif name in ("config", "environment"):
            record.faults.append(f"{file.name} is missing")
    _check_config(record)
    metrics = path / "metrics.jsonl"
    if not is_plain(metrics):
        record.faults.append("metrics.jsonl is missing")
    elif not os.access(metrics, os.R_OK):
        record.faults.append("metrics.jsonl cannot be read: check its permissions")
    elif metrics.lstat().st_size > _MOST_METRICS:
        record.faults.append("metrics.jsonl cannot be read: it is larger than it can be")
    ages = {name: _age(path / name) for name in (
        "config.json", "environment.json", "metrics.jsonl", "summary.json", "diagnosis.json"
    )}  # fmt: skip
    # In this order a run that begins writes them: the first alone is a word already.
    record.written = max(ages[n] for n in ("config.json", "environment.json", "metrics.jsonl"))
    ended = max(ages["summary.json"], ages["diagnosis.json"])
    # The environment is written when a run begins or goes on.
    record.resumed = ended > 0 and ages["environment.json"] > ended + _COPIED_SECONDS
    return record


class Tail:
    """The lines of a metrics.jsonl that may still grow, or be cut when its run is resumed."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.bad = 0
        """lines that were no records"""

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """The records written since the last call; a line that is not whole yet waits."""
        with _opened(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._at:
                self._at = 0
            file.seek(self._at)
            for line in _bounded_lines(file):
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                yield from self._record(line)

    def all_lines(self) -> Iterator[dict[str, Any]]:
        """Every record, the last too if it is whole but for its end of line."""
        with _opened(self._path) as file:
            for line in _bounded_lines(file):
                yield from self._record(line)

    def _record(self, line: bytes) -> Iterator[dict[str, Any]]:
        record = _parsed(line)
        if record is not None:
            yield record
        elif line.strip():
            self.bad += 1


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines; one that is longer than any record comes in pieces, none of which is one."""
    while line := file.readline(_MOST_LINE):
        yield line


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _object(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(read_plain(path, _MOST_JSON))
        if isinstance(found, dict):
            return found
        raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        words = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        faults.append(f"{path.name} cannot be read: {words}")
        return {}


def _check_config(record: Record) -> None:
    """Note a config that no run has written; what it says is shown all the same."""
    if record.config_fault is not None:
        return
    try:
        Config.from_json(json.dumps(record.config))
    except UserError as error:
        record.faults.append(f"config.json is not the config of a run: {error}")


def _opened(path: Path) -> BinaryIO:
    try:
        return open_plain(path, _MOST_METRICS)
    except OSError:
        return open(os.devnull, "rb")


def _age(path: Path) -> float:
    return path.lstat().st_mtime if is_plain(path) else 0.0
