"""Summing gradients: along one tree whatever the number of workers, in buckets, while backward
goes on.

`GradientSum` is the bucket engine. Each micro-batch's gradients are copied into flat buckets, last
layer first; inside a worker they are summed along the tree of batch.py; when a bucket is full for
the last time in a step it leaves for the other workers, always in the same order on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.batch import Node, deal, folds, largest_nodes, tree_sum
from megabatch.cluster import Cluster

# torch 2.13 has a new name for this and warns on the old one; 2.11 has only the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def tree_all_reduce(
    rows: Tensor, count: int, cluster: Cluster, own: Tensor | None = None
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
    dist.all_to_all_single(incoming, outgoing, sizes, [len(rows)] * world)
    parts: dict[Node, Tensor] = {}
    owns: list[Tensor] = []
    for held, received in zip(nodes, incoming.split(sizes), strict=True):
        parts.update(zip(held, received, strict=False))
        owns += received[len(held) :]
    total = tree_sum(count, parts, torch.add)
    for row in owns:
        total = total + row
    gathered = rows.new_empty(world * chunk)
    _all_gather(gathered, total)
    return gathered[:length]


def backend_all_reduce(rows: Tensor, own: Tensor | None = None) -> Tensor:
    """The same sum by the backend's own all-reduce: faster, in an order that depends on the
    workers."""
    total = rows[0] if len(rows) == 1 else rows.sum(0)
    if own is not None:
        total = total + own
    dist.all_reduce(total)
    return total


class TreeSum:
    """The running sum of one flat vector over this worker's micro-batches, bracketed as the tree
    says."""

    def __init__(self, length: int, like: Tensor) -> None:
        self._length, self._like = length, like
        self._stack: list[Tensor] = []
        self._spare: list[Tensor] = []
        self.begin(0, (0, 0))

    def begin(self, count: int, dealt: Node) -> None:
        """Start a sum over `count` micro-batches of which those in `dealt` are pushed here, in
        order.

        The vectors of the sum before are free again.
        """
        self._spare += self._stack
        self._stack.clear()
        self._count, self._folds = count, _folds(count, dealt)
        self.pushed = 0

    def fresh(self) -> Tensor:
        """A vector to fill and push, with anything in it."""
        return self._spare.pop() if self._spare else self._like.new_empty(self._length)

    def push(self, leaf: Tensor) -> None:
        self._stack.append(leaf)
        for _ in range(self._folds[self.pushed]):
            right = self._stack.pop()
            self._stack[-1] += right
            self._spare.append(right)
        self.pushed += 1

    @property
    def complete(self) -> bool:
        return self.pushed == len(self._folds)

    def all_reduce(self, cluster: Cluster, by_tree: bool, own: Tensor | None = None) -> Tensor:
        """The sum over all workers; it may share memory with this one's vectors until begin()."""
        if len(self._stack) == 1:
            rows = self._stack[0][None]
        else:
            rows = (
                torch.stack(self._stack) if self._stack else self._like.new_empty(0, self._length)
            )
        if by_tree or cluster.world == 1:
            return tree_all_reduce(rows, self._count, cluster, own)
        return backend_all_reduce(rows, own)


@functools.cache
def _folds(count: int, dealt: Node) -> list[int]:
    return [fold for node in largest_nodes(count, dealt) for fold in folds(node)]


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """What gradients of a tensor are summed in: half precision in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Bucket:
    """Some parameters whose gradients travel together in one flat vector, half ones in fp32."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        like = parameters[0].detach()
        self.tree = TreeSum(sum(self.sizes), like.to(sum_dtype(like)))
        self.missing = len(parameters)

    def begin(self, count: int, dealt: Node) -> None:
        for p in self.parameters:
            p.grad = None
        self.tree.begin(count, dealt)

    def views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split(self.sizes)
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def collect(self) -> Tensor:
        """Move the parameters' gradients into the tree; returns their sum of squares."""
        flat = self.tree.fresh()
        # Backward may not have reached all of them.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        torch._foreach_copy_(self.views(flat), gradients)
        for p in self.parameters:
            p.grad = None
        self.missing = len(self.parameters)
        squares = flat.dot(flat)
        self.tree.push(flat)
        return squares


def buckets_of(parameters: Iterable[nn.Parameter], limit_bytes: float) -> list[Bucket]:
    """Buckets of about limit_bytes, the last parameters (whose gradients come first) in the first
    bucket; each of gradients that are summed in one dtype."""
    buckets: list[list[nn.Parameter]] = []
    nbytes = 0
    for p in reversed(list(parameters)):
        size = p.numel() * p.element_size()
        other = buckets and sum_dtype(p) != sum_dtype(buckets[-1][0])
        if not buckets or nbytes + size > limit_bytes or other:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(p)
        nbytes += size
    return [Bucket(bucket) for bucket in buckets]


