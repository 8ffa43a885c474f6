"""The bucket engine: gradients in flat buckets, last layer first, summed while backward goes on.

Each micro-batch's gradients go into the buckets, which sum them inside a worker (summation.py);
when a bucket is full for the last time in a step it leaves for the other workers, always in the
same order on all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.cluster import Cluster
from megabatch.errors import UserError
from megabatch.optim.layout import flat
from megabatch.sync import control
from megabatch.sync.choice import HYBRID
from megabatch.sync.control import Control
from megabatch.sync.senders import Exposed, Lane, Planned
from megabatch.sync.summation import OnPhase, TreeSum
from megabatch.tree import TreeNode, deal

_SHORT = 8192
"""numbers of a gradient: to copy them costs less than a call of their own"""


class GradientSum:
    """The bucket engine: begin(count), backward(...) for each micro-batch dealt here, then
    finish().

    After finish() the .grad of every trainable parameter (of its master, where it has one) is the
    sum over the global batch, on every worker, until the next begin(). The control vector rides
    behind the last bucket. From begin() on it may hold hooks on the parameters, until close(),
    which gives them back without gradients. A worker that dies or stops is named as heartbeat.py
    says, after `silent_seconds` (None: never).
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        statistics: int = 0,
        *,
        tree: bool,
        bucket_bytes: float = 25e6,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
        plan: str | None = None,
        wire: str = "fp32",
        thresholds: Iterable[tuple[int | None, str]] = HYBRID,
        silent_seconds: float | None = 60,
        late_seconds: float = 600,
    ) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        double = any(p.dtype == torch.float64 for p in parameters)
        dtype = torch.float64 if double else torch.float32
        like = torch.empty(0, dtype=dtype, device=cluster.device)
        self._module = module
        self._masters = masters or {}
        self._cluster = cluster
        self._buckets = buckets_of(parameters, bucket_bytes, tree)
        self._parameters = parameters
        # One worker alone knows which of them its passes came to.
        self._slots = len(parameters) if cluster.world > 1 else 0
        self._control = TreeSum(control.length(statistics, self._slots), like, tree)
        # Where there is nothing to sum, nothing is copied: a CPU takes as long for that as for SGD.
        alone = cluster.world == 1 and cluster.device.type == "cpu" and not tree
        self._may_stay = alone and all(p.dtype == dtype for p in parameters)
        self._stay = False
        self._sums: dict[TreeSum, Tensor] = {}
        self._exposed = Exposed(cluster.device)
        self._taken = 0
        self._lane: Lane | None = None
        self._planned: Planned | None = None
        if cluster.world > 1 and plan is not None and not tree:
            sizes = [bucket.tree.length for bucket in self._buckets]
            self._planned = Planned(
                cluster,
                plan,
                wire,
                sizes,
                thresholds=thresholds,
                silent_seconds=silent_seconds,
                late_seconds=late_seconds,
            )
        elif cluster.world > 1:
            self._lane = Lane(cluster, silent_seconds, late_seconds)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> GradientSum:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off, end the sender, let go of all gradients; once or again, in any
        state."""
        self._listen(False)
        for bucket in self._buckets:
            for p in bucket.parameters:
                p.grad = self._masters.get(p, p).grad = None
        sender = self._planned or self._lane
        if sender is not None:
            sender.close()
        self._buckets, self._parameters = [], []
        self._sums.clear()

    def begin(self, count: int) -> tuple[int, int]:
        """Start a step of `count` micro-batches; returns which of them, [first, last), are dealt
        here."""
        dealt = deal(count, self._cluster.world)[self._cluster.rank]
        for bucket in self._buckets:
            bucket.begin(count, dealt)
        self._control.begin(count, dealt)
        self._stay = self._may_stay and count == 1
        self._listen(not self._stay)
        self._changed = False
        self._sums.clear()
        self._left = self._passes = 0
        return dealt

    def backward(
        self,
        loss: Tensor,
        counts: Tensor,
        statistics: Tensor | None = None,
        factor: Tensor | float = 1.0,
    ) -> None:
        """One micro-batch: the gradients of its loss times a factor, while buckets that they fill
        leave; and its part of the control vector."""
        self._passes += 1
        self._taken += 1
        self._squares = counts.new_zeros(())
        # Not as backward's first gradient: for that torch imports sympy, seconds of every start.
        loss = loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor)
        loss.backward()
        self._end_pass(counts, statistics)

    def add(
        self,
        gradients: Mapping[nn.Parameter, Tensor],
        counts: Tensor,
        statistics: Tensor | None = None,
    ) -> None:
        """The same for a micro-batch whose gradients are there already: of a captured pass, which
        may write over them when this has returned."""
        self._passes += 1
        self._taken += 1
        self._squares = counts.new_zeros(())
        for p, gradient in gradients.items():
            p.grad = gradient
        self._end_pass(counts, statistics)

    def _end_pass(self, counts: Tensor, statistics: Tensor | None) -> None:
        if self._stay:
            for bucket in self._buckets:
                bucket.note_unreached()
            self._squares = self._square_where_they_lie()
        else:
            for bucket in self._buckets:
                if bucket.tree.pushed < self._passes:  # backward did not reach all its parameters
                    self._collect(bucket)
        row = self._control.fresh()
        if statistics is None:
            statistics = counts.new_empty(0)
        control.pack_micro_batch(row, self._squares, counts, statistics)
        self._control.push(row)

    def finish(self, stop: bool = False, batch: int = 0) -> Control:
        """End the step; returns the control vector, on the device. Only the first worker's batch
        counts."""
        self._leave()
        self._send(self._control, self._own(stop, batch))
        if self._cluster.world > 1:
            with self._exposed.waiting():
                sender = self._planned or self._lane
                assert sender is not None
                sender.wait()
        for bucket in self._buckets if not self._stay else ():
            for p, gradient in zip(
                bucket.parameters, bucket.views(self._sums[bucket.tree]), strict=True
            ):
                self._masters.get(p, p).grad = gradient
        return Control(self._sums[self._control], self._slots)

    def _own(self, stop: bool, batch: int) -> Tensor | None:
        """What this worker itself has to say; alone it need not say that there is nothing."""
        if self._cluster.world == 1 and not (stop or batch):
            return None
        own = self._control.fresh()
        control.pack_worker(
            own, stop, batch if self._cluster.first else 0, self._slots, self._unreached()
        )
        return own

    def scale(self, factor: Tensor | None, good: Tensor | None) -> None:
        """After finish(): undo a loss scale, and make gradients 0 where the step does not count
        (None: it does)."""
        self._changed = factor is not None or good is not None
        if not self._changed:
            return
        for total in (
            self._gradients() if self._stay else [self._sums[b.tree] for b in self._buckets]
        ):
            if factor is not None:
                total.mul_(factor)
            if good is not None:
                total.masked_fill_(~good, 0.0)

    def blocked(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """While this lasts the host waits for other workers outside a sum: the heartbeat watches,
        and ends the process should they never come."""
        sender = self._planned or self._lane
        watch = sender.heartbeat if sender is not None else None
        return contextlib.nullcontext() if watch is None else watch.blocked(phase)

    def exposed_seconds(self) -> float:
        """How long finish() has waited for other workers since the last call."""
        return self._exposed.seconds()

    def computed_micro_batches(self) -> int:
        """How many this worker has computed since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def unreached(self) -> list[str]:
        """The parameters that no micro-batch computed here in this step has had a gradient for, by
        name."""
        found = {self._parameters[index] for index in self._unreached()}
        return [name for name, p in self._module.named_parameters() if p in found]

    def reached(self, total: Control) -> dict[Tensor, Tensor]:
        """After finish(), of what no pass here came to in this step (their masters, where they have
        one): whether one of another worker's did, a boolean on the device."""
        found: dict[Tensor, Tensor] = {}
        for index in self._unreached():
            p, reached = self._parameters[index], total.reached(index)
            if not (reached.is_cpu and reached):  # a worker without passes came to none
                found[self._masters.get(p, p)] = reached
        return found

    def _unreached(self) -> list[int]:
        if all(bucket.unreached is not None and not bucket.unreached for bucket in self._buckets):
            return []
        missed = [b.parameters if b.unreached is None else b.unreached for b in self._buckets]
        found = set(itertools.chain.from_iterable(missed))
        return [index for index, p in enumerate(self._parameters) if p in found]

    def squared_norm(self) -> Tensor:
        """Of the whole gradient, after finish()."""
        if self._stay:
            return self._square_where_they_lie() if self._changed else self._squares
        sums = [self._sums[bucket.tree] for bucket in self._buckets]
        return torch.stack([total.dot(total) for total in sums]).sum()

    def _gradients(self) -> list[Tensor]:
        """Where backward has left them, 0 where it did not come."""
        found = []
        for p in (p for bucket in self._buckets for p in bucket.parameters):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            found.append(p.grad)
        return found

    def _square_where_they_lie(self) -> Tensor:
        runs = [flat(gradient) for gradient in self._gradients()]
        short = [run for run in runs if run.numel() <= _SHORT]
        if len(short) > 1:
            runs = [torch.cat(short), *(run for run in runs if run.numel() > _SHORT)]
        return functools.reduce(torch.add, [run.dot(run) for run in runs])

    def _listen(self, on: bool) -> None:
        """Hear of each gradient when it is there, or of none: a call for each costs a small net."""
        if on == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))
            for bucket in (self._buckets if on else ())
            for p in bucket.parameters
        ]

    def _arrived(self, bucket: Bucket, p: Tensor) -> None:
        if bucket.tree.pushed == self._passes:
            name = next(name for name, one in self._module.named_parameters() if one is p)
            raise UserError(
                f"the gradient of {name} came twice in one backward pass, and the first part of it "
                f"is on its way already: checkpoint its layer with use_reentrant=False"
            )
        bucket.awaited.discard(p)  # type: ignore[arg-type]
        if not bucket.awaited:
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
        if self._planned is not None:
            (total,) = tree.nodes
            self._sums[tree] = total = total if own is None else total + own
            self._planned.send(total, self._left, is_control=own is not None)
            return

        if self._lane is None:
            self._sums[tree] = tree.all_reduce(self._cluster, own)
            return
        cluster = self._lane.cluster

        def work(on_phase: OnPhase) -> None:
            self._sums[tree] = tree.all_reduce(cluster, own, on_phase)

        self._lane.send(work, self._left)


