"""The grammar of plan names, one for the config, the trainer, the planner and the docs.

PLAN is one of PLANS, PLAN:WIRING is the same with every phase done one way (torus:halving_doubling,
say); backend, hybrid and auto name no single plan: they leave the choice to the backend, to
thresholds of size, or to what was measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megabatch.errors import UserError, nearest
from megabatch.plans.phase import PLANS, VIAS, Plan, through

CHOICES = ("backend", "hybrid", "auto")
"""settings of a plan that name no single one"""


@cache
def plan_of(name: str) -> Plan:
    """The plan of a name, as it is written: "torus" or "torus:halving_doubling"."""
    plan, colon, via = name.partition(":")
    if plan not in PLANS:
        raise UserError(f"there is no plan {plan!r}: {nearest(plan, PLANS)}")
    if not colon:
        return PLANS[plan]
    if via not in VIAS:
        raise UserError(f"there is no wiring {via!r}: {nearest(via, VIAS)}")
    return through(PLANS[plan], via)


def named(name: str, backend: str) -> Plan:
    """The plan of a name as `backend` (gloo or nccl) runs it.

    Without a wiring, what a plan leaves to the backend goes by rings of our own on gloo: its
    reduce-scatter moves as much as an all-reduce.
    """
    plan = plan_of(name)
    if backend != "gloo" or ":" in name:
        return plan
    return tuple(replace(p, via="ring") if p.via == "backend" else p for p in plan)


def check(name: str) -> None:
    """Refuse what neither names a plan nor leaves the choice to someone, with the nearest name."""
    if name in CHOICES:
        return
    if ":" not in name and name not in PLANS:
        raise UserError(f"there is no plan {name!r}: {nearest(name, [*PLANS, *CHOICES])}")
    plan_of(name)