class Lane:
    """Where communication runs beside backward: a thread on CPU, a stream on CUDA; in order in
    both."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "lane")
        self._sent: list[Future[None]] = []

    def send(self, work: Callable[[], None]) -> None:
        if self._thread is not None:
            self._sent.append(self._thread.submit(work))
        else:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()

    def wait(self) -> None:
        """Until all that was sent is done (on CUDA: the present stream waits, not the host)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for sent in self._sent:
            sent.result()
        self._sent = []


class GradientSum:
    """The bucket engine: begin(count), backward(...) for each micro-batch dealt here, then
    finish().

    After finish() the .grad of every trainable parameter (of its master, where it has one) is the
    sum over the global batch, on every worker, until the next begin(). The control vector rides
    behind the last bucket: entry 0 is the sum of the squared norms of the micro-batches' gradients,
    entry 1 the number of workers told to stop, entry 2 a number from the first worker; what else it
    holds is the caller's.
    """

    RESERVED = 3

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        control: int,
        *,
        tree: bool,
        bucket_bytes: float = 25e6,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        double = any(p.dtype == torch.float64 for p in parameters)
        dtype = torch.float64 if double else torch.float32
        like = torch.empty(0, dtype=dtype, device=cluster.device)
        self._masters = masters or {}
        self._cluster, self._by_tree = cluster, tree
        self._buckets = buckets_of(parameters, bucket_bytes)
        self._control = TreeSum(self.RESERVED + control, like)
        self._sums: dict[TreeSum, Tensor] = {}
        self._lane = Lane(cluster.device) if cluster.world > 1 else None
        for bucket in self._buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def begin(self, count: int) -> tuple[int, int]:
        """Start a step of `count` micro-batches; returns which of them, [first, last), are dealt
        here."""
        dealt = deal(count, self._cluster.world)[self._cluster.rank]
        for bucket in self._buckets:
            bucket.begin(count, dealt)
        self._control.begin(count, dealt)
        self._sums.clear()
        self._left = self._passes = 0
        return dealt

    def backward(self, loss: Tensor, control: Tensor) -> None:
        """One micro-batch: its gradients, and its part of the control vector."""
        self._passes += 1
        self._squares = loss.new_zeros((), dtype=control.dtype)
        loss.backward()
        for bucket in self._buckets:
            if bucket.tree.pushed < self._passes:  # backward did not reach all of its parameters
                self._collect(bucket)
        row = self._control.fresh()
        row[: self.RESERVED] = 0.0
        row[0], row[self.RESERVED :] = self._squares, control
        self._control.push(row)

    def finish(self, stop: bool = False, number: float = 0.0) -> Tensor:
        """End the step; returns the control vector, on the device. Only the first worker's number
        counts."""
        self._leave()
        own = self._control.fresh().zero_()
        own[1] = float(stop)
        if self._cluster.first:
            own[2] = number
        self._send(self._control, own)
        if self._lane is not None:
            self._lane.wait()
        for bucket in self._buckets:
            for p, gradient in zip(
                bucket.parameters, bucket.views(self._sums[bucket.tree]), strict=True
            ):
                self._masters.get(p, p).grad = gradient
        return self._sums[self._control]

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients: after finish(), to undo a loss scale."""
        for bucket in self._buckets:
            self._sums[bucket.tree].mul_(factor)

    def squared_norm(self) -> Tensor:
        """Of the whole gradient, after finish()."""
        sums = [self._sums[bucket.tree] for bucket in self._buckets]
        return torch.stack([total.dot(total) for total in sums]).sum()

    def _arrived(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        if bucket.missing == 0:
            self._collect(bucket)

    def _collect(self, bucket: Bucket) -> None:
        self._squares += bucket.collect()
        self._leave()

    def _leave(self) -> None:
        """Send the buckets that are complete, in order: the same order on every worker."""
        while self._left < len(self._buckets) and self._buckets[self._left].tree.complete:
            self._send(self._buckets[self._left].tree)
            self._left += 1

    def _send(self, tree: TreeSum, own: Tensor | None = None) -> None:
        def work() -> None:
            self._sums[tree] = tree.all_reduce(self._cluster, self._by_tree, own)

        if self._lane is None:
            work()
        else:
            self._lane.send(work)
