"""What can happen to a job: each kind of fault is a value, drawn from a seed, with one method."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megabatch.chaos.job import TrainingJob


class Fault(Protocol):
    """Something that happens when a job has seen a share of its images."""

    @property
    def at(self) -> float: ...

    def strike(self, job: TrainingJob) -> None: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL: of one worker, which a supervised job survives, or of everyone."""

    at: float
    worker: int | None

    def strike(self, job: TrainingJob) -> None:
        if self.worker is None:
            job.kill()
        else:
            job.signal(self.worker, signal.SIGKILL)

    def __str__(self) -> str:
        return "kill everyone" if self.worker is None else f"kill worker {self.worker}"


@dataclass(frozen=True)
class Stop:
    """SIGSTOP: for a moment, which is a delay, or for good: then the others name it and end."""

    at: float
    worker: int
    seconds: float | None

    def strike(self, job: TrainingJob) -> None:
        job.signal(self.worker, signal.SIGSTOP, self.seconds)

    def __str__(self) -> str:
        how = "for good" if self.seconds is None else f"for {self.seconds:.1f} s"
        return f"stop worker {self.worker} {how}"


@dataclass(frozen=True)
class Ask:
    """A request to stop, told to one worker: all save and leave."""

    at: float
    worker: int
    number: signal.Signals

    def strike(self, job: TrainingJob) -> None:
        job.signal(self.worker, self.number)

    def __str__(self) -> str:
        return f"{self.number.name} to worker {self.worker}"


@dataclass(frozen=True)
class Damage:
    """Everyone killed, and a file of the newest checkpoint spoilt before they come back."""

    at: float
    file: float
    byte: float
    how: str

    def strike(self, job: TrainingJob) -> None:
        job.kill()
        job.ended()
        saved = sorted((job.out / "checkpoints").glob("seen-*"))
        files = sorted(saved[-1].iterdir()) if saved else []
        if not files:
            return
        path = files[int(self.file * len(files))]
        data = bytearray(path.read_bytes())
        place = int(self.byte * len(data))
        if self.how == "remove":
            path.unlink()
        elif self.how == "cut":
            path.write_bytes(data[:place])
        elif self.how == "flip":
            data[place] ^= 1
            path.write_bytes(data)
        else:
            shutil.rmtree(saved[-1])

    def __str__(self) -> str:
        what = "" if self.how == "lose" else " a file of"
        return f"kill everyone and {self.how}{what} the newest checkpoint"


@dataclass(frozen=True)
class Fill:
    """No more room on the disk: the job ends in words, and room is made before it comes back."""

    at: float

    def strike(self, job: TrainingJob) -> None:
        job.fill_disk()

    def __str__(self) -> str:
        return "fill the disk"


Draw = Callable[[random.Random, float, int], Fault]

# How each kind is drawn: by the seed's generator, for a share of the run and a number of workers.
KINDS: dict[str, Draw] = {
    "kill": lambda rng, at, workers: Kill(at, rng.randrange(workers)),
    "kill-all": lambda rng, at, workers: Kill(at, None),
    "stop": lambda rng, at, workers: Stop(at, rng.randrange(workers), None),
    "delay": lambda rng, at, workers: Stop(at, rng.randrange(workers), rng.uniform(0.1, 2.0)),
    "ask": lambda rng, at, workers: Ask(
        at, rng.randrange(workers), rng.choice((signal.SIGTERM, signal.SIGUSR1))
    ),
    "damage": lambda rng, at, workers: Damage(
        at, rng.random(), rng.random(), rng.choice(("flip", "cut", "remove", "lose"))
    ),
    "fill": lambda rng, at, workers: Fill(at),
}


def schedule(
    seed: int, round_: int, count: int, workers: int, kinds: tuple[str, ...]
) -> list[tuple[str, Fault]]:
    """The faults of one round (counted from 1), in order, each with its kind: the same for the same
    arguments. Rounds take the kinds in turn, so that none is left out for long."""
    turns = list(kinds)
    random.Random(seed).shuffle(turns)
    rng = random.Random(f"{seed} {round_}")
    drawn = [turns[((round_ - 1) * count + index) % len(turns)] for index in range(count)]
    rng.shuffle(drawn)
    times = sorted(rng.uniform(0.02, 0.95) for _ in drawn)
    return [(kind, KINDS[kind](rng, at, workers)) for kind, at in zip(drawn, times, strict=True)]
