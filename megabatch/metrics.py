"""What a run writes down: metrics.jsonl, TensorBoard, and lines or a progress bar on standard
error.

Only the first worker has a Log that writes; the others' are silent. Nothing here waits for the
device: a step's numbers are read one step later (`Pending`).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from megabatch.batch import Step
from megabatch.config import Config


@dataclass(frozen=True)
class Told:
    """What the control vector of a step says, on the host."""

    step: Step
    loss: float
    top1: float
    top5: float
    squares: float
    stop: bool


class Pending:
    """Control vectors on their way to the host: each is read one step after it was made."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Step, Tensor, Any]] = []

    def put(self, step: Step, head: Tensor) -> Told | None:
        """Queue a step's head of the control vector; returns the step before's, if there was
        one."""
        told = self.take()
        event = None
        if head.is_cuda:
            head = head.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((step, head, event))
        return told

    def take(self) -> Told | None:
        if not self._waiting:
            return None
        step, head, event = self._waiting.pop(0)
        if event is not None:
            event.synchronize()
        squares, stop, loss, top1, top5 = head.tolist()
        n = step.batch
        return Told(step, loss / n, top1 / n, top5 / n, squares, stop > 0)


class Log:
    """The run's record. `out` None: nothing is written; `quiet`: nothing is shown."""

    def __init__(self, config: Config, images: int, out: Path | None, quiet: bool) -> None:
        self._images = images
        self._console = Console(stderr=True, quiet=quiet)
        self._file: TextIO | None = None
        self._board: Any = None
        self._progress: Progress | None = None
        self._began = self._last = time.monotonic()
        if out is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._file = (out / "metrics.jsonl").open("a")
            self._board = SummaryWriter(out / "tensorboard")
        if self._console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("epoch {task.fields[epoch]:.1f}/{task.fields[epochs]:g}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%  batch {task.fields[batch]}"),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} images/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar = self._progress.add_task(
                "train",
                total=config.epochs * images,
                epoch=0.0,
                epochs=config.epochs,
                batch=config.batch,
                loss=0.0,
                rate=0.0,
            )
            self._progress.start()

    def say(self, words: str) -> None:
        self._console.print(words, highlight=False, soft_wrap=True)

    def step(self, told: Told, lr: float, momentum: float) -> None:
        now = time.monotonic()
        rate = told.step.batch / max(now - self._last, 1e-9)
        self._last = now
        record = {
            "step": told.step.index,
            "seen": told.step.seen + told.step.batch,
            "epoch": told.step.epoch,
            "loss": told.loss,
            "top1": told.top1,
            "top5": told.top5,
            "lr": lr,
            "momentum": momentum,
            "batch": told.step.batch,
            "images_per_second": rate,
            "squared_micro_norms": told.squares,
        }
        self._write("train", record)
        if self._progress is not None:
            self._progress.update(
                self._bar,
                completed=record["seen"],
                epoch=record["seen"] / self._images,
                batch=told.step.batch,
                loss=told.loss,
                rate=rate,
            )

    def evaluation(self, step: int, seen: int, epoch: float, result: dict[str, float]) -> None:
        self._write("evaluation", {"step": step, "seen": seen, "epoch": epoch, **result})
        self.say(
            f"epoch {epoch:6.2f}  top-1 {result['top1']:.2%}  top-5 {result['top5']:.2%}  "
            f"loss {result['loss']:.4f}  after {time.monotonic() - self._began:.1f} s"
        )
        self._last = time.monotonic()

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name not in ("step", "seen"):
                self._board.add_scalar(f"{kind}/{name}", value, record["seen"])

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()
            self._board.close()


def drop_after(path: Path, seen: int) -> None:
    """Forget the lines that a run wrote after the checkpoint it resumes from."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["seen"] <= seen]
        path.write_text("".join(line + "\n" for line in lines))


def show_table(rows: list[tuple[str, str, str]], title: str) -> None:
    """The derived numbers with their formulas, on standard error."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", style="bold")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)


def environment() -> dict[str, Any]:
    """What a run ran on."""
    import megabatch

    found: dict[str, Any] = {
        "megabatch": megabatch.__version__,
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
