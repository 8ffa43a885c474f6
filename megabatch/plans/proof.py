"""Proof that a plan is an all-reduce, by running its messages on symbols instead of numbers.

Counting contributors shows that each rank is in every sum exactly once (a set cannot see something
added twice); carrying the brackets of each sum shows whether the order of addition is fixed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import lcm
from operator import add
from typing import TypeAlias, TypeVar

from megabatch.plans.grid import lower
from megabatch.plans.message import Message, in_order
from megabatch.plans.phase import Plan

Symbol = TypeVar("Symbol")
Tree: TypeAlias = "int | tuple[Tree, Tree]"


def prove(plan: Plan, y: int, x: int) -> bool:
    """True if every rank ends with each rank counted exactly once; else ValueError says where."""
    return verify(lower(plan, y, x), y * x)


def verify(messages: Iterable[Message], world: int) -> bool:
    """`prove` for messages from anywhere; two writes to one place in one step are an error too."""
    once = Counter(range(world))
    final = _simulate(messages, [Counter([rank]) for rank in range(world)], add)
    for rank, chunks in enumerate(final):
        for index, counts in enumerate(chunks):
            if counts != once:
                wrong = next(other for other in range(world) if counts[other] != 1)
                raise ValueError(
                    f"rank {rank} ends with rank {wrong} counted {counts[wrong]} times "
                    f"in chunk {index} of {len(chunks)}"
                )
    return True


def bracketing(plan: Plan, y: int, x: int) -> list[list[Tree]]:
    """How each sum was bracketed, by rank and chunk; the term with the lower rank stands left."""
    return _simulate(lower(plan, y, x), list(range(y * x)), _plus)


def follows_tree(plan: Plan, y: int, x: int) -> bool:
    """Whether every sum is ((0+1)+(2+3))+..., the tree that one worker alone would follow.

    Never if the number of ranks is no power of two: their shares are then not nodes of the tree.
    """
    world = y * x
    if world.bit_count() != 1:
        return False
    level: list[Tree] = list(range(world))
    while len(level) > 1:
        level = list(zip(level[::2], level[1::2], strict=True))
    return all(tree == level[0] for chunks in bracketing(plan, y, x) for tree in chunks)


def _plus(a: Tree, b: Tree) -> Tree:
    return (a, b) if _first_rank(a) < _first_rank(b) else (b, a)


def _first_rank(tree: Tree) -> int:
    while isinstance(tree, tuple):
        tree = tree[0]
    return tree


def _simulate(
    messages: Iterable[Message], inputs: Sequence[Symbol], plus: Callable[[Symbol, Symbol], Symbol]
) -> list[list[Symbol]]:
    """What each rank holds in each chunk at the end, if it starts with its input in all of them."""
    messages = in_order(messages)
    chunks = lcm(*(message.slice.of for message in messages))
    state = [[symbol] * chunks for symbol in inputs]
    for step, batch in groupby(messages, lambda message: message.step):
        arrived: dict[tuple[int, int], Symbol] = {}
        for _, source, destination, part, op in batch:
            for chunk in range(*part.bounds(chunks)):
                if (destination, chunk) in arrived:
                    raise ValueError(
                        f"two messages write chunk {chunk} of rank {destination} in step {step}"
                    )
                sent, own = state[source][chunk], state[destination][chunk]
                arrived[destination, chunk] = plus(own, sent) if op == "add" else sent
        for (rank, chunk), symbol in arrived.items():
            state[rank][chunk] = symbol
    return state
