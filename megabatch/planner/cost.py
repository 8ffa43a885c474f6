"""What a plan costs on a machine: each phase priced over the links that its messages cross.

A collective takes `latency + seconds_per_byte * nbytes`; both are found without walking through the
ranks, so the price of 100,000 of them costs no more than that of eight. The tests hold it to the
messages of `plans.lower`. (The cost model of Thakur 2005, on the rings and trees of Goyal 2017.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from megabatch.errors import UserError
from megabatch.planner.machine import Machine
from megabatch.plans.phase import CLOSES, Phase, Plan, check
from megabatch.plans.wiring import largest_power_of_two


class Price(NamedTuple):
    """Time of a collective: the part that any size pays, and the part that each byte pays.

    Work is the time for which a node's cores send and receive what its workers do; where they
    compute as well, computing waits for so long.
    """

    latency: float
    seconds_per_byte: float
    message_work: float = 0.0
    byte_work: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + self.seconds_per_byte * nbytes

    def work(self, nbytes: float) -> float:
        return self.message_work + self.byte_work * nbytes

    @property
    def works(self) -> bool:
        return bool(self.message_work or self.byte_work)

    def of(self, nbytes: float) -> Price:
        return self

    @property
    def least(self) -> Price:
        return self


class BySize(NamedTuple):
    """Another price for tensors of another size: that of the first row whose limit in bytes is not
    below theirs."""

    rows: tuple[tuple[float, Price], ...]

    @property
    def works(self) -> bool:
        return any(cost.works for _, cost in self.rows)

    def of(self, nbytes: float) -> Price:
        return next(cost for limit, cost in self.rows if nbytes <= limit)

    @property
    def least(self) -> Price:
        """What no size beats."""
        return Price(*map(min, zip(*(cost for _, cost in self.rows), strict=True)))


FREE = Price(0.0, 0.0)


@dataclass(frozen=True)
class Line:
    """The ranks of one group: `members` of them, `stride` apart, among the `world`.

    `alone` says that no line beside it works at the same time (the masters' column): it has the
    NICs to itself.
    """

    members: int
    stride: int
    world: int
    alone: bool = False

    @property
    def extent(self) -> int:
        return self.members * self.stride

    def touches(self, block: int) -> int:
        """Blocks of ranks (nodes, racks) that the line reaches into, where it lies worst."""
        extent = self.members * self.stride
        return -(-(block - gcd(extent, block) + extent) // block)

    def hops_between(self, block: int, closed: bool = True) -> int:
        """Of members - 1 hops from one to the next: those that leave a block, at most.

        A closed line (a ring) also hops from its last member to its first.
        """
        touched = self.touches(block)
        return min(self.members - 1, touched if closed and touched > 1 else touched - 1)

    def leaving_ring(self, block: int, closed: bool = True) -> int:
        """Messages that leave one block while every member sends to the next."""
        if self.touches(block) == 1:
            return 0
        if self.alone:
            return 1
        if self.stride == 1:
            # A row that the block's edge cuts sends one message over it, and one back if it is
            # closed. Two rows can be cut where rows do not end at an edge.
            one_row = self.extent % block == 0 or self.extent == self.world
            return 1 if one_row or not closed else 2
        stays = max(0, block - self.stride) + max(0, block - (self.world - self.stride))
        return block - stays


def price(plan: Plan, y: int, x: int, machine: Machine) -> Price:
    """The price of a plan on a grid of y rows and x columns, ranks filling node after node."""
    return sum_of(Price(*leg[1:]) for leg in legs(plan, y, x, machine))


def sum_of(prices: Iterator[Price]) -> Price:
    parts = [*zip(*prices, strict=True)]
    return Price(*map(sum, parts)) if parts else FREE


_checked = cache(check)


class PricedPhase(NamedTuple):
    phase: Phase
    latency: float
    seconds_per_byte: float
    message_work: float
    byte_work: float


def legs(plan: Plan, y: int, x: int, machine: Machine) -> Iterator[PricedPhase]:
    """The price phase by phase; what a byte costs is for bytes of the whole tensor."""
    _checked(plan)
    world = y * x
    held, in_play, alone = 1.0, 1.0, False  # of the tensor a worker holds, of the workers
    opened: list[tuple[Phase, Line, Price, float, float, bool]] = []
    for phase in plan:
        if phase.op in CLOSES:
            before, line, cost, held, in_play, alone = opened.pop()
            if before.wiring != phase.wiring and line.members > 1:
                cost = _collective(phase, line, machine)
        else:
            members, stride = {"x": (x, 1), "y": (y, x), "xy": (world, 1)}[phase.axis]
            line = Line(members, stride, world, alone)
            cost = _collective(phase, line, machine) if members > 1 else FREE
            if phase.op != "all_reduce":
                opened.append((phase, line, cost, held, in_play, alone))
        if line.members > 1:
            yield PricedPhase(
                phase,
                cost.latency,
                cost.seconds_per_byte * held,
                cost.message_work * in_play,
                cost.byte_work * held * in_play,
            )
        if phase.op == "reduce_scatter":
            holders = line.members if phase.wiring == "ring" else largest_power_of_two(line.members)
            held /= holders
            in_play *= holders / line.members
        elif phase.op == "reduce":
            in_play /= line.members
            alone = True


def _collective(phase: Phase, line: Line, machine: Machine) -> Price:
    op = CLOSES.get(phase.op, phase.op)
    ways = 2 if op == "all_reduce" else 1
    if phase.wiring not in ("ring", "halving_doubling"):
        raise UserError(f"the planner has no price for the wiring {phase.wiring}")
    if phase.wiring == "ring":
        cost = _chain(line, machine) if op == "reduce" else _ring(line, machine)
    elif op == "reduce":
        cost = _tree(line, machine)
    else:
        cost = _halving(line, machine)
    return Price(
        machine.launch_seconds + ways * cost.latency,
        ways * cost.seconds_per_byte,
        *(ways * work for work in _work(op, phase.wiring, line, machine)),
    )


def _ring(line: Line, machine: Machine) -> Price:
    """A piece goes once around: it pays the latency of each hop, and the slowest hop sets the
    pace."""
    rounds = line.members - 1
    return Price(_hops(line, machine), rounds / line.members * _pace(line, machine))


def _chain(line: Line, machine: Machine) -> Price:
    """As many pieces as members follow each other: the last leaves when the first has arrived."""
    rounds = line.members - 1
    latency = _hops(line, machine, closed=False)
    return Price(latency, 2 * rounds / line.members * _pace(line, machine, closed=False))


def _halving(line: Line, machine: Machine) -> Price:
    """Swaps at distance 1, 2, 4, ...; blocks of other sizes hand theirs to the next larger one."""
    latency = seconds = 0.0
    largest = largest_power_of_two(line.members)
    handed = _handed_over(line.members)
    for distance, hop, pace in _swaps(line, machine):
        swapped = 0.5 / distance if 2 * distance <= largest else 0.0
        latency += hop
        seconds += max(swapped, handed.get(distance, 0.0)) * pace
    return Price(latency, seconds)


def _handed_over(members: int) -> dict[int, float]:
    """By the size of the larger block: the share that a member of the next smaller one sends."""
    digits = [1 << bit for bit in range(members.bit_length()) if members >> bit & 1]
    return {larger: 1 / smaller for smaller, larger in pairwise(digits)}


def _tree(line: Line, machine: Machine) -> Price:
    """A binomial tree: the whole slice at distance 1, 2, 4, ..."""
    latency = seconds = 0.0
    # half of those in play send: one of each pair that a swap would have
    for _, hop, pace in _swaps(line, machine, halved=True):
        latency += hop
        seconds += pace
    return Price(latency, seconds)


# --- what sending costs the cores ---------------------------------------------------------------


def _work(op: str, wiring: str, line: Line, machine: Machine) -> tuple[float, float]:
    """Seconds of a node's cores one way, for messages of any size and for a byte of the tensor, if
    all its workers are in play."""
    sending, members = machine.sending, line.members
    if sending is None:
        return 0.0, 0.0
    each = min(machine.workers_per_node, line.world) / sending.cores
    # However it is done, one tensor less than there are members travels.
    tensors = (members - 1) / members
    return (
        each * sending.message_core_seconds * _messages(op, wiring, members),
        each * sending.byte_core_seconds * tensors,
    )


def _messages(op: str, wiring: str, members: int) -> float:
    """That a member sends one way, in the mean over all of them."""
    if wiring == "ring":
        return members - 1
    if op == "reduce":
        return (members - 1) / members
    blocks = [1 << bit for bit in range(members.bit_length()) if members >> bit & 1]
    swapped = sum(block * (block.bit_length() - 1) for block in blocks)
    return (swapped + sum(_handed_over(members))) / members


# --- what a hop costs ---------------------------------------------------------------------------


def _hops(line: Line, machine: Machine, closed: bool = True) -> float:
    """Latency of a way along the whole line."""
    rack = machine.workers_per_rack
    nodes = line.hops_between(machine.workers_per_node, closed)
    racks = min(nodes, line.hops_between(rack, closed)) if rack else 0
    near, far, farthest = hop_latencies(machine)
    return (line.members - 1 - nodes) * near + (nodes - racks) * far + racks * farthest


def hop_latencies(machine: Machine) -> tuple[float, float, float]:
    """Of a message inside a node, from node to node and from rack to rack."""
    near = machine.node.latency_seconds if machine.node else 0.0
    far = machine.network.latency_seconds if machine.network else near
    return near, far, machine.spine.latency_seconds if machine.spine else far


def _pace(line: Line, machine: Machine, closed: bool = True) -> float:
    """Seconds a byte of each member's message while all send to their next."""
    node, rack = machine.workers_per_node, machine.workers_per_rack
    inside = line.hops_between(node) < line.members - 1
    return SecondsPerByte.of(machine).slowest(
        line.leaving_ring(node, closed),
        line.leaving_ring(rack, closed) if rack else 0,
        inside or line.touches(node) == 1,
    )


def _swaps(
    line: Line, machine: Machine, halved: bool = False
) -> Iterator[tuple[int, float, float]]:
    """Distance, latency and seconds a byte of the swaps at distance 1, 2, 4, ...

    The messages that leave a node or a rack are counted exactly where these have a power of two,
    else they are bounded from above. `halved`: at each distance half as many send as before.
    """
    node, rack = machine.workers_per_node, machine.workers_per_rack or 0
    if line.touches(node) == 1:
        node = 0
    if not (node and rack) or line.touches(rack) == 1:
        rack = 0
    step = line.stride if line.alone else 1
    most_of_node, most_of_rack = -(-node // step), -(-rack // step)
    near, far, farthest = hop_latencies(machine)
    slowest = SecondsPerByte.of(machine).slowest
    extent, all_ranks, distance = line.extent, line.extent == line.world, 1
    while distance < line.members:
        # pairs lie in whole blocks of so many ranks, if lines begin with one; each edge of a node
        # that cuts pairs cuts as many as they are wide
        width = 2 * distance * line.stride
        paired = all_ranks or extent % width == 0
        flows: float = 0 if paired and node % width == 0 else min(most_of_node, width)
        upwards: float = 0
        if rack and flows and not (paired and rack % width == 0):
            upwards = min(most_of_rack, width)
        latency = farthest if upwards else far if flows else near
        if halved:
            flows = flows and max(1, flows * 0.5 / distance)
            upwards = upwards and max(1, upwards * 0.5 / distance)
        yield distance, latency, slowest(flows, upwards, not flows)
        distance *= 2


class SecondsPerByte(NamedTuple):
    """What messages share: seconds a byte inside a node, on its NICs, on a pair's part of them, and
    on a rack's uplinks."""

    inside: float
    nics: float
    flow: float
    uplinks: float

    @classmethod
    def of(cls, machine: Machine) -> SecondsPerByte:
        network, spine = machine.network, machine.spine
        inside = 1 / machine.node.bytes_per_second if machine.node else 0.0
        if network is None:
            return cls(inside, 0.0, 0.0, 0.0)
        nics = network.nics * network.nic_bytes_per_second
        flow = min(nics, network.flow_bytes_per_second or nics)
        uplinks = spine.oversubscription / (nics * spine.nodes_per_rack) if spine else 0.0
        return cls(inside, 1 / nics, 1 / flow, uplinks)

    def slowest(self, node_flows: float, rack_flows: float, inside: bool) -> float:
        """Seconds a byte where so many messages share a node's NICs and a rack's uplinks."""
        pace = self.inside if inside else 0.0
        if node_flows:
            pace = max(pace, node_flows * self.nics, self.flow, rack_flows * self.uplinks)
        return pace
