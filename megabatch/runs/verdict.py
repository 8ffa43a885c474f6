"""The verdict: what a run waits for, in one line, from measured waits, with the advice that
follows.

The core is a pure function, waits and facts in, a verdict out; `Clock` collects the waits of an
epoch, and `Verdicts` says what of them is news.
Time in which the training loop waited neither for images nor for other workers counts as compute.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megabatch.batch import count_steps
from megabatch.config import Config, OptimizerConfig

_NOTABLE = 0.05
"""a share below this is not worth changing anything for"""
_LARGE = 0.15
"""a share below this is named only with what to do about it"""
_STILL = 0.5
"""what was waited for most still counts as that at half the share of what is now, or of notable"""
_ENOUGH_SECONDS = 20.0
"""shorter than this is no measurement to change anything for"""
_SUMMARY_SECONDS = 5.0
"""a shorter run needs no word on where its time went"""
_SPARE = 1.1
"""threads for a tenth more than was needed on average: images differ"""
_IN_THE_WAY = 0.5
"""threads that read for this share of the time hold up the loop, which shares their interpreter"""
_SLOWER = 0.15
"""a worker that takes this share of time more than the others is named"""
_ON_CORES = 0.5
"""readers that spent less than this share of their work on a core, or waiting for one, were waiting
for storage"""


@dataclass(frozen=True)
class Waits:
    """Where the time of an epoch went on one worker, in seconds."""

    seconds: float
    """of training, without evaluation and checkpoints"""
    input: float
    """the loop waited for images"""
    communication: float
    """the loop waited for other workers"""
    reading: float = 0.0
    """work of the reading threads or processes, all together"""
    on_cores: float | None = None
    """how much of that on a core or waiting for one, and not for storage (None: not known)"""

    def __add__(self, other: Waits) -> Waits:
        known = self.on_cores is not None and other.on_cores is not None
        return Waits(
            self.seconds + other.seconds,
            self.input + other.input,
            self.communication + other.communication,
            self.reading + other.reading,
            (self.on_cores or 0.0) + (other.on_cores or 0.0) if known else None,
        )


@dataclass(frozen=True)
class Facts:
    """What advice depends on; None where it is not known or does not apply."""

    threads: int
    """or processes that a worker reads with"""
    cores: int
    """that a worker may use"""
    size: int
    """of the images the model sees"""
    cores_here: int = 1
    """that all workers of the machine may use together"""
    packed: bool = False
    stored_size: int | None = None
    """shortest side the pack was made with (0: untouched; None: no JPEG pack)"""
    world: int = 1
    over_loopback: bool = False
    """the workers are processes of one machine and compute on its cores"""
    micros_a_worker: float = 1.0
    """micro-batches a step, on average"""
    wire: str = "fp32"
    deterministic: bool = False
    readers: str = "processes"
    """who decodes the images: processes, threads or nobody"""


@dataclass(frozen=True)
class Effort:
    """What one worker did of an epoch, and in what time."""

    host: str
    seconds: float
    """without those it waited for others"""
    micro_batches: int

    def __add__(self, other: Effort) -> Effort:
        micro_batches = self.micro_batches + other.micro_batches
        return Effort(self.host, self.seconds + other.seconds, micro_batches)


@dataclass(frozen=True)
class Straggler:
    """The worker that the others wait for."""

    rank: int
    host: str
    slower: float
    """than the others: 0.2 is a fifth more time for the same work"""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is {_percent(self.slower)} slower than the rest, who "
            f"wait for it: look at its clock rate, cooling, storage and what else runs there"
        )


def straggler(efforts: Sequence[Effort]) -> Straggler | None:
    """The slowest of all workers, by rank, if it is notably slower than those that had as much to
    do."""
    found: Straggler | None = None
    for rank, effort in enumerate(efforts):
        others = [
            other.seconds
            for place, other in enumerate(efforts)
            if place != rank and other.micro_batches == effort.micro_batches
        ]
        if others and effort.micro_batches:
            slower = effort.seconds / max(statistics.median(others), 1e-9) - 1
            if slower >= (_SLOWER if found is None else found.slower):
                found = Straggler(rank, effort.host, slower)
    return found


Bound = Literal["input", "communication", "compute"]


@dataclass(frozen=True)
class Verdict:
    bound: Bound
    fraction: float
    """of the time"""
    advice: str
    """empty: there is none"""

    @property
    def measured(self) -> str:
        return f"{self.bound}-bound {_percent(self.fraction)}"

    def __str__(self) -> str:
        return f"{self.measured}: {self.advice}" if self.advice else self.measured


def verdict(waits: Waits, facts: Facts, before: Bound = "compute") -> Verdict:
    """What is waited for most, and what to do about it; `before` is what it was until now, which
    has to change clearly to be another."""
    total = max(waits.seconds, 1e-9)
    waited: dict[Bound, float] = {
        "input": waits.input / total,
        "communication": waits.communication / total,
    }
    worst = max(waited, key=lambda name: waited[name])
    if before in waited and waited[before] >= _STILL * max(waited[worst], _NOTABLE):
        worst = before
    elif waited[worst] < _NOTABLE:
        return Verdict("compute", max(0.0, 1 - sum(waited.values())), _compute_advice(waits, facts))
    advice = _input_advice(waits, facts) if worst == "input" else _communication_advice(facts)
    return Verdict(worst, waited[worst], advice)


def _compute_advice(waits: Waits, facts: Facts) -> str:
    """What is not waited for may still be in the way of what computes."""
    hidden = waits.reading / max(waits.seconds, 1e-9)
    if facts.readers == "threads" and hidden > _IN_THE_WAY:
        return "part of it is decoding in threads of this process: try --data.processes always"
    return ""


def _input_advice(waits: Waits, facts: Facts) -> str:
    ways: list[str] = []
    packed_size = round(facts.size * 8 / 7)
    stored_slowly = waits.on_cores is not None and waits.on_cores < _ON_CORES * waits.reading
    if facts.packed and stored_slowly:
        way = "copy the pack to local storage with --data.local-copy DIR"
        return f"storage is slow, not decoding: {way}"
    if not facts.packed or facts.stored_size == 0 or (facts.stored_size or 0) > 2 * packed_size:
        ways.append(f"pack at --size {packed_size}")
    # As many threads as finish the epoch's reading while the loop computes.
    needed = math.ceil(_SPARE * waits.reading / max(waits.seconds - waits.input, 1e-9))
    more = min(needed, facts.cores) - facts.threads
    if more > 0:
        ways.append(f"add {more} decode thread{'s' if more > 1 else ''}")
    if not ways and facts.stored_size is not None:
        ways.append(f"pack with --raw --size {packed_size}, which needs no decoding")
    if not ways:
        ways.append("spread the run over more machines: this one's cores are all busy reading")
    return " or ".join(ways)


def _communication_advice(facts: Facts) -> str:
    if facts.over_loopback and facts.world > facts.cores_here:
        return (
            f"{facts.world} workers share {facts.cores_here} "
            f"core{'s' if facts.cores_here > 1 else ''}: fewer (--workers {facts.cores_here}) "
            f"wait less for each other"
        )
    ways: list[str] = []
    if facts.wire == "fp32" and not facts.deterministic and not facts.over_loopback:
        ways.append("send gradients as fp16 (--plan torus --wire fp16)")
    if facts.micros_a_worker < 4:
        ways.append(f"use a larger batch or fewer than {facts.world} workers")
    if not ways and not facts.over_loopback:
        ways.append("try another plan: megabatch bench sync measures them all")
    return " or ".join(ways)


class Verdicts:
    """What of an epoch's waits is news: a bound that is another than before, advice the first time
    it applies. Epochs that are too short to measure are taken together."""

    def __init__(self) -> None:
        self._bound: Bound = "compute"
        self._advised: set[Bound] = set()
        self._named: set[int] = set()
        self._efforts: list[Effort] = []
        self._lately = self._ever = Waits(0.0, 0.0, 0.0, on_cores=0.0)

    def hear(self, waits: Waits, facts: Facts, efforts: Sequence[Effort] = ()) -> str | None:
        """A line, or nothing to say; `efforts` are those of all workers, by rank."""
        self._ever, self._lately = self._ever + waits, self._lately + waits
        self._efforts = [
            one + before
            for one, before in zip(efforts, self._efforts or _idle(efforts), strict=True)
        ]
        if self._lately.seconds < _ENOUGH_SECONDS:
            return None
        slow = straggler(self._efforts)
        found = verdict(self._lately, facts, self._bound)
        self._lately, self._efforts = Waits(0.0, 0.0, 0.0, on_cores=0.0), []
        crowded = facts.over_loopback and facts.world > facts.cores_here
        if slow is not None and not crowded:
            return self._name(slow)
        fresh = found.advice != "" and found.bound not in self._advised
        if found.bound == self._bound and not fresh:
            return None
        self._bound = found.bound
        if fresh:
            self._advised.add(found.bound)
            return str(found)
        return found.measured if found.fraction >= _LARGE else None

    def _name(self, slow: Straggler) -> str | None:
        """Once: what else is waited for is of no account while all wait for one."""
        if slow.rank in self._named:
            return None
        self._named.add(slow.rank)
        return str(slow)

    def summary(self) -> str | None:
        """Where the time of the run went; nothing where hardly any of it was waited for."""
        total = self._ever.seconds
        waited = {
            "for images": self._ever.input / max(total, 1e-9),
            "for other workers": self._ever.communication / max(total, 1e-9),
        }
        parts = [f"{_percent(part)} {what}" for what, part in waited.items() if part >= _NOTABLE]
        if total < _SUMMARY_SECONDS or not parts:
            return None
        return f"of {total:.0f} s of training the first worker waited {', '.join(parts)}"


def _idle(efforts: Sequence[Effort]) -> list[Effort]:
    return [Effort(effort.host, 0.0, 0) for effort in efforts]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def idle_workers(images: int, micro: int, world: int, or_else: str = "") -> str | None:
    """A warning where there is not a micro-batch for every worker; `or_else`: another way out."""
    micros = -(-images // micro)
    if micros >= world:
        return None
    work = f"{micros} micro-batch{'es' if micros > 1 else ''} of {micro}"
    return (
        f"warning: {world - micros} of {world} workers idle, for {images:,} images are {work}: use "
        f"--workers {micros}{or_else}"
    )


def beforehand(config: Config, images: int) -> Iterator[str]:
    """Warnings of what a run over so many images will meet, a sentence each."""
    stages = config.all_stages
    steps, _ = count_steps(stages, images, config.epochs)
    found = (
        few_steps([stage.batch for stage in stages], images, steps),
        bold_rate(config.lr.peak(config.batch), config.optimizer),
    )
    return (words for words in found if words is not None)


_FEW_STEPS = 40


def few_steps(batches: Sequence[int], images: int, steps: int) -> str | None:
    """A warning where a run has too few steps to learn much; `batches` are those of its stages."""
    if steps >= _FEW_STEPS:
        return None
    largest = f", and a batch of {max(batches):,} is all of them" if max(batches) > images else ""
    few = "1 step in all is" if steps == 1 else f"{steps} steps in all are"
    return (
        f"warning: {few} few to learn in, for {images:,} training images{largest}: use a smaller "
        f"--batch, or more --epochs"
    )


_BOLD = 0.1
"""of a layer's norm in one step; the papers' largest is 0.05"""


def bold_rate(peak: float, optimizer: OptimizerConfig) -> str | None:
    """A warning where LARS at its peak rate moves layers further than nets usually bear."""
    adapts = optimizer.name == "lars" and optimizer.policy == "lars"
    moved = peak * (optimizer.trust or 0.0) if adapts else 0.0
    if moved < _BOLD:
        return None
    return (
        f"warning: at the peak rate of {peak:g} LARS moves every layer by {_percent(moved)} of its "
        f"norm a step, and few nets learn so: use a smaller --lr.reference, or a smaller --batch"
    )


def no_number(loss: float) -> str | None:
    """A warning where a run's last evaluation has no finite loss, which its steps may have had."""
    if math.isfinite(loss):
        return None
    return (
        f"warning: the last evaluation has no finite loss ({loss}): what the net puts out for some "
        f"images, or for all, is no number; lower --lr.reference, or lengthen --lr.warmup"
    )


