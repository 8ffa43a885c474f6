"""Who sends what to whom in a group, on the way down: a ring, or halving and doubling.

Only the way down is written out, as what one member sends; `axis` plays it backwards for the way
up. Halving with distance 1 first and binary blocks are those of Goyal et al. 2017 (section 4). A
new wiring is a few functions and a line of WIRINGS, all in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megabatch.plans.message import WHOLE, Slice, piece


class Send(NamedTuple):
    step: int
    to: int
    slice: Slice


def ring_scatter(me: int, members: int) -> Iterator[Send]:
    """Every piece goes once round the ring, growing, and stops at the member of its number."""
    for step in range(members - 1):
        yield Send(step, (me + 1) % members, piece((me - 1 - step) % members, members))


def chain_reduce(me: int, members: int) -> Iterator[Send]:
    """Pieces follow each other down the chain to member 0, so that all links work at once."""
    if me > 0:
        for index in range(members):
            yield Send(members - 1 - me + index, me - 1, piece(index, members))


def halving_scatter(me: int, members: int) -> Iterator[Send]:
    """Swap halves at distance 1, quarters at distance 2, and so on: sums grow as a balanced tree.

    A count that is no power of two is split into blocks that are, the largest first. Each block
    scatters by itself and hands its slices to the next larger one when that one has finished.
    """
    first, size = _block(me, members)
    me -= first
    for step in range(size.bit_length() - 1):
        peer = me ^ 1 << step
        yield Send(step, first + peer, _halved(peer, 2 << step))
    if first:
        larger = first & -first  # blocks are the binary digits of the count: this is the one before
        step = larger.bit_length() - 1
        for heir in range(me, larger, size):  # the same low bits: its slice lies in ours
            yield Send(step, first - larger + heir, _halved(heir, larger))


def tree_reduce(me: int, members: int) -> Iterator[Send]:
    """A binomial tree, distance 1 first: a member sends when the turn comes to its lowest bit."""
    if me > 0:
        lowest = me & -me
        yield Send(lowest.bit_length() - 1, me - lowest, WHOLE)


def ring_held(me: int, members: int) -> Slice:
    return piece(me, members)


def halving_held(me: int, members: int) -> Slice | None:
    largest = largest_power_of_two(members)
    return _halved(me, largest) if me < largest else None


class Wiring(NamedTuple):
    scatter: Callable[[int, int], Iterator[Send]]
    """what a member sends so that each slice is summed somewhere"""
    reduce: Callable[[int, int], Iterator[Send]]
    """what a member sends so that member 0 has the whole sum"""
    held: Callable[[int, int], Slice | None]
    """the slice a member holds after the scatter; None if it waits for the way up"""
    counted: Callable[[int], int]
    """the most members whose sum a message of a step may hold"""


WIRINGS: dict[str, Wiring] = {
    # A ring's partial sum grows by a member a step, halving's doubles at most.
    "ring": Wiring(ring_scatter, chain_reduce, ring_held, lambda step: step + 1),
    "halving_doubling": Wiring(halving_scatter, tree_reduce, halving_held, lambda step: 1 << step),
}


def largest_power_of_two(limit: int) -> int:
    return 1 << limit.bit_length() - 1


def _block(me: int, members: int) -> tuple[int, int]:
    """First member and size of the power-of-two block that a member belongs to."""
    first, size = 0, largest_power_of_two(members)
    while me >= first + size:
        first += size
        size = largest_power_of_two(members - first)
    return first, size


def _halved(me: int, members: int) -> Slice:
    """What halving leaves to a member: its lowest bit says which half, the next which quarter."""
    bits = members.bit_length() - 1
    return piece(int(f"{me % members:0{bits}b}"[::-1], 2), members)
