"""What a run says: to its loggers, and in lines or a progress bar on standard error.

Only the first worker has a Log that writes; the others' are silent. Nothing here waits for the
device.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from megabatch.config import Config
from megabatch.host.durable import open_plain, replacing
from megabatch.runs.loggers import JsonLines, Logger, TensorBoard
from megabatch.runs.progress import (
    Bar,
    Lines,
    Shown,
    SmoothSpeed,
    StepStanding,
    counted,
    say,
    to_people,
)
from megabatch.runs.verdict import Effort, Facts, Verdicts, Waits, straggler
from megabatch.sync.control import StepNumbers
from megabatch.version import __version__

Band = tuple[float, float]
Entry = tuple[str, dict[str, Any]]
"""a line's kind, and the rest of it"""
_LONGEST_LINE = 1 << 20


class Log:
    """The run's record and its voice: it speaks from the start, and writes once it has begun.
    `quiet`: nothing is said."""

    def __init__(self, config: Config, quiet: bool, theirs: Sequence[Logger] = ()) -> None:
        self._config = config
        self._console = to_people(quiet)
        self._theirs = theirs
        """the caller's, who tells them the end"""
        self._own: list[Logger] = []
        self._shown: Shown | None = None
        self._images = self._first_seen = 0
        self._pace, self._verdicts = SmoothSpeed(), Verdicts()
        self._began = self._last = time.monotonic()
        self.recent: list[Entry] = []
        """what was written, or would have been by the first worker, since the step before last: it
        may be lost with who wrote it"""

    def begin(
        self,
        images: int,
        seen: int,
        out: Path | None,
        recent: Sequence[Entry] = (),
        **counts: int,
    ) -> None:
        """The first step is next, of a run over so many images an epoch that has seen some already;
        with `out` None nothing is written. `recent` is of a log that another began, `counts` are
        what loggers are told beside these."""
        if out is not None:
            metrics = out / "metrics.jsonl"
            if recent:
                kind, first = recent[0]
                # What is written again goes: a step by its number, else by the images seen.
                seen_before = first["seen"] - (kind != "train")
                drop_after(metrics, seen_before, first["step"])
            self._own = [JsonLines(metrics), TensorBoard(out / "tensorboard")]
        self._images, self._first_seen = images, seen
        about = {
            "config": asdict(self._config),
            "environment": environment() if self._theirs else {},
            "images": images,
            "seen": seen,
            "out": None if out is None else str(out),
            **counts,
        }
        for logger in (*self._own, *self._theirs):
            logger.begin(about)
        for record in recent:
            self._write(*record)
        if self._console.is_terminal and not self._console.quiet:
            self._shown = Bar(self._console, self._config.epochs, self._config.epochs * images)
        elif not self._console.quiet:
            self._shown = Lines(self._console)
        self._began = self._last = time.monotonic()

    def say(self, words: str) -> None:
        say(self._console, words)

    def table(self, rows: list[tuple[str, str, str]], title: str) -> None:
        """The derived numbers with their formulas."""
        table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
        table.add_column("", style="bold")
        table.add_column("", justify="right")
        table.add_column("", style="dim")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def step(self, numbers: StepNumbers, noise_scale: float | None) -> None:
        now, step, square = time.monotonic(), numbers.step, numbers.gradient_square
        took, self._last = max(now - self._last, 1e-9), now
        record: dict[str, Any] = {
            "step": step.index,
            "seen": step.seen + step.batch,
            "epoch": step.epoch,
            "loss": numbers.loss,
            "top1": numbers.top1,
            "top5": numbers.top5,
            "lr": self._config.lr_at(step.epoch, step.batch),
            "momentum": self._config.momentum_at(step.stage),
            "batch": step.batch,
            "images_per_second": step.batch / took,
            "gradient_norm": math.sqrt(square) if square >= 0 else None,
            "noise_scale": noise_scale,
            "loss_scale": numbers.loss_scale,
            "skipped": numbers.skipped,
        }
        self._write("train", record)
        # A resumed run first hears of the step before it.
        if self._shown is not None and record["seen"] > self._first_seen:
            if step.seen > self._first_seen:  # the first step also starts and compiles things
                self._pace.add(step.batch, took)
            self._shown.show(self._standing(record, now - self._began))

    def _standing(self, record: dict[str, Any], seconds: float) -> StepStanding:
        seen = record["seen"]
        to_come = max(0.0, self._config.epochs * self._images - seen)
        return StepStanding(
            step=record["step"] + 1,
            seen=seen,
            epoch=seen / self._images,
            batch=record["batch"],
            loss=record["loss"],
            lr=record["lr"],
            images_per_second=self._pace.images_per_second or record["images_per_second"],
            seconds=seconds,
            left=to_come * seconds / (seen - self._first_seen),
        )

    def evaluating(
        self,
        micro_batches: Iterable[tuple[Tensor, Tensor]],
        images: int,
        world: int,
        step: int,
        seen: int,
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """The same micro-batches; who watches sees how far the evaluation is."""
        self._write("evaluating", {"step": step, "seen": seen, "epoch": seen / self._images})
        if self._shown is None:
            return micro_batches
        return counted(micro_batches, images, world, self._shown.evaluating())

    def evaluation(
        self, step: int, seen: int, epoch: float, result: dict[str, float], seconds: float
    ) -> None:
        """`seconds`: that the run has taken so far, before it was resumed too."""
        self._write("evaluation", {"step": step, "seen": seen, "epoch": epoch, **result})
        self.say(
            f"epoch {epoch:6.2f}  top-1 {result['top1']:.2%}  top-5 {result['top5']:.2%}  "
            f"loss {result['loss']:.4f}  after {seconds:.1f} s"
        )
        self._last = time.monotonic()

    def verdict(
        self, step: int, seen: int, waits: Waits, facts: Facts, efforts: Sequence[Effort] = ()
    ) -> None:
        """What the epoch waited for; said only where that is news. `efforts`: all workers', by
        rank."""
        slow = straggler(efforts)
        named = {} if slow is None else {"slow_rank": slow.rank, "slower": slow.slower}
        self._write("waits", {"step": step, "seen": seen, **asdict(waits), **named})
        words = self._verdicts.hear(waits, facts, efforts)
        if words is not None:
            self.say(words)

    def last_verdict(self) -> None:
        """What the whole run waited for, if that is worth a line."""
        words = self._verdicts.summary()
        if words is not None:
            self.say(words)

    def layers(
        self, step: int, seen: int, layers: dict[str, tuple[float, float, float]], band: Band
    ) -> None:
        """Each adapted layer's trust ratio, weight norm and gradient norm; alarms for ratios out of
        their band."""
        for name, (ratio, weight_norm, gradient_norm) in layers.items():
            record = {"ratio": ratio, "weight_norm": weight_norm, "gradient_norm": gradient_norm}
            self._write("layer", {"step": step, "seen": seen, "name": name, **record})
            if not band[0] <= ratio <= band[1]:
                self.say(
                    f"alarm: the trust ratio of {name} is {ratio:.3g} at step {step}, outside "
                    f"{band[0]:g} to {band[1]:g} (|w| {weight_norm:.3g}, |g| {gradient_norm:.3g})"
                )

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "train":
            steps = [place for place, (what, _) in enumerate(self.recent) if what == "train"]
            self.recent = self.recent[steps[-1] :] if steps else []
        self.recent.append((kind, record))
        for logger in (*self._own, *self._theirs):
            logger.write(kind, record)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.close()
        for logger in self._own:
            logger.end(None)
        self._own = []


def drop_after(path: Path, seen: int, first_step: int) -> None:
    """Forget the lines that a run wrote after the checkpoint it resumes from: evaluations of more
    images than it had seen, and steps from `first_step` on, which will be written again.

    A last line that is not whole goes too; any other that cannot be read stays as it is.
    """
    if not path.exists():
        return
    with replacing(path) as aside, open_plain(path, sys.maxsize) as old, aside.open("xb") as new:
        while line := old.readline(_LONGEST_LINE):
            kept = line.endswith(b"\n") and not _is_after(line, seen, first_step)
            if kept or len(line) == _LONGEST_LINE:  # a piece of what is no record
                new.write(line)
        new.flush()
        os.fsync(new.fileno())


def _is_after(line: bytes, seen: int, first_step: int) -> bool:
    try:
        record = json.loads(line)
        if record["kind"] == "train":
            return bool(record["step"] >= first_step)
        return bool(record["seen"] > seen)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def environment() -> dict[str, Any]:
    """What a run ran on."""
    found: dict[str, Any] = {
        "megabatch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "command": sys.argv,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found
