"""What one rank does for a plan: phase by phase, and inside a phase exchange by exchange.

It is read off the messages that were proved and priced (plans/), once for each plan and grid.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import NamedTuple

from megabatch.plans import Group, Move, Phase, Plan, on_grid
from megabatch.plans.phase import CLOSES
from megabatch.plans.wiring import WIRINGS


class Exchange(NamedTuple):
    """What one rank sends and receives at once; `sums` is the most ranks that a message counts."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    sums: int


class RankPhase(NamedTuple):
    """One rank's part in a phase; exchanges are None where the backend does it."""

    phase: Phase
    group: Group
    sums: int
    """ranks that each member's slice counts when the phase begins"""
    exchanges: tuple[Exchange, ...] | None


@cache
def program(plan: Plan, y: int, x: int, rank: int) -> tuple[RankPhase, ...]:
    """What one rank does for a plan on a grid of y rows and x columns."""
    sums, result = 1, []
    for placed in on_grid(plan, y, x):
        phase, group, members = placed.phase, placed.group_of(rank), len(placed.groups[0].members)
        after = sums if phase.op in CLOSES else sums * members
        if group is not None and members > 1:
            exchanges = None
            if phase.via != "backend":
                together = groupby(placed.moves(rank), lambda move: move.step)
                exchanges = tuple(
                    _exchange(list(moves), phase, sums, after) for _, moves in together
                )
            result.append(RankPhase(phase, group, sums, exchanges))
        sums = after
    return tuple(result)


def _exchange(moves: list[Move], phase: Phase, before: int, after: int) -> Exchange:
    grown = WIRINGS[phase.wiring].counted(moves[0].step)
    return Exchange(
        tuple(move for move in moves if move.action == "send"),
        tuple(move for move in moves if move.action == "receive"),
        after if moves[0].op == "copy" else min(before * grown, after),
    )
