"""The micro-batch and who is dealt which, the steps of a run, and batch-size control (Mikami 2018).

A global batch is K micro-batches, which belong to nobody: a worker is dealt an interval of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megabatch.tree import deal


@dataclass(frozen=True)
class Stage:
    """From `epoch` on the global batch is `batch`; None leaves the momentum as it was."""

    epoch: float
    batch: int
    momentum: float | None = None

    def __str__(self) -> str:
        """As on the command line: EPOCH:BATCH or EPOCH:BATCH:MOMENTUM."""
        momentum = "" if self.momentum is None else f":{self.momentum:g}"
        return f"{self.epoch:g}:{self.batch}{momentum}"


@dataclass(frozen=True)
class Step:
    """One step of the run: `batch` images of the endless stream, from position `seen` on."""

    index: int
    seen: int
    batch: int
    epoch: float
    stage: int


def stage_at(stages: Sequence[Stage], epoch: float) -> int:
    """The index of the last stage that has begun; the first begins at once."""
    return max(index for index, stage in enumerate(stages) if index == 0 or epoch >= stage.epoch)


def step_at(
    stages: Sequence[Stage], images: int, index: int, seen: int, batch: int | None = None
) -> Step:
    """The step that begins at `seen`: as its stage says, or of another batch."""
    epoch = seen / images
    stage = stage_at(stages, epoch)
    return Step(index, seen, batch or stages[stage].batch, epoch, stage)


def steps(
    stages: Sequence[Stage],
    images: int,
    epochs: float,
    index: int = 0,
    seen: int = 0,
    batch: int | None = None,
) -> Iterator[Step]:
    """The steps of a run from `seen` on: whole batches, of their stage or all of another size,
    until every image was seen `epochs` times."""
    while seen < epochs * images:
        step = step_at(stages, images, index, seen, batch)
        yield step
        index, seen = index + 1, seen + step.batch


def count_steps(stages: Sequence[Stage], images: int, epochs: float) -> tuple[int, int]:
    """How many steps a run has and how many images they hold; the steps of `steps`, counted stage
    by stage."""
    count, seen, end = 0, 0, epochs * images
    while seen < end:
        stage = stage_at(stages, seen / images)
        batch = stages[stage].batch
        until = min(end, stages[stage + 1].epoch * images if stage + 1 < len(stages) else end)
        # All but the last of a stage at once; rounding may put the last to either side.
        more = max(1, math.ceil((until - seen) / batch) - 1)
        count, seen = count + more, seen + more * batch
    return count, seen


def dealt(step: Step, micro: int, worker: int, workers: int) -> range:
    """A worker's micro-batches of a step, as places in the endless stream of them."""
    first, count = step.seen // micro, step.batch // micro
    begin, end = _dealt_once(count, workers)[worker]
    return range(first + begin, first + end)


# A run has many steps and few batches.
_dealt_once = functools.lru_cache(maxsize=16)(deal)
