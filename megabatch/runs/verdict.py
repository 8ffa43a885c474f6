"""The verdict: what an epoch waited for, in one line, from measured waits, with the advice that
follows.

The core is a pure function, waits and facts in, words out; `Clock` collects the waits of an epoch.
Time in which the training loop waited neither for images nor for other workers counts as compute.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

_NOTABLE = 0.05
"""a share below this is not worth changing anything for"""
_SPARE = 1.1
"""threads for a tenth more than was needed on average: images differ"""
_IN_THE_WAY = 0.5
"""threads that read for this share of the time hold up the loop, which shares their interpreter"""
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


@dataclass(frozen=True)
class Facts:
    """What advice depends on; None where it is not known or does not apply."""

    threads: int
    """or processes that a worker reads with"""
    cores: int
    """that a worker may use"""
    size: int
    """of the images the model sees"""
    packed: bool = False
    stored_size: int | None = None
    """shortest side the pack was made with (0: untouched; None: no JPEG pack)"""
    world: int = 1
    micros_a_worker: float = 1.0
    """micro-batches a step, on average"""
    wire: str = "fp32"
    deterministic: bool = False
    readers: str = "processes"
    """who decodes the images: processes, threads or nobody"""


@dataclass(frozen=True)
class Verdict:
    bound: Literal["input", "communication", "compute"]
    share: float
    """of the time"""
    advice: str

    def __str__(self) -> str:
        words = f"{self.bound}-bound {self.share:.0%}".replace("%", " %")
        return f"{words}: {self.advice}"


def verdict(waits: Waits, facts: Facts) -> Verdict:
    """What the epoch waited for most, and what to do about it."""
    total = max(waits.seconds, 1e-9)
    shares = {"input": waits.input / total, "communication": waits.communication / total}
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] < _NOTABLE:
        return Verdict("compute", max(0.0, 1 - sum(shares.values())), _compute_advice(waits, facts))
    if worst == "input":
        return Verdict("input", shares["input"], _input_advice(waits, facts))
    return Verdict("communication", shares["communication"], _communication_advice(facts))


def _compute_advice(waits: Waits, facts: Facts) -> str:
    """What is not waited for may still be in the way of what computes."""
    hidden = waits.reading / max(waits.seconds, 1e-9)
    if facts.readers == "threads" and hidden > _IN_THE_WAY:
        return "part of it is decoding in threads of this process: try --data.processes always"
    return "nothing to wait for"


def _input_advice(waits: Waits, facts: Facts) -> str:
    ways: list[str] = []
    packed_size = round(facts.size * 8 / 7)
    stored_slowly = waits.on_cores is not None and waits.on_cores < _ON_CORES * waits.reading
    if facts.packed and stored_slowly:
        return (
            "storage is slow, not decoding: copy the pack to local storage with "
            "--data.local-copy DIR"
        )
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
    ways: list[str] = []
    if facts.wire == "fp32" and not facts.deterministic:
        ways.append("send gradients as fp16 (--plan torus --wire fp16)")
    if facts.micros_a_worker < 4:
        ways.append(f"use a larger batch or fewer than {facts.world} workers")
    return " or ".join(ways) or "try another plan: megabatch bench sync measures them all"


class Clock:
    """Collects the waits of an epoch. `now` is a clock in seconds, for tests another one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()
        self._paused = self._communication = 0.0
        self._input_before = self._reading_before = self._cores_before = 0.0

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Around what waits for other workers."""
        began = self._now()
        try:
            yield
        finally:
            self._communication += self._now() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: evaluation and checkpoints."""
        began = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - began

    def passed_over(self, seconds: float) -> None:
        """Instead of `paused`, where it was measured elsewhere."""
        self._paused += seconds

    def waited_for_others(self, seconds: float) -> None:
        """Instead of `communicating`, where the waiting was measured elsewhere."""
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
