"""One step of training, and one pass of evaluation: what the trainer, the benchmarks and the tests
all call.

A step is forward and backward over the micro-batches dealt here, the sum over workers, the update
and its numbers. Nothing in it waits for the device: what the host wants to know it reads a step
later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import MicroBatch
from megabatch.keyed import Purpose, keyed
from megabatch.parts import Parts
from megabatch.passes.compiling import as_it_is
from megabatch.passes.kinds import logits_of
from megabatch.precision import autocast, full_dtype
from megabatch.sync.arriving import Arriving
from megabatch.sync.control import COUNTS, Control, StepNumbers, counts, without_stop
from megabatch.sync.summation import TreeSum
from megabatch.tree import deal

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device."""

    numbers: Tensor
    """as StepNumbers.unpack reads them"""
    losses: list[tuple[int, Tensor]]
    """of each micro-batch here: its first position, its part of the mean loss"""


def train_step(
    parts: Parts,
    micro_batches: Iterable[MicroBatch],
    batch: int,
    *,
    lr: float,
    momentum: float,
    stop: Callable[[], bool] = lambda: False,
    propose: int = 0,
) -> StepResult:
    """One step over a global batch of so many images; every worker calls it.

    `micro_batches` are those dealt to this worker (batch.dealt). `stop` says, after they were
    computed, whether this worker was asked to stop, and all will know; `propose` is the batch that
    the first worker wants from now on.
    """
    count = batch // parts.config.micro
    parts.engine.begin(count)
    between = not parts.net.training  # an evaluation was; a net has hundreds of modules to tell
    if between:
        parts.net.train()
    own = parts.buffers
    with _NOTHING if own is None else own.step(count, between, parts.engine.blocked):
        losses = _passes(parts, micro_batches, batch)
        control = parts.engine.finish(stop(), propose)
    return StepResult(_update(parts, control, count, lr, momentum), losses)


def _passes(
    parts: Parts, micro_batches: Iterable[MicroBatch], batch: int
) -> list[tuple[int, Tensor]]:
    """Forward and backward over each micro-batch; returns its first position and its part of the
    mean loss over the global batch."""
    # In float64: rounded once, to what the loss is in, it is what backward of a mean would give.
    factor = parts.scale.value.double() / batch if parts.scale.on else 1 / batch
    losses = []  # and this no generator, in which a StopIteration of the net's would be another one
    ready = _ready(parts, micro_batches)
    if parts.graph is None or parts.graph.refused:
        for micro in ready:
            losses.append((micro.first, _pass(parts, micro, factor) / batch))
        return losses
    for first, found, gradients in parts.graph(ready, factor):
        parts.engine.add(gradients, found.counts, found.statistics)
        losses.append((first, found.loss / batch))
    return losses


def _pass(parts: Parts, micro: MicroBatch, factor: Tensor | float) -> Tensor:
    """One that runs as it is: its buckets leave meanwhile. Returns its loss."""
    found = parts.run(micro.images, micro.labels)
    parts.engine.backward(found.loss, found.counts, found.statistics, factor)
    return found.loss.detach()


def _ready(parts: Parts, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Each when the one before has passed, and the net as its pass is to find it."""
    for micro in micro_batches:
        key_draws(parts, micro)
        if parts.buffers is not None:
            parts.buffers.each_pass()
        yield micro


def key_draws(parts: Parts, micro: MicroBatch) -> None:
    """What the next pass draws is keyed by its images' positions: dropout, and in a module of
    somebody else's torch's generator, which bundled models leave alone."""
    for layer in parts.dropouts:
        layer.positions = micro.positions
    if parts.own:
        torch.manual_seed(keyed(parts.config.seed, Purpose.GENERATOR, micro.first))


def _update(parts: Parts, control: Control, count: int, lr: float, momentum: float) -> Tensor:
    """Weights and averages after the sum; returns the numbers for the host.

    Whether the step counts is decided on the device, alike on every worker.
    """
    engine, optimizer, scale = parts.engine, parts.optimizer, parts.scale
    for group in optimizer.param_groups:
        group["lr"] = lr
        if "momentum" in group:
            group["momentum"] = momentum
    good = control.good
    # On a CPU the host has it before it: where a step counts, nobody has to carry it along.
    gate = None if good.is_cpu and good else good
    engine.scale(1 / scale.value if scale.on else None, gate)
    optimizer.step(good=gate, copies=parts.copies, reached=engine.reached(control))
    parts.moving.move(control.mean_statistics(count), parts.config.bn_momentum, gate)
    if parts.buffers is not None:
        parts.buffers.end(gate)
    parts.average.update(good)
    numbers = control.for_host(engine.squared_norm(), scale.value, good)
    scale.update(good)
    return numbers


class DelayedNumbers:
    """Numbers of a step on their way to the host: each step's are read one step later.

    `losses` are those of the micro-batches here, of the step that was read last.
    """

    def __init__(self, state: Iterable[Any] = ()) -> None:
        """With what state() gave for a checkpoint, in a run that is resumed from it."""
        self.losses: list[tuple[int, Tensor]] = []
        self._waiting: list[tuple[Step, Arriving, list[tuple[int, Tensor]]]] = []
        for step, numbers in state:
            kept = torch.tensor(without_stop(numbers), dtype=torch.float64)
            self._waiting.append((Step(**step), Arriving(kept), []))

    @property
    def last(self) -> Step:
        """The step whose numbers came last."""
        return self._waiting[-1][0]

    def put(self, step: Step, result: StepResult) -> StepNumbers | None:
        """Queue a step's numbers; returns the step before's, if there was one."""
        before = self.take()
        self._waiting.append((step, Arriving(result.numbers), result.losses))
        return before

    def take(self) -> StepNumbers | None:
        """What has waited longest, if anything has."""
        if not self._waiting:
            return None
        step, arriving, self.losses = self._waiting.pop(0)
        return StepNumbers.unpack(step, arriving.read())

    def state(self) -> list[Any]:
        """What waits, for a checkpoint: the resumed run learns it as this one would have."""
        return self.state_later()()

    def state_later(self) -> Callable[[], list[Any]]:
        """The same as it is now, for who can wait until it is there."""
        waiting = tuple(self._waiting)
        return lambda: [(asdict(step), arriving.read()) for step, arriving, _ in waiting]


@torch.no_grad()
def score(
    net: nn.Module,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    images: int,
    config: Config,
    cluster: Cluster,
    waiting: AbstractContextManager[None] = _NOTHING,
) -> dict[str, float]:
    """Top-1, top-5 and loss over so many images, each counted once on whichever worker has it.

    `micro_batches` are the images and labels dealt to this worker, by the tree's dealing. It waits
    for the others inside `waiting`.
    """
    net.eval()
    # Each micro-batch is a leaf of the tree: the loss too is the same on any number of workers.
    count = -(-images // config.micro)
    like = torch.empty(0, dtype=full_dtype(config), device=cluster.device)
    total = TreeSum(COUNTS, like)
    total.begin(count, deal(count, cluster.world)[cluster.rank])
    for inputs, labels in micro_batches:
        odd = len(inputs) < config.micro  # the last one
        with autocast(config, cluster.device), as_it_is(net) if odd else _NOTHING:
            logits = logits_of(net(inputs), labels).to(like)
        total.push(counts(logits, labels, cross_entropy(logits, labels, reduction="sum")))
    with waiting:
        loss, top1, top5 = total.all_reduce(cluster).tolist()
    found = {"top1": top1, "top5": top5, "loss": loss}
    return {name: value / images for name, value in found.items()}
