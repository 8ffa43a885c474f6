"""How gradients are summed: what a search chooses from, or a paper did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megabatch.plans import PLANS, Plan
from megabatch.plans.names import plan_of

FLAT = ("ring", "ring:halving_doubling")
PLANNED: dict[str, Plan] = {
    name: plan_of(name) for name in (*FLAT, *PLANS, "torus:halving_doubling")
}
"""the plans that a search goes through, by name"""

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


class Choices(NamedTuple):
    """The settings that a search may take: plans with their grids, bucket sizes, one wire."""

    shapes: list[tuple[str, tuple[int, int]]]
    sizes: tuple[float, ...]
    wire: str

    def settings(self) -> Iterator[Setting]:
        for shape in self.shapes:
            yield from self.of(*shape)

    def of(self, plan: str, grid: tuple[int, int]) -> Iterator[Setting]:
        """With buckets of each size."""
        for size in self.sizes:
            yield Setting(plan, grid, size, self.wire, LANES)
