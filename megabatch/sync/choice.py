"""Which plan a tensor of a given size takes: one for all, by thresholds, or as measured here.

The best plan depends on the size (Jia et al. 2018 call their choice by size hybrid): small tensors
want few steps, large ones few bytes on the slow wires.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from megabatch.config import Hybrid
from megabatch.config.settings import shown
from megabatch.errors import UserError
from megabatch.plans import Phase, Plan, check
from megabatch.plans.names import check as check_name
from megabatch.plans.names import named

# The config's: measured between hosts at 200 Mbit/s; `megabatch bench sync` finds the thresholds of
# another network, and the recipes after Jia have the paper's two plans.
HYBRID = Hybrid().thresholds


@dataclass(frozen=True)
class Choice:
    """Plans by size: the first row whose limit is not below the size; the last has no limit."""

    rows: tuple[tuple[int | None, Plan], ...]

    def plan(self, nbytes: int) -> Plan:
        limits = [math.inf if limit is None else limit for limit, _ in self.rows]
        return self.rows[bisect_left(limits, nbytes)][1]

    def digest(self) -> str:
        """For comparing what two ranks chose."""
        return sha256(repr(self.rows).encode()).hexdigest()


def choose_plan(
    plan: str | Plan,
    backend: str,
    *,
    thresholds: Iterable[tuple[int | None, str]] = HYBRID,
    machine: str | Path = "machine.json",
    grid: tuple[int, int] = (1, 1),
) -> Choice:
    """What a setting means: a name, "hybrid" (by thresholds), "auto" (as measured) or phases."""
    if not isinstance(plan, str):
        if not isinstance(plan, tuple) or not all(isinstance(phase, Phase) for phase in plan):
            raise UserError(f"plan is {shown(plan)}: give a name, torus say, or phases in a tuple")
        try:
            check(plan)
        except ValueError as error:
            raise UserError(f"this plan is no all-reduce: {error}") from None
        return Choice(((None, plan),))
    if plan == "auto":
        return measured(machine, grid)
    if plan == "hybrid":
        rows = tuple((limit, named(name, backend)) for limit, name in thresholds)
        sizes = [math.inf if limit is None else limit for limit, _ in rows]
        if not rows or rows[-1][0] is not None or sizes != sorted(set(sizes)):
            raise UserError(
                "thresholds must grow and end with (None, plan), the plan of all larger tensors"
            )
        return Choice(rows)
    check_name(plan)
    return Choice(((None, named(plan, backend)),))


def measured(machine: str | Path, grid: tuple[int, int]) -> Choice:
    """The fastest plan of each size that `megabatch bench sync` measured on this grid.

    A size between two measured ones takes the plan of the nearer, by ratio.
    """
    advice = f"run megabatch bench sync --machine {machine} on the same workers"
    try:
        rows = json.loads(Path(machine).read_text()).get("plans", [])
    except FileNotFoundError:
        raise UserError(f"plan auto needs {machine}, which does not exist: {advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"plan auto cannot read {machine}: {error}") from None
    try:
        return fastest_by_size([row for row in rows if tuple(row["grid"]) == tuple(grid)])
    except (KeyError, TypeError, ValueError):
        shape = f"{grid[0]} x {grid[1]}"
        raise UserError(f"{machine} has no plans measured on a {shape} grid: {advice}") from None


def fastest_by_size(rows: Iterable[Mapping[str, Any]]) -> Choice:
    """From rows with nbytes, plan (a name with its wiring) and seconds."""
    best: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        nbytes = row["nbytes"]
        if nbytes not in best or row["seconds"] < best[nbytes]["seconds"]:
            best[nbytes] = row
    if not best:
        raise ValueError("nothing was measured")
    sizes = sorted(best)
    limits = [math.isqrt(a * b) for a, b in pairwise(sizes)]
    plans = [named(best[size]["plan"], "gloo") for size in sizes]
    return Choice(tuple(zip([*limits, None], plans, strict=True)))
