"""The best setting of one job: the fastest of all plans, grids and buckets, and of its equals the
one least at risk. Bounds rule most of them out before they are priced.
"""

from __future__ import annotations

from math import inf
from typing import Any

from megabatch.planner.bounds import least_latency, least_prices
from megabatch.planner.cost import BySize, Price
from megabatch.planner.doubt import Doubt
from megabatch.planner.run import Forecast, Job
from megabatch.planner.settings import BUCKETS_MB, Choices, Setting, ways
from megabatch.planner.step import FORWARD


def best(job: Job, choices: Choices, most: float = inf) -> Forecast:
    """The forecast of the fastest; of those within 1 % of it, the one least at risk.

    Risk is the time with latencies and jitter doubled: of equals, small buckets lose. None that
    makes the whole run take longer than `most` is chosen, unless all do.
    """
    found = fastest(job, choices)
    assert found is not None
    quickest, _ = found
    limit = max(quickest, min(1.01 * quickest, job.training_within(most)))
    near = [
        setting
        for plan, grid in choices.shapes
        if _beside(job, _least_latency(job, plan, grid), 0.0) <= limit
        and at_least(job, job.price(Setting(plan, grid, inf)).least, choices.wire) <= limit
        for setting in choices.of(plan, grid)
        if job.train_seconds(setting) <= limit
    ]
    worse = job.if_so(Doubt(latency=2.0, jitter=2.0))
    return job.forecast(min(near, key=worse.train_seconds))


def fastest(job: Job, choices: Choices, limit: float = inf) -> tuple[float, Setting] | None:
    """The least time of training and the setting that takes it; None if it is not below the limit.
    What cannot beat the best so far is not looked at."""
    found: tuple[float, Setting] | None = None
    order = sorted(
        (_beside(job, _least_latency(job, plan, grid), 0.0), number)
        for number, (plan, grid) in enumerate(choices.shapes)
    )
    for bound, number in order:
        if bound >= limit:
            break
        plan, grid = choices.shapes[number]
        cost = job.price(Setting(plan, grid, inf)).least
        if at_least(job, cost, choices.wire) >= limit:
            continue
        for setting in choices.of(plan, grid):
            if at_least(job, cost, choices.wire, setting.bucket_mb) >= limit:
                continue
            seconds = job.train_seconds(setting)
            if seconds < limit:
                found, limit = (seconds, setting), seconds
    return found


# --- what no setting beats -----------------------------------------------------------------------


class Possible:
    """Whether a run may end in time, as far as can be said without a search: by the least prices
    that any plan has, and buckets of any size. Asked for more and more GPUs of one machine."""

    def __init__(
        self, wire: str, sizes: tuple[float, ...] = BUCKETS_MB, mixed: bool = False
    ) -> None:
        """`sizes`: that a bucket may have; `mixed`: one may go by another plan than the next."""
        self._wire, self._sizes, self._mixed = wire, sizes, mixed
        self._least: dict[tuple[Any, ...], float] = {}

    def within(self, job: Job, seconds: float) -> bool:
        """The whole run, within so many seconds."""
        limit = job.training_within(seconds)
        if _beside(job, 0.0, 0.0) > limit:
            return False
        if job.gpus == 1:
            return True
        # With passes of the same sizes and as many hops, more workers are faster in input alone.
        like = self._like(job)
        if self._least.get(like, 0.0) > limit:
            return False
        least = inf
        prices = tuple(least_prices(job.gpus, job.wires))
        if self._mixed:
            prices = (BySize(tuple((inf, cost) for cost in prices)).least,)
        for latency, pace, *_ in prices:
            cost = Price(latency, pace + job.touching_seconds_per_byte)
            bound = at_least(job, cost, self._wire)
            if bound > limit:
                least = min(least, bound)
                continue
            for setting in Choices([], self._sizes, self._wire).of("ring", (1, job.gpus)):
                bound = at_least(job, cost, self._wire, setting.bucket_mb)
                if bound <= limit:
                    bound = job.train_seconds(setting, cost)
                if bound <= limit:
                    return True
                least = min(least, bound)
        if all(stretch.input_seconds <= stretch.compute_seconds for stretch in job.stretches):
            self._least[like] = least
        return False

    @staticmethod
    def _like(job: Job) -> tuple[Any, ...]:
        nodes = job.gpus // job.machine.workers_per_node
        hops = (job.gpus - 1).bit_length(), (nodes - 1).bit_length(), job.gpus & -job.gpus
        return *hops, *((stretch.passes, stretch.micro) for stretch in job.stretches)


def least_work(job: Job, gpus: int) -> float:
    """Seconds of a run on so many workers if a pass had no fixed cost and nothing were sent."""
    seen = sum(stretch.steps * stretch.batch for stretch in job.stretches)
    return seen * job.pace.seconds(job.largest) / job.largest / gpus


def at_least(job: Job, cost: Price, wire: str, bucket_mb: float | None = None) -> float:
    """A time of training that a price cannot beat with such buckets (None: with any): the last one
    is full when backward ends, and all of them must go over the wire."""
    on_wire = cost.latency + cost.seconds_per_byte * job.nbytes(wire)
    if bucket_mb is None or job.gpus == 1:
        return _beside(job, cost.latency, on_wire)
    full = job.buckets(bucket_mb, wire)
    last = cost.latency + cost.seconds_per_byte * full[-1].nbytes
    return _beside(job, last, on_wire, full[0].ready)


def _beside(job: Job, behind: float, on_wire: float, first_ready: float = 0.0) -> float:
    """Training if so much follows backward and so much follows its first bucket, at least."""
    total = 0.0
    for stretch in job.stretches:
        backward = (1 - first_ready) * (1 - FORWARD) * stretch.pass_seconds
        busy = stretch.compute_seconds * (1 + job.slowest) + max(behind, on_wire - backward, 0.0)
        total += stretch.steps * max(busy, stretch.input_seconds)
    return total


def _least_latency(job: Job, plan: str, grid: tuple[int, int]) -> float:
    if job.gpus == 1:
        return 0.0
    phases = (phases for _, phases in ways(plan, job.config.hybrid))
    return min(least_latency(one, *grid, job.wires) for one in phases)
