"""What a plan is: phases that go down one axis of a grid, all-reduce the other and come back up.

Hierarchical is Jia et al. 2018, three-phase Goyal et al. 2017 (section 4), the 2D torus Mikami et
al. 2018 and BlueConnect Cho et al. 2019.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from megabatch.plans.wiring import WIRINGS

Op = Literal["reduce", "broadcast", "reduce_scatter", "all_gather", "all_reduce"]
Axis = Literal["x", "y", "xy"]
VIAS = ("backend", *WIRINGS)
"""how a phase may be done: by the backend's own collective, or by a wiring of ours"""

# A phase that comes up, and the one that it closes.
CLOSES: dict[Op, Op] = {"broadcast": "reduce", "all_gather": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One collective in every row ("x"), every column ("y") or among all ranks ("xy") of a grid.

    In a grid of y rows and x columns, rank i * x + j stands in row i, column j. The grid is not
    the node: a 32 x 32 grid may run on 4-GPU nodes, and only the planner maps grids to wires.
    """

    op: Op
    axis: Axis
    via: str = "backend"

    def __post_init__(self) -> None:
        known = ((self.op, get_args(Op)), (self.axis, get_args(Axis)), (self.via, VIAS))
        for value, values in known:
            if value not in values:
                raise ValueError(f"{value!r} is not one of {', '.join(values)}")

    def __str__(self) -> str:
        return f"{self.op} on {self.axis}"

    @property
    def wiring(self) -> str:
        """Who sends to whom; a backend (NCCL, gloo) is taken for a ring, its model here."""
        return "ring" if self.via == "backend" else self.via


Plan: TypeAlias = tuple[Phase, ...]

RING: Plan = (Phase("all_reduce", "xy"),)
HIERARCHICAL: Plan = (Phase("reduce", "x"), Phase("all_reduce", "y"), Phase("broadcast", "x"))
TORUS: Plan = (Phase("reduce_scatter", "x"), Phase("all_reduce", "y"), Phase("all_gather", "x"))
THREE_PHASE: Plan = (
    Phase("reduce", "x"),
    Phase("all_reduce", "y", via="halving_doubling"),
    Phase("broadcast", "x"),
)
BLUECONNECT: Plan = (
    Phase("reduce_scatter", "x"),
    Phase("reduce_scatter", "y"),
    Phase("all_gather", "y"),
    Phase("all_gather", "x"),
)
PLANS: dict[str, Plan] = {
    "ring": RING,
    "hierarchical": HIERARCHICAL,
    "torus": TORUS,
    "three_phase": THREE_PHASE,
    "blueconnect": BLUECONNECT,
}


def through(plan: Plan, via: str) -> Plan:
    """The same plan with every phase done one way."""
    return tuple(replace(phase, via=via) for phase in plan)


def check(plan: Plan) -> None:
    """Raise ValueError with the reason unless brackets close and each axis is summed once."""
    unsummed = {"x", "y"}
    opened: list[Phase] = []
    for phase in plan:
        if phase.op in CLOSES:
            _close(phase, opened)
            continue
        if not set(phase.axis) <= unsummed:
            raise ValueError(f"{phase} sums over an axis that is summed already")
        unsummed -= set(phase.axis)
        if phase.op != "all_reduce":
            opened.append(phase)
    if opened:
        raise ValueError(f"{opened[-1]} is never closed, so not every rank gets the sum")
    if unsummed:
        raise ValueError(f"nothing sums over {' and '.join(sorted(unsummed))}")


def _close(phase: Phase, opened: list[Phase]) -> None:
    if not opened:
        raise ValueError(f"{phase} closes nothing: no {CLOSES[phase.op]} is open before it")
    inner = opened.pop()
    if (inner.op, inner.axis) != (CLOSES[phase.op], phase.axis):
        raise ValueError(f"{phase} cannot close {inner}, the innermost open phase")
    # A reduce leaves everything with member 0 by any wiring; a reduce-scatter does not.
    if inner.op == "reduce_scatter" and inner.wiring != phase.wiring:
        raise ValueError(
            f"{phase} via {phase.via} looks for its slices elsewhere "
            f"than {inner.op} via {inner.via} left them"
        )
