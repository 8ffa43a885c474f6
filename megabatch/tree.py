"""The tree: the order in which the gradients of K micro-batches are summed.

They are summed along one binary tree over [0, K), the interval halved from the top, whatever the
number of workers: that makes the sum a function of the batch alone. A worker holds an interval of
micro-batches; the tree nodes inside it are summed where they are, and whoever finishes the sum
needs only the largest of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
TreeNode = tuple[int, int]
"""A node of the tree: the micro-batches [first, last) below it."""


def halve(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    first, last = node
    middle = (first + last) // 2
    return (first, middle), (middle, last)


def deal(count: int, workers: int) -> list[TreeNode]:
    """The interval of `count` micro-batches that each worker works on; lengths differ by at most
    one.

    While the number of workers is even the interval is halved as the tree halves it, so a power of
    two of workers receives whole nodes. With fewer micro-batches than workers some intervals are
    empty.
    """

    def cut(first: int, last: int, workers: int) -> list[TreeNode]:
        if workers % 2 == 0:
            left, right = halve((first, last))
            return cut(*left, workers // 2) + cut(*right, workers // 2)
        length = last - first
        ends = [first + length * worker // workers for worker in range(workers + 1)]
        return list(itertools.pairwise(ends))

    return cut(0, count, workers)


def largest_nodes(count: int, interval: TreeNode) -> list[TreeNode]:
    """The largest nodes of the tree over [0, count) inside an interval, from left to right."""
    first, last = interval

    def inside(node: TreeNode) -> list[TreeNode]:
        if first >= node[1] or last <= node[0] or first >= last:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        left, right = halve(node)
        return inside(left) + inside(right)

    return inside((0, count))


def folds(node: TreeNode) -> list[int]:
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


def tree_sum(count: int, parts: Mapping[TreeNode, T], add: Callable[[T, T], T]) -> T:
    """Finish the sum over [0, count) from nodes that cover it."""

    def total(node: TreeNode) -> T:
        if node in parts:
            return parts[node]
        left, right = halve(node)
        return add(total(left), total(right))

    return total((0, count))
