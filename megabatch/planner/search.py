"""The search over plans, grids and bucket sizes, for the fewest and the cheapest GPUs that are fast
enough, and for cliffs and waste beside a number of GPUs.

A price does not grow with the number of workers, so a search at 100,000 costs what its divisors do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import inf
from typing import Literal, NamedTuple

from megabatch.config import Config, Hybrid
from megabatch.errors import UserError, nearest
from megabatch.planner.best import Possible, best, fastest, least_work
from megabatch.planner.machine import Machine
from megabatch.planner.machine_file import load
from megabatch.planner.run import Forecast, Job
from megabatch.planner.settings import (
    BUCKETS_MB,
    HYBRID_PLAN,
    LANES,
    PLANNED,
    Choices,
    Setting,
    is_flat,
)
from megabatch.planner.step import WIRES
from megabatch.planner.workload import Workload
from megabatch.plans import PLANS
from megabatch.plans.names import CHOICES, plan_of

ROUNDING = 1 + 1e-9  # a target that is just met is met

Alternatives = Literal["plans", "grids", "buckets", "wire"]


def forecast(
    config: Config,
    machine: str | Machine,
    gpus: int,
    *,
    plan: str | None = None,
    grid: tuple[int, int] | None = None,
    bucket_mb: float | None = None,
    wire: str | None = None,
    workload: Workload | None = None,
) -> Forecast:
    """How long a run takes on so many GPUs of a machine; what is None is searched for.

    `wire` is fp32 unless the config or the caller names another: a search would always take fp16.
    """
    gpus = operator.index(gpus)  # of numpy's ranges too
    job = Job.of(config, machine, gpus, workload)
    choices = candidates(
        gpus,
        plan=plan,
        grid=grid,
        bucket_mb=bucket_mb,
        wire=wire or wire_of(config),
        hybrid=hybrid_of(config, plan),
    )
    return best(job, choices)


def wire_of(config: Config) -> str:
    """The dtype in which the config's gradients travel: that of its weights, unless it says."""
    weights = config.precision if getattr(config, "half_weights", False) else "fp32"
    named: str = getattr(config, "wire", weights)
    return named if named in WIRES else weights


def hybrid_of(config: Config, plan: str | None = None) -> Hybrid | None:
    """The config's hybrid, where its runs sum so or a caller asks for it."""
    return config.hybrid if HYBRID_PLAN in (config.plan, plan) else None


