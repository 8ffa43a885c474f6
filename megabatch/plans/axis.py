"""One collective among the members of one group, as messages, by any wiring.

The way up (all-gather, broadcast) is the way down played backwards with copies for additions, and
an all-reduce is down and up.
"""

from collections.abc import Iterable

from megabatch.plans.message import WHOLE, Message, Slice, delay, steps_in
from megabatch.plans.phase import CLOSES, Op
from megabatch.plans.wiring import WIRINGS


def held(op: Op, wiring: str, me: int, members: int) -> Slice | None:
    """What a member holds after going down; None if it waits for the way up."""
    if op == "reduce":
        return WHOLE if me == 0 else None
    return WIRINGS[wiring].held(me, members)


def exchange(op: Op, wiring: str, members: int, senders: Iterable[int]) -> list[Message]:
    """Messages by place in the group; `senders` are those who send on the way down."""
    if op == "all_reduce":
        down = exchange("reduce_scatter", wiring, members, senders)
        return down + delay(exchange("all_gather", wiring, members, senders), steps_in(down))
    ways = WIRINGS[wiring]
    sends = ways.reduce if CLOSES.get(op, op) == "reduce" else ways.scatter
    down = [
        Message(step, me, to, part, "add")
        for me in senders
        for step, to, part in sends(me, members)
    ]
    if op not in CLOSES:
        return down
    last = steps_in(down) - 1
    return [Message(last - step, to, me, part, "copy") for step, me, to, part, _ in down]