# --- the buckets -------------------------------------------------------------------------------


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """What gradients of a tensor are summed in: half precision in fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Bucket:
    """Some parameters whose gradients travel together in one flat vector, half ones in fp32."""

    def __init__(self, parameters: list[nn.Parameter], by_tree: bool = True) -> None:
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        like = parameters[0].detach()
        self.tree = TreeSum(sum(self.sizes), like.to(sum_dtype(like)), by_tree)
        self.awaited = set(parameters)
        """those whose gradients of this micro-batch are not there yet"""
        self.unreached: set[nn.Parameter] | None = None
        """those that no backward pass of this step has come to so far (None: there was none)"""
        self._views: dict[int, list[Tensor]] = {}
        """of the tree's own vectors, which it uses again and again, by address"""

    def begin(self, count: int, dealt: TreeNode) -> None:
        for p in self.parameters:
            p.grad = None
        self.awaited = set(self.parameters)
        self.unreached = None
        self.tree.begin(count, dealt)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat vector's pieces, each as its parameter is laid out."""
        # In each parameter's own layout: else what works on many tensors at once takes them singly.
        return self._views.get(flat.data_ptr()) or [
            piece.as_strided(p.shape, p.stride())
            for piece, p in zip(flat.split(self.sizes), self.parameters, strict=True)
        ]

    def note_unreached(self) -> None:
        """Behind a backward pass, while its gradients are where it left them."""
        some = self.parameters if self.unreached is None else self.unreached
        self.unreached = {p for p in some if p.grad is None}

    def collect(self) -> Tensor:
        """Move the parameters' gradients into the tree; returns their sum of squares."""
        self.note_unreached()
        flat = self.tree.fresh()
        # Backward may not have reached all of them.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        views = self._views[flat.data_ptr()] = self.views(flat)
        torch._foreach_copy_(views, gradients)
        for p in self.parameters:
            p.grad = None
        self.awaited = set(self.parameters)
        squares = flat.dot(flat)
        self.tree.push(flat)
        return squares


def buckets_of(
    parameters: Iterable[nn.Parameter], limit_bytes: float, by_tree: bool = True
) -> list[Bucket]:
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
    return [Bucket(bucket, by_tree) for bucket in buckets]