def as_configured(job: Job) -> Setting | None:
    """How a run of the config sums on the job's machine, a row of the grid being a node; None where
    it leaves that to the backend or to what was measured."""
    config, each = job.config, min(job.gpus, job.machine.workers_per_node)
    if config.plan != HYBRID_PLAN and config.plan in CHOICES:
        return None
    grid = (1, job.gpus) if is_flat(config.plan, config.hybrid) else (job.gpus // each, each)
    return Setting(config.plan, grid, config.bucket_mb, wire_of(config), LANES)


def candidates(
    gpus: int,
    *,
    plan: str | None = None,
    grid: tuple[int, int] | None = None,
    bucket_mb: float | None = None,
    wire: str = "fp32",
    hybrid: Hybrid | None = None,
) -> Choices:
    """Every plan, grid and bucket size that is left open, plan by plan; `hybrid` is one more, where
    it is given."""
    if plan is not None and plan != HYBRID_PLAN:
        if ":" not in plan and plan not in PLANS:
            raise UserError(f"there is no plan {plan!r}: {nearest(plan, [*PLANS, HYBRID_PLAN])}")
        plan_of(plan)
    if grid is not None and min(grid) < 1:
        raise UserError(f"a grid of {grid[0]} x {grid[1]} is none: give sides of 1 and more")
    if grid is not None and grid[0] * grid[1] != gpus:
        raise UserError(
            f"a grid of {grid[0]} x {grid[1]} holds {grid[0] * grid[1]} GPUs, not {gpus}"
        )
    if wire not in WIRES:
        raise UserError(f"there is no wire {wire!r}: {nearest(wire, WIRES)}")
    if bucket_mb is not None and not bucket_mb > 0:
        raise UserError(f"buckets of {bucket_mb:g} MB hold nothing: give a size above 0")
    sizes = BUCKETS_MB if bucket_mb is None else (bucket_mb,)
    lines, planes = [(1, gpus)], _grids(gpus)
    names = [*PLANNED, *([HYBRID_PLAN] if hybrid else [])] if plan is None else [plan]
    parted = hybrid or Hybrid()
    shapes = [
        (name, shape)
        for name in names
        for shape in ((lines if is_flat(name, parted) else planes) if grid is None else [grid])
    ]
    return Choices(shapes, sizes, wire)


def _grids(gpus: int) -> list[tuple[int, int]]:
    """The grids of a plan with two axes, from one worker a row on; one row of all is left out."""
    small = [side for side in range(1, int(gpus**0.5) + 1) if gpus % side == 0]
    sides = small + [gpus // side for side in reversed(small) if side * side != gpus]
    return [(gpus // side, side) for side in sides if side < gpus] or [(1, 1)]


def compare(job: Job, what: Alternatives, choices: Choices) -> list[Forecast]:
    """The best of each plan; or each grid, bucket size or wire of the best of all.

    A flat plan has one grid only, so grids are those of the best plan that has several.
    """
    if what == "plans":
        names = dict.fromkeys(plan for plan, _ in choices.shapes)
        return [best(job, _only(choices, plan=name)) for name in names]
    if what == "wire":
        return [best(job, choices._replace(wire=wire)) for wire in ("fp32", "fp16")]
    if what == "grids":
        planes = [shape for shape in choices.shapes if not is_flat(shape[0], job.config.hybrid)]
        choices = choices._replace(shapes=planes or choices.shapes)
    first = best(job, choices).setting
    same = _only(choices, plan=first.plan)
    if what == "grids":
        return [best(job, same._replace(shapes=[shape])) for shape in same.shapes]
    alone = same._replace(shapes=[(first.plan, first.grid)])
    return [job.forecast(setting) for setting in alone.settings()]


def _only(choices: Choices, plan: str) -> Choices:
    return choices._replace(shapes=[shape for shape in choices.shapes if shape[0] == plan])


# --- how many GPUs -------------------------------------------------------------------------------


class Enough(NamedTuple):
    """What ends a run in time."""

    fewest: Forecast
    cheapest: Forecast
    """by GPU hours, and so by money: often the fewest, but not where they just miss a cliff"""


def smallest(
    config: Config,
    machine: str | Machine,
    seconds: float,
    *,
    wire: str | None = None,
    workload: Workload | None = None,
) -> Forecast:
    """The forecast of the fewest whole nodes that end within so many seconds."""
    return enough(config, machine, seconds, wire=wire, workload=workload).fewest


def enough(
    config: Config,
    machine: str | Machine,
    seconds: float,
    *,
    plan: str | None = None,
    bucket_mb: float | None = None,
    wire: str | None = None,
    workload: Workload | None = None,
) -> Enough:
    """The fewest and the cheapest whole nodes that end within so many seconds.

    Time does not fall evenly with nodes, so each number is looked at; bounds that take no search
    rule most of them out.
    """
    if not seconds > 0:
        raise UserError(f"a run in {seconds:g} s cannot be: give a time above 0")
    place = load(machine) if isinstance(machine, str) else machine
    each, sent_as = place.workers_per_node, wire or wire_of(config)

    hybrid = hybrid_of(config, plan)

    def choices_on(gpus: int) -> Choices:
        return candidates(gpus, plan=plan, bucket_mb=bucket_mb, wire=sent_as, hybrid=hybrid)

    most = min(stage.batch for stage in config.all_stages) // each
    if most < 1:
        raise UserError(
            f"a batch of {config.batch} is too small for one node of {place.name}: it has "
            f"{each} workers"
        )
    first = Job.of(config, place, each, workload)
    possible = Possible(sent_as, choices_on(each).sizes, mixed=hybrid is not None)
    fewest: Forecast | None = None
    cheapest: Forecast | None = None
    for nodes in range(1, most + 1):
        gpus = nodes * each
        limit = seconds
        if cheapest is not None:
            # what a run on so many may take to be cheaper; a perfect one needs so many GPU hours
            limit = min(limit, cheapest.gpu_hours * 3600 / gpus - place.start_seconds)
            if least_work(first, gpus) > limit:
                break
        job = first.on(gpus)
        if not possible.within(job, ROUNDING * limit):
            continue
        choices = choices_on(gpus)
        if fastest(job, choices, ROUNDING * job.training_within(limit)) is None:
            continue
        cheapest = best(job, choices, most=limit)
        fewest = fewest or cheapest
    if fewest is None or cheapest is None:
        quickest = fastest_of(first, most, choices_on)
        raise UserError(
            f"no number of {place.name}'s nodes does it in {seconds:g} s: the fastest, "
            f"{quickest.gpus:,} GPUs, takes {quickest.seconds_to_target:.1f} s"
        )
    return Enough(fewest, cheapest)


def fastest_of(job: Job, most: int, choices_on: Callable[[int], Choices]) -> Forecast:
    """The fastest of up to so many nodes, among numbers of them that make good grids: products of
    twos and threes."""
    each = job.machine.workers_per_node
    round_numbers = sorted(
        2**twos * 3**threes
        for twos in range(most.bit_length())
        for threes in range(most.bit_length())
        if 2**twos * 3**threes <= most
    )
    limit, quickest = inf, each
    shapes, sizes, wire, _ = choices_on(each)
    possible = Possible(wire, sizes, mixed=any(plan == HYBRID_PLAN for plan, _ in shapes))
    for nodes in round_numbers:
        here = job.on(nodes * each)
        if limit < inf and not possible.within(here, limit):
            continue
        found = fastest(here, choices_on(here.gpus), here.training_within(limit))
        if found is not None:
            limit, quickest = here.whole_run(found[0]), here.gpus
    return best(job.on(quickest), choices_on(quickest))


def advice(job: Job, found: Forecast, wire: str) -> Iterator[str]:
    """Cliffs and waste beside a number of GPUs, in words."""
    each = job.machine.workers_per_node
    nodes = job.gpus // each
    if nodes < 2:
        return
    sizes = [fewer * each for fewer in _rounder(nodes)]
    taken, gpus = min(((_least(job.on(gpus), wire), gpus) for gpus in sizes), default=(inf, 0))
    if taken < 0.98 * found.seconds_to_target:
        longer = found.seconds_to_target / taken - 1
        yield (
            f"leave {job.gpus - gpus:,} of {job.gpus:,} GPUs idle: {gpus:,} end in "
            f"{taken:,.1f} s, and all of them take {longer:.0%} longer"
        )
        return
    half = job.on(max(1, nodes // 2) * each)
    more = _least(half, wire) / found.seconds_to_target - 1
    if more < 0.1:
        change = f"take {more:.0%} longer" if more > 0 else f"are {-more:.0%} faster"
        yield f"{half.gpus:,} GPUs, half as many, {change}: the other half is not worth its price"


def _least(job: Job, wire: str) -> float:
    """Seconds of the whole run, by the fastest setting."""
    found = fastest(job, candidates(job.gpus, wire=wire, hybrid=hybrid_of(job.config)))
    assert found is not None
    return job.whole_run(found[0])


def _rounder(nodes: int) -> Iterator[int]:
    """Numbers of nodes somewhat below that have more factors of two."""
    unit = 2
    while unit <= nodes:
        fewer = nodes // unit * unit
        if 0 < fewer < nodes and fewer > 0.6 * nodes:
            yield fewer
        unit *= 2