class Clock:
    """Collects the waits of an epoch, and how long a run has taken: `before` seconds already, when
    it is resumed, `trained` of them in training. `now` is a clock in seconds, for tests another
    one."""

    def __init__(
        self,
        before: float = 0.0,
        trained: float = 0.0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now, self._trained = now, trained
        self._began = self._started = now()
        self._before, self._passed_over = before, 0.0
        self._paused = self._communication = 0.0
        self._input_before = self._reading_before = self._cores_before = 0.0

    def passed_over(self, seconds: float) -> None:
        """That were not training: evaluation and checkpoints."""
        self._paused += seconds
        self._passed_over += seconds

    @property
    def seconds(self) -> float:
        """Of the whole run, everything counted."""
        return self._before + self._now() - self._started

    @property
    def training_seconds(self) -> float:
        """Of the whole run, without what was passed over."""
        return self._trained + self._now() - self._started - self._passed_over

    def waited_for_others(self, seconds: float) -> None:
        """As the engine measured it."""
        self._communication += seconds

    def lap(
        self, input_seconds: float, reading_seconds: float, core_seconds: float | None = None
    ) -> Waits:
        """End an epoch; the arguments are running totals, such as a loader's waited_seconds,
        busy_seconds and core_seconds."""
        now = self._now()
        waits = Waits(
            seconds=now - self._began - self._paused,
            input=input_seconds - self._input_before,
            communication=self._communication,
            reading=reading_seconds - self._reading_before,
            on_cores=None if core_seconds is None else core_seconds - self._cores_before,
        )
        self._began, self._paused, self._communication = now, 0.0, 0.0
        self._input_before, self._reading_before = input_seconds, reading_seconds
        self._cores_before = core_seconds or 0.0
        return waits
