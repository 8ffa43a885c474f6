"""What a forecast assumes, and how far it may be off: the ends that make its interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megabatch.planner.machine import Machine
from megabatch.planner.pace import is_measured
from megabatch.planner.workload import Workload


@dataclass(frozen=True)
class Doubt:
    """How many times as large something assumed may be."""

    latency: float = 1.0
    bandwidth: float = 1.0
    jitter: float = 1.0
    curve: float = 1.0
    """the fixed cost of a pass, where one size was measured"""
    speed: float = 1.0
    """of a pass"""
    rest: float = 1.0
    """evaluation and pauses"""
    total: float = 1.0
    """the time of the run"""


CERTAIN = Doubt()


def assumed_ranges(
    machine: Machine, workload: Workload, gpus: int
) -> Iterator[tuple[Doubt, Doubt]]:
    """What is assumed of a machine and a model, at the ends of its range."""
    yield Doubt(latency=0.5), Doubt(latency=2.0)
    yield Doubt(jitter=0.5), Doubt(jitter=2.0)
    yield Doubt(rest=0.3), Doubt(rest=4.0)
    if machine.network and gpus > machine.workers_per_node:
        less, more = machine.network.range
        yield Doubt(bandwidth=more), Doubt(bandwidth=less)
    if not is_measured(machine, workload):
        spread = machine.generation.spread
        yield Doubt(curve=1 / spread), Doubt(curve=spread)
    if all(row.assumed or row.model != workload.name for row in machine.rates):
        yield Doubt(speed=1 / 1.35), Doubt(speed=1.35)
    # runs of one machine differ by a few per cent; clusters lose more than is modelled
    clustered = gpus > machine.workers_per_node
    yield Doubt(total=0.95), Doubt(total=1.15 if clustered else 1.06)


def shifted(machine: Machine, doubt: Doubt) -> Machine:
    """The machine with its links as a doubt has them."""
    if doubt.latency == doubt.bandwidth == 1.0:
        return machine
    slower: dict[str, Any] = {
        level: replace(link, latency_seconds=link.latency_seconds * doubt.latency)
        for level in ("node", "network", "spine")
        if (link := getattr(machine, level)) is not None
    }
    if machine.network is not None:
        flow = machine.network.flow_bytes_per_second
        slower["network"] = replace(
            slower["network"],
            bytes_per_second=machine.network.bytes_per_second * doubt.bandwidth,
            flow_bytes_per_second=None if flow is None else flow * doubt.bandwidth,
        )
    return replace(machine, **slower)
