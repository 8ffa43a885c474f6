"""How far a run, an evaluation or a pack is, said on standard error: a bar on a terminal, elsewhere
a line every half minute.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from megabatch.errors import between_words, printable

if TYPE_CHECKING:
    from torch import Tensor

EVERY_SECONDS = 30.0
"""between two lines"""
_FIRST_SECONDS = 5.0
"""until the first: what ends sooner needs none"""
_MEMORY_SECONDS = 30.0
"""of a smoothed speed"""

Now = Callable[[], float]
OnProgress = Callable[[int, int], None]
"""called with how many are done, of how many"""


def to_people(quiet: bool = False, result: bool = False) -> Console:
    """Standard error, or for a result standard output. Words are taken as they are: names of files
    may hold brackets and colons."""
    return Console(stderr=not result, quiet=quiet, markup=False, emoji=False, highlight=False)


def say(console: Console, words: str) -> None:
    """One line, whatever a name in it holds; at a terminal broken between words, never inside
    one."""
    words = printable(words)
    if console.is_terminal and len(words) > console.width:
        words = between_words(words, console.width)
    console.print(words, soft_wrap=True)


def clock(seconds: float) -> str:
    """12:34, 1:02:03 or 2 d 01:02:03."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class SmoothSpeed:
    """Images by seconds, the last half minute counting most."""

    def __init__(self) -> None:
        self._images = self._seconds = 0.0

    def add(self, images: int, seconds: float) -> None:
        fade = math.exp(-seconds / _MEMORY_SECONDS)
        self._images = self._images * fade + images
        self._seconds = self._seconds * fade + seconds

    @property
    def images_per_second(self) -> float:
        return self._images / self._seconds if self._seconds > 0 else 0.0


class Due:
    """Whether it is time for another line."""

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now, self._next = now, now() + _FIRST_SECONDS

    def __call__(self) -> bool:
        if self._now() < self._next:
            return False
        self._next = self._now() + EVERY_SECONDS
        return True


@dataclass(frozen=True)
class StepStanding:
    """Where a run stands after a step."""

    step: int
    seen: int
    epoch: float
    """how far it is, in epochs"""
    batch: int
    loss: float
    lr: float
    images_per_second: float
    """smoothed"""
    seconds: float
    """since its first step"""
    left: float
    """seconds that the rest will take at this speed"""

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch:6.2f}  step {self.step:,}  loss {self.loss:.3f}  "
            f"lr {self.lr:.3g}  {self.images_per_second:,.0f} images/s  "
            f"{clock(self.seconds)}  left {clock(self.left)}"
        )


class Shown(Protocol):
    """What shows where a run stands."""

    def show(self, standing: StepStanding) -> None: ...

    def evaluating(self) -> OnProgress: ...

    def close(self) -> None: ...


class Lines:
    """In a log: a line now and then."""

    def __init__(self, console: Console, now: Now = time.monotonic) -> None:
        self._console, self._due = console, Due(now)

    def show(self, standing: StepStanding) -> None:
        if self._due():
            say(self._console, str(standing))

    def evaluating(self) -> OnProgress:
        return _lines("evaluating", self._console)

    def close(self) -> None:
        pass


class Bar:
    """On a terminal: a bar that stays at the bottom."""

    def __init__(self, console: Console, epochs: float, total: float) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]:.1f}/{task.fields[epochs]:g}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[words]}"),
            console=console,
        )
        self._task = self._progress.add_task(
            "train", total=total, epoch=0.0, epochs=epochs, words="first step"
        )
        self._progress.start()

    def show(self, standing: StepStanding) -> None:
        self._progress.update(
            self._task,
            completed=standing.seen,
            epoch=standing.epoch,
            words=f"batch {standing.batch:,} loss {standing.loss:.3f} "
            f"{standing.images_per_second:,.0f} images/s left {clock(standing.left)}",
        )

    def evaluating(self) -> OnProgress:
        return lambda done, total: self._progress.update(
            self._task, words=f"evaluating {done:,} of {total:,}"
        )

    def close(self) -> None:
        self._progress.stop()


@contextlib.contextmanager
def counting(what: str, console: Console) -> Iterator[OnProgress]:
    """What to call with how many are done and how many there are, while `what` lasts."""
    if console.quiet:
        yield lambda done, total: None
    elif not console.is_terminal:
        yield _lines(what, console)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, console: Console) -> OnProgress:
    due, began = Due(), time.monotonic()

    def on_progress(done: int, total: int) -> None:
        if done and due():
            left = (time.monotonic() - began) * (total - done) / done
            say(console, f"{what}: {done:,} of {total:,}, left {clock(left)}")

    return on_progress


def counted(
    micro_batches: Iterable[tuple[Tensor, Tensor]], images: int, world: int, on_progress: OnProgress
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same micro-batches of images and labels; what one worker has had stands for all."""
    done = 0
    for inputs, labels in micro_batches:
        on_progress(done, images)
        yield inputs, labels
        done = min(images, done + len(labels) * world)
    on_progress(images, images)
