"""One order of summation: a sum over micro-batches along the tree of tree.py, over any number of
workers, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.sync.segment import all_gather
from megabatch.tree import TreeNode, deal, folds, largest_nodes, tree_sum

OnPhase = Callable[[str], None]
"""is told what is about to be done with a sum"""


def untold(phase: str) -> None:
    """Nobody watches."""


def tree_all_reduce(
    rows: Tensor,
    count: int,
    cluster: Cluster,
    own: Tensor | None = None,
    on_phase: OnPhase = untold,
) -> Tensor:
    """The sum of `count` micro-batches along the tree: the same bits for any number of workers.

    `rows` holds this worker's largest nodes, one a row (no row when it was dealt nothing). Every
    worker owns a slice: it receives that slice of all nodes, finishes the tree and sends the sum
    to all. `own` is one row more from each worker, added after the tree: for flags, which any
    order sums exactly.
    """
    if cluster.world == 1:
        return rows[0] if own is None else rows[0] + own
    if own is not None:
        rows = torch.cat([rows, own[None]])
    world, length = cluster.world, rows.shape[1]
    chunk = -(-length // world)
    outgoing = nn.functional.pad(rows, (0, chunk * world - length))
    outgoing = outgoing.view(len(rows), world, chunk).transpose(0, 1).reshape(-1, chunk)
    nodes = [largest_nodes(count, interval) for interval in deal(count, world)]
    sizes = [len(held) + (own is not None) for held in nodes]
    incoming = rows.new_empty(sum(sizes), chunk)
    on_phase("tree: all_to_all")
    dist.all_to_all_single(incoming, outgoing, sizes, [len(rows)] * world, group=cluster.group)
    parts: dict[TreeNode, Tensor] = {}
    owns: list[Tensor] = []
    for held, received in zip(nodes, incoming.split(sizes), strict=True):
        parts.update(zip(held, received, strict=False))
        owns += received[len(held) :]
    total = tree_sum(count, parts, torch.add)
    for row in owns:
        total = total + row
    gathered = rows.new_empty(world * chunk)
    on_phase("tree: all_gather")
    all_gather(gathered, total, group=cluster.group)
    return gathered[:length]


class TreeSum:
    """The running sum of one flat vector over this worker's micro-batches, bracketed as the tree
    says.

    When it is `complete`, `nodes` are what this worker contributes to the sum over all: its largest
    nodes of the tree, or one vector where not `by_tree`: then any order will do.
    """

    def __init__(self, length: int, like: Tensor, by_tree: bool = True) -> None:
        self.length, self._like, self._by_tree = length, like, by_tree
        self.nodes: list[Tensor] = []
        self._spare: list[Tensor] = []
        self.begin(0, (0, 0))

    def begin(self, count: int, dealt: TreeNode) -> None:
        """Start a sum over `count` micro-batches of which those in `dealt` are pushed here, in
        order.

        The vectors of the sum before are free again.
        """
        self._spare += self.nodes
        self.nodes = []
        self._count, self._folds = count, _folds(count, dealt)
        self.pushed = 0
        self._see_whether_complete()

    def fresh(self) -> Tensor:
        """A vector to fill and push, with anything in it."""
        return self._spare.pop() if self._spare else self._like.new_empty(self.length)

    def push(self, leaf: Tensor) -> None:
        self.nodes.append(leaf)
        for _ in range(self._folds[self.pushed]):
            right = self.nodes.pop()
            self.nodes[-1] += right
            self._spare.append(right)
        self.pushed += 1
        self._see_whether_complete()

    def all_reduce(
        self, cluster: Cluster, own: Tensor | None = None, on_phase: OnPhase = untold
    ) -> Tensor:
        """The sum over all workers, and over each one's `own` vector; it may share memory with
        this one's vectors until begin()."""
        if self._by_tree or cluster.world == 1:
            return tree_all_reduce(self._rows(), self._count, cluster, own, on_phase)
        (total,) = self.nodes
        total = total if own is None else total + own
        on_phase("backend: all_reduce")
        dist.all_reduce(total, group=cluster.group)
        return total

    def _see_whether_complete(self) -> None:
        self.complete = self.pushed == len(self._folds)
        if self.complete and not self._by_tree and len(self.nodes) != 1:
            total = self.fresh()
            torch.sum(self._rows(), 0, out=total)
            self._spare += self.nodes
            self.nodes = [total]

    def _rows(self) -> Tensor:
        if len(self.nodes) == 1:
            return self.nodes[0][None]
        return torch.stack(self.nodes) if self.nodes else self._like.new_empty(0, self.length)


@functools.cache
def _folds(count: int, dealt: TreeNode) -> list[int]:
    return [fold for node in largest_nodes(count, dealt) for fold in folds(node)]
