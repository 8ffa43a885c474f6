"""How gradients are summed: what a search chooses from, or a paper did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from megabatch.config import Hybrid
from megabatch.plans import PLANS, Plan
from megabatch.plans.names import plan_of

FLAT = ("ring", "ring:halving_doubling")
PLANNED: dict[str, Plan] = {
    name: plan_of(name) for name in (*FLAT, *PLANS, "torus:halving_doubling")
}
"""the plans that a search goes through, by name"""
HYBRID_PLAN = "hybrid"
"""the name of a choice by size"""

BUCKETS_MB = (1.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 1000.0)

LANES = 3  # of the trainer's engine (execute.py); buckets in them hide each other's latency


@dataclass(frozen=True)
class Setting:
    """One way to sum gradients."""

    plan: str
    grid: tuple[int, int]
    """rows and columns"""
    bucket_mb: float
    wire: str = "fp32"
    lanes: int = 1
    overlap: bool = True


def ways(plan: str, hybrid: Hybrid) -> tuple[tuple[float, Plan], ...]:
    """The plans that a name stands for, each up to so many bytes on the wire: one of any size, or
    the two of a hybrid, by the thresholds that the trainer goes by (sync/choice.py)."""
    if plan != HYBRID_PLAN:
        return ((inf, plan_of(plan)),)
    return tuple(
        (inf if limit is None else limit, plan_of(name)) for limit, name in hybrid.thresholds
    )


def is_flat(plan: str, hybrid: Hybrid) -> bool:
    """One line of all workers: no grid means anything to it."""
    return all(phase.axis == "xy" for _, phases in ways(plan, hybrid) for phase in phases)


class Choices(NamedTuple):
    """The settings that a search may take: plans with their grids, bucket sizes, one wire, one
    number of lanes."""

    shapes: list[tuple[str, tuple[int, int]]]
    sizes: tuple[float, ...]
    wire: str
    lanes: int = LANES

    def settings(self) -> Iterator[Setting]:
        for shape in self.shapes:
            yield from self.of(*shape)

    def of(self, plan: str, grid: tuple[int, int]) -> Iterator[Setting]:
        """With buckets of each size."""
        for size in self.sizes:
            yield Setting(plan, grid, size, self.wire, self.lanes)
