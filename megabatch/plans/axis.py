"""One collective among the members of one group: by a ring, or by halving and doubling.

Only the way down is written out, as what one member sends. The way up (all-gather, broadcast) is
the way down played backwards with copies for additions, and an all-reduce is down and up. Halving
with distance 1 first and binary blocks are those of Goyal et al. 2017 (section 4).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from megabatch.plans.message import WHOLE, Message, Slice, count_steps, delay, piece
from megabatch.plans.phase import CLOSES, Op, Wiring


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


DOWN: dict[tuple[Op, Wiring], Callable[[int, int], Iterator[Send]]] = {
    ("reduce_scatter", "ring"): ring_scatter,
    ("reduce_scatter", "halving_doubling"): halving_scatter,
    ("reduce", "ring"): chain_reduce,
    ("reduce", "halving_doubling"): tree_reduce,
}


def held(op: Op, wiring: Wiring, me: int, members: int) -> Slice | None:
    """What a member holds after going down; None if it waits for the way up."""
    if op == "reduce":
        return WHOLE if me == 0 else None
    if wiring == "ring":
        return piece(me, members)
    largest = _power_of_two(members)
    return _halved(me, largest) if me < largest else None


def exchange(op: Op, wiring: Wiring, members: int, senders: Iterable[int]) -> list[Message]:
    """Messages by place in the group; `senders` are those who send on the way down."""
    if op == "all_reduce":
        down = exchange("reduce_scatter", wiring, members, senders)
        return down + delay(exchange("all_gather", wiring, members, senders), count_steps(down))
    sends = DOWN[CLOSES.get(op, op), wiring]
    down = [
        Message(step, me, to, part, "add")
        for me in senders
        for step, to, part in sends(me, members)
    ]
    if op not in CLOSES:
        return down
    last = count_steps(down) - 1
    return [Message(last - step, to, me, part, "copy") for step, me, to, part, _ in down]


def _power_of_two(limit: int) -> int:
    return 1 << limit.bit_length() - 1


def _block(me: int, members: int) -> tuple[int, int]:
    """First member and size of the power-of-two block that a member belongs to."""
    first, size = 0, _power_of_two(members)
    while me >= first + size:
        first += size
        size = _power_of_two(members - first)
    return first, size


def _halved(me: int, members: int) -> Slice:
    """What halving leaves to a member: its lowest bit says which half, the next which quarter."""
    bits = members.bit_length() - 1
    return piece(int(f"{me % members:0{bits}b}"[::-1], 2), members)
