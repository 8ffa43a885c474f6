"""The search over plans, grids and bucket sizes, and for the smallest cluster that is fast enough.

A price does not grow with the number of workers, so a search at 100,000 costs what its divisors do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from megabatch.config import Config
from megabatch.errors import UserError, nearest
from megabatch.planner.machine import Machine, load
from megabatch.planner.run import FLAT, LANES, PLANNED, Forecast, Job, Setting
from megabatch.planner.step import WIRES
from megabatch.planner.workload import Workload
from megabatch.plans.names import plan_of

BUCKETS_MB = (1.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 1000.0)

Comparison = Literal["plans", "grids", "buckets", "wire"]


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
    job = Job.of(config, machine, gpus, workload)
    settings = candidates(
        gpus, plan=plan, grid=grid, bucket_mb=bucket_mb, wire=wire or wire_of(config)
    )
    return job.best(settings)


def wire_of(config: Config) -> str:
    """The dtype in which the config's gradients travel: that of its weights, unless it says."""
    weights = config.precision if getattr(config, "half_weights", False) else "fp32"
    named: str = getattr(config, "wire", weights)
    return named if named in WIRES else weights


def candidates(
    gpus: int,
    *,
    plan: str | None = None,
    grid: tuple[int, int] | None = None,
    bucket_mb: float | None = None,
    wire: str = "fp32",
) -> Iterator[Setting]:
    """Every plan, grid and bucket size that is left open, plan by plan."""
    if plan is not None:
        plan_of(plan)
    if grid is not None and grid[0] * grid[1] != gpus:
        raise UserError(
            f"a grid of {grid[0]} x {grid[1]} holds {grid[0] * grid[1]} GPUs, not {gpus}"
        )
    if wire not in WIRES:
        raise UserError(f"there is no wire {wire!r}: {nearest(wire, WIRES)}")
    for name in PLANNED if plan is None else (plan,):
        for shape in grids(name, gpus) if grid is None else (grid,):
            for size in BUCKETS_MB if bucket_mb is None else (bucket_mb,):
                yield Setting(name, shape, size, wire, LANES)


def grids(plan: str, gpus: int) -> list[tuple[int, int]]:
    """The grids that mean something: one line for a flat plan, else two sides of two and more."""
    if gpus < 4 or all(phase.axis == "xy" for phase in plan_of(plan)):
        return [(1, gpus)]
    sides = [side for side in _divisors(gpus) if 1 < side < gpus]
    return [(gpus // side, side) for side in sides] or [(1, gpus)]


def _divisors(number: int) -> list[int]:
    small = [side for side in range(1, int(number**0.5) + 1) if number % side == 0]
    return small + [number // side for side in reversed(small) if side * side != number]


def compare(job: Job, what: Comparison, settings: list[Setting]) -> list[Forecast]:
    """The best of each plan; or each grid, bucket size or wire of the best of all.

    A flat plan has one grid only, so grids are those of the best plan that has several.
    """
    if what == "plans":
        names = dict.fromkeys(setting.plan for setting in settings)
        return [job.best(s for s in settings if s.plan == name) for name in names]
    if what == "grids":
        settings = [s for s in settings if s.plan not in FLAT] or settings
    best = job.best(settings).setting
    if what == "grids":
        same = [s for s in settings if s.plan == best.plan]
        shapes = dict.fromkeys(s.grid for s in same)
        return [job.best(s for s in same if s.grid == shape) for shape in shapes]
    if what == "buckets":
        return [job.forecast(s) for s in settings if (s.plan, s.grid) == (best.plan, best.grid)]
    return [job.best(replace(s, wire=wire) for s in settings) for wire in ("fp32", "fp16")]


def smallest(
    config: Config,
    machine: str | Machine,
    seconds: float,
    *,
    wire: str | None = None,
    workload: Workload | None = None,
) -> Forecast:
    """The forecast of the fewest whole nodes that end within so many seconds.

    Node counts grow by a quarter until one is enough; the last gap is then gone through by halves.
    """
    place = load(machine) if isinstance(machine, str) else machine
    most = min(stage.batch for stage in config.all_stages) // place.workers_per_node

    def of(nodes: int) -> Forecast:
        gpus = nodes * place.workers_per_node
        return forecast(config, place, gpus, wire=wire, workload=workload)

    low, high, fastest = 0, 1, None
    while high <= most:
        found = of(high)
        if fastest is None or found.seconds_to_target < fastest.seconds_to_target:
            fastest = found
        if found.seconds_to_target <= seconds:
            break
        low, high = high, high + max(1, high // 4)
    else:
        if fastest is None:
            raise UserError(
                f"a batch of {config.batch} is too small for one node of {place.name}: it has "
                f"{place.workers_per_node} workers"
            )
        raise UserError(
            f"no number of {place.name}'s nodes does it in {seconds:g} s: the fastest, "
            f"{fastest.gpus:,} GPUs, takes {fastest.seconds_to_target:.1f} s"
        )
    while high - low > 1:
        middle = (low + high) // 2
        found = of(middle)
        if found.seconds_to_target <= seconds:
            high = middle
        else:
            low = middle
    return of(high)
