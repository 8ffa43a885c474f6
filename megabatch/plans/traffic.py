"""What a plan costs on the wire: steps and bytes, counted from its messages.

Bytes are exact fractions, as if a tensor could be cut anywhere; a run rounds to whole elements.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import lcm
from typing import NamedTuple

from megabatch.plans.axis import exchange
from megabatch.plans.grid import on_grid
from megabatch.plans.message import steps_in
from megabatch.plans.phase import PLANS, RING, Op, Phase, Plan, through


class Leg(NamedTuple):
    """One phase on the wire; `nbytes` adds up, over its steps, the most that any rank sends.

    In lock step the phase takes steps * latency + nbytes / bandwidth.
    """

    phase: Phase
    steps: int
    nbytes: Fraction


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that each rank sends in all, and the plan leg by leg."""

    sent: tuple[Fraction, ...]
    legs: tuple[Leg, ...]

    @property
    def steps(self) -> int:
        return sum(leg.steps for leg in self.legs)

    @property
    def busiest(self) -> Fraction:
        return max(self.sent)


def wire(plan: Plan, nbytes: int, y: int, x: int) -> Wire:
    """Price a plan; groups of one size are counted once, so thousands of ranks are no trouble."""
    sent = [Fraction(0)] * (y * x)
    legs = []
    for placed in on_grid(plan, y, x):
        steps, lock_step = 0, Fraction(0)
        for group in placed.groups:
            traffic = _traffic(placed.phase.op, placed.phase.wiring, len(group.members))
            group_bytes = nbytes * group.slice.share
            for rank, fraction in zip(group.members, traffic.sent, strict=True):
                sent[rank] += fraction * group_bytes
            steps = max(steps, traffic.steps)
            lock_step = max(lock_step, traffic.lock_step * group_bytes)
        legs.append(Leg(placed.phase, steps, lock_step))
    return Wire(tuple(sent), tuple(legs))


class _Traffic(NamedTuple):
    """One collective, in shares of the group's slice."""

    steps: int
    sent: list[Fraction]
    lock_step: Fraction


@cache
def _traffic(op: Op, wiring: str, members: int) -> _Traffic:
    # Turned by one place, a ring is the same ring (a chain is not): one member's messages stand for
    # all, and a flat ring of 3,456 takes 7 thousand of them instead of 24 million.
    alike = wiring == "ring" and op not in ("reduce", "broadcast")
    messages = exchange(op, wiring, members, range(1 if alike else members))
    chunks = lcm(*(message.slice.of for message in messages))
    load: Counter[tuple[int, int]] = Counter()
    for message in messages:
        start, stop = message.slice.bounds(chunks)
        load[message.step, message.source] += stop - start
    sent = [0] * members
    most = [0] * steps_in(messages)
    for (step, source), width in load.items():
        sent[source] += width
        most[step] = max(most[step], width)
    if alike:
        sent = [sum(sent)] * members
    fractions = [Fraction(width, chunks) for width in sent]
    return _Traffic(len(most), fractions, Fraction(sum(most), chunks))


def table() -> str:
    """The table of docs/algorithms.md: steps / bytes of the busiest rank in units of the tensor."""
    plans = {"ring": RING, "halving-doubling": through(RING, "halving_doubling")} | PLANS
    grids = [(2, 4), (3, 5), (32, 8), (64, 16), (34, 64), (32, 68), (48, 72), (54, 64)]
    rows = [["Y x X", "P", *plans], ["---"] * (2 + len(plans))]
    for y, x in grids:
        prices = [wire(plan, 1, y, x) for plan in plans.values()]
        cells = [f"{price.steps} / {float(price.busiest):.3f}" for price in prices]
        rows.append([f"{y} x {x}", str(y * x), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
