"""An all-reduce is a value: a tuple of phases, lowered to messages that are proved, priced and run.

Read phase, wiring, axis, grid, then proof and price; docs/algorithms.md names the papers and counts
the steps and bytes of each plan, and `python -m megabatch.plans` prints its table.
"""

from megabatch.plans.grid import GridPhase, Group, Move, lower, on_grid
from megabatch.plans.message import Message, Slice
from megabatch.plans.phase import (
    BLUECONNECT,
    HIERARCHICAL,
    PLANS,
    RING,
    THREE_PHASE,
    TORUS,
    Phase,
    Plan,
    check,
    through,
)
from megabatch.plans.proof import Tree, bracketing, follows_tree, prove, verify
from megabatch.plans.traffic import Leg, Wire, table, wire

__all__ = [
    "BLUECONNECT",
    "HIERARCHICAL",
    "PLANS",
    "RING",
    "THREE_PHASE",
    "TORUS",
    "GridPhase",
    "Group",
    "Leg",
    "Message",
    "Move",
    "Phase",
    "Plan",
    "Slice",
    "Tree",
    "Wire",
    "bracketing",
    "check",
    "follows_tree",
    "lower",
    "on_grid",
    "prove",
    "table",
    "through",
    "verify",
    "wire",
]
