"""A plan on a grid: who does each phase with whom, and all messages of the plan.

A phase acts in every row or column at once, on the slice that the phases before it left there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megabatch.plans.axis import exchange, held
from megabatch.plans.message import WHOLE, Message, Slice, delay, in_order, steps_in
from megabatch.plans.phase import CLOSES, Axis, Phase, Plan, check


class Move(NamedTuple):
    """A message as one of its two ranks sees it."""

    step: int
    peer: int
    slice: Slice
    action: Literal["send", "receive"]
    op: Literal["add", "copy"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that do a phase together, in this order, on one slice of the tensor."""

    members: tuple[int, ...]
    slice: Slice


@dataclass(frozen=True, slots=True)
class GridPhase:
    """A phase and its groups; a rank in none of them waits.

    A backend's reduce_scatter leaves piece i of the group's slice with member i, and its all_gather
    finds it there; its reduce and broadcast have member 0 for root.
    """

    phase: Phase
    groups: tuple[Group, ...]

    def group_of(self, rank: int) -> Group | None:
        return next((group for group in self.groups if rank in group.members), None)

    def messages(self) -> list[Message]:
        """Ordered by step, counted from 0."""
        return in_order(message for group in self.groups for message in self._within(group))

    def moves(self, rank: int) -> list[Move]:
        """What one rank does, ordered by step; within a step all its sends come first."""
        group = self.group_of(rank)
        messages = self._within(group) if group else []
        sends = [
            Move(step, destination, part, "send", op)
            for step, source, destination, part, op in messages
            if source == rank
        ]
        receives = [
            Move(step, source, part, "receive", op)
            for step, source, destination, part, op in messages
            if destination == rank
        ]
        return sorted(sends + receives, key=lambda move: move.step)

    def _within(self, group: Group) -> list[Message]:
        members = group.members
        local = exchange(self.phase.op, self.phase.wiring, len(members), range(len(members)))
        return [
            Message(step, members[source], members[destination], part.within(group.slice), op)
            for step, source, destination, part, op in local
        ]


def on_grid(plan: Plan, y: int, x: int) -> list[GridPhase]:
    """The phases of a plan on a grid of y rows and x columns."""
    check(plan)
    if y < 1 or x < 1:
        raise ValueError(f"a grid has at least one row and one column, not {y} x {x}")
    slices = dict.fromkeys(range(y * x), WHOLE)
    opened: list[tuple[tuple[Group, ...], dict[int, Slice]]] = []
    result = []
    for phase in plan:
        if phase.op in CLOSES:
            groups, slices = opened.pop()  # up again with those we came down with
        else:
            groups = _lines(slices, phase.axis, x)
            if phase.op != "all_reduce":
                opened.append((groups, slices))
                slices = _go_down(phase, groups)
        result.append(GridPhase(phase, groups))
    return result


def lower(plan: Plan, y: int, x: int) -> list[Message]:
    """All messages of a plan, ordered by step; in a step all sends go before any receive.

    In one step no rank sends and receives the same elements, and no two ranks exchange more than
    one message each way, so a run needs neither a spare copy nor message tags.
    """
    messages: list[Message] = []
    for placed in on_grid(plan, y, x):
        messages += delay(placed.messages(), steps_in(messages[-1:]))
    return messages


def _lines(slices: dict[int, Slice], axis: Axis, x: int) -> tuple[Group, ...]:
    """Ranks that hold something, line by line; those of one line hold the same slice."""
    lines = defaultdict(list)
    for rank in slices:
        lines[{"x": rank // x, "y": rank % x, "xy": 0}[axis]].append(rank)
    return tuple(Group(tuple(line), slices[line[0]]) for line in lines.values())


def _go_down(phase: Phase, groups: Iterable[Group]) -> dict[int, Slice]:
    return {
        rank: part.within(group.slice)
        for group in groups
        for place, rank in enumerate(group.members)
        if (part := held(phase.op, phase.wiring, place, len(group.members)))
    }
