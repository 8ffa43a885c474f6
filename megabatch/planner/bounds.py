"""Prices that no plan beats, found without walking through grids and phases: a search looks only at
what they leave open. The tests hold them to the prices of every plan and grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from megabatch.planner.cost import Price, SecondsPerByte, hop_latencies
from megabatch.planner.machine import Machine
from megabatch.plans.phase import Plan


def least_latency(plan: Plan, y: int, x: int, machine: Machine) -> float:
    """Of a plan on a grid: hops that reach further than a node is wide surely leave it."""
    near, far = _hops(machine)
    inside = near if machine.node else far
    each, total = machine.workers_per_node, 0.0
    for phase in plan:
        members, stride = {"x": (x, 1), "y": (y, x), "xy": (y * x, 1)}[phase.axis]
        if members == 1:
            continue
        if phase.wiring == "ring":
            count = members - 1
            leaving = count if stride >= each else max(0, members * stride // each - 1)
        else:
            count = (members - 1).bit_length()
            leaving = max(
                0, count - (max(each // stride, 1) - 1).bit_length() - (each % stride > 0)
            )
        ways = 2 if phase.op == "all_reduce" else 1
        total += machine.launch_seconds + ways * (inside * (count - leaving) + far * leaving)
    return total


def least_prices(gpus: int, machine: Machine) -> Iterator[Price]:
    """Of any plan on any grid of so many workers: its price is no less than one of these in both of
    its parts."""
    near, far = _hops(machine)
    nodes = max(1, gpus // machine.workers_per_node)
    # News doubles its reach with each hop, there and back.
    between = (nodes - 1).bit_length()
    hops = near * ((gpus - 1).bit_length() - between) + far * between
    if nodes == 1:
        yield Price(machine.launch_seconds + 2 * hops, 0.0)
        return
    # All that a node gives goes through its NICs.
    nics = SecondsPerByte.of(machine).nics
    out = (nodes - 1) / nodes * nics
    yield Price(machine.launch_seconds + 2 * hops, 2 * (out + _halving_more(gpus, machine)))
    # Rings from node to node take a hop for each, those of columns shorter where rows are longer.
    row = max(machine.workers_per_node, sqrt(gpus * far / near)) if near else float(gpus)
    ring = min((nodes - 1) * far, max(0.0, row - 1) * near + max(0.0, gpus / row - 1) * far)
    yield Price(machine.launch_seconds + 2 * max(hops, ring), 2 * out)


def _halving_more(gpus: int, machine: Machine) -> float:
    """Seconds a byte, one way, beside what goes through the NICs if columns go by halving and
    doubling, on nodes of a power of two."""
    each, rack = machine.workers_per_node, machine.workers_per_rack
    if each & (each - 1) or gpus % each:
        return 0.0
    per_byte = SecondsPerByte.of(machine)
    largest = 1 << gpus.bit_length() - 1
    # inside a node, one distance after the other; or over the NICs, if rows lie across nodes
    more = (each - 1) / each * min(per_byte.inside, per_byte.nics)
    flows, smallest_block = each * per_byte.nics, gpus & -gpus
    if rack and gpus > rack:
        # swaps that are wider than half a rack all leave it
        wide = 1 << rack.bit_length() - 1
        crossing = max(flows, rack * per_byte.uplinks)
        more += max(0.0, 1 / wide - 1 / largest) * (crossing - flows)
        if 4 * smallest_block > rack:
            flows = crossing
    if smallest_block != gpus:
        # the smallest block hands its slices to a larger one, in place of a swap at most
        more += 0.75 / smallest_block * flows
    return more


def _hops(machine: Machine) -> tuple[float, float]:
    """The least latency of any hop, and of one that leaves a node."""
    near, far, farthest = hop_latencies(machine)
    far = min(far, farthest)
    return min(near, far) if machine.node else far, far
