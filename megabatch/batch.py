"""The micro-batch, who is dealt which, the order in which their gradients are summed, and
batch-size control.

A global batch is K micro-batches. Their gradients are summed along one binary tree over [0, K), the
interval halved from the top, whatever the number of workers: that makes the sum a function of the
batch alone. A worker holds an interval of micro-batches; the tree nodes inside it are summed where
they are, and whoever finishes the sum needs only the largest of them. (Batch-size control: Mikami
2018.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""A node of the tree: the micro-batches [first, last) below it."""


# --- the tree ----------------------------------------------------------------------------------


def halve(node: Node) -> tuple[Node, Node]:
    first, last = node
    middle = (first + last) // 2
    return (first, middle), (middle, last)


def deal(count: int, workers: int) -> list[Node]:
    """The interval of `count` micro-batches that each worker works on; lengths differ by at most
    one.

    While the number of workers is even the interval is halved as the tree halves it, so a power of
    two of workers receives whole nodes. With fewer micro-batches than workers some intervals are
    empty.
    """

    def cut(first: int, last: int, workers: int) -> list[Node]:
        if workers % 2 == 0:
            left, right = halve((first, last))
            return cut(*left, workers // 2) + cut(*right, workers // 2)
        length = last - first
        ends = [first + length * worker // workers for worker in range(workers + 1)]
        return list(itertools.pairwise(ends))

    return cut(0, count, workers)


def dealt(step: Step, micro: int, worker: int, workers: int) -> range:
    """A worker's micro-batches of a step, as places in the endless stream of them."""
    first, count = step.seen // micro, step.batch // micro
    begin, end = _dealt_once(count, workers)[worker]
    return range(first + begin, first + end)


# A run has many steps and few batches.
_dealt_once = functools.lru_cache(maxsize=16)(deal)


def largest_nodes(count: int, interval: Node) -> list[Node]:
    """The largest nodes of the tree over [0, count) inside an interval, from left to right."""
    first, last = interval

    def inside(node: Node) -> list[Node]:
        if first >= node[1] or last <= node[0] or first >= last:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        left, right = halve(node)
        return inside(left) + inside(right)

    return inside((0, count))


def folds(node: Node) -> list[int]:
    """For each leaf below a node, in order: how many sums it completes.

    Push the leaves on a stack one by one and after each replace the top two, so many times, by
    their sum: what is left is the node, bracketed as the tree says, with at most log2(leaves) + 1
    on the stack.
    """
    if node[1] - node[0] == 1:
        return [0]
    left, right = halve(node)
    counts = folds(left) + folds(right)
    counts[-1] += 1
    return counts


def tree_sum(count: int, parts: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Finish the sum over [0, count) from nodes that cover it."""

    def total(node: Node) -> T:
        if node in parts:
            return parts[node]
        left, right = halve(node)
        return add(total(left), total(right))

    return total((0, count))


# --- batch-size control ------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """From `epoch` on the global batch is `batch`; None leaves the momentum as it was."""

    epoch: float
    batch: int
    momentum: float | None = None


@dataclass(frozen=True)
class Step:
    """One step of the run: `batch` images of the endless stream, from position `seen` on."""

    index: int
    seen: int
    batch: int
    epoch: float
    stage: int


def stage_at(stages: Sequence[Stage], epoch: float) -> int:
    """The index of the last stage that has begun; the first begins at once."""
    return max(index for index, stage in enumerate(stages) if index == 0 or epoch >= stage.epoch)


def step_at(
    stages: Sequence[Stage], images: int, index: int, seen: int, batch: int | None = None
) -> Step:
    """The step that begins at `seen`: as its stage says, or of another batch."""
    epoch = seen / images
    stage = stage_at(stages, epoch)
    return Step(index, seen, batch or stages[stage].batch, epoch, stage)


def steps(
    stages: Sequence[Stage],
    images: int,
    epochs: float,
    index: int = 0,
    seen: int = 0,
    batch: int | None = None,
) -> Iterator[Step]:
    """The steps of a run from `seen` on: whole batches, of their stage or all of another size,
    until every image was seen `epochs` times."""
    while seen < epochs * images:
        step = step_at(stages, images, index, seen, batch)
        yield step
        index, seen = index + 1, seen + step.batch


def count_steps(stages: Sequence[Stage], images: int, epochs: float) -> tuple[int, int]:
    """How many steps a run has and how many images they hold."""
    count, seen = 0, 0
    for step in steps(stages, images, epochs):
        count, seen = step.index + 1, step.seen + step.batch
    return count, seen
