"""The control vector: the few numbers of a step that are summed over workers behind its gradients.

Its layout is named here and nowhere else: what a micro-batch puts in, what a worker puts in, what
the device reads of the sum, and what the host reads of it a step later.

    0  squares     squared norms of the micro-batches' gradients   put in by each micro-batch
    1  stop        workers that were asked to stop                 by each worker
    2  batch       the batch proposed for the steps to come        by the first worker
    3  loss        sum over images                                 by each micro-batch
    4  top1, 5 top5   images whose label is the best, among the five best
    6  statistics  batch norm's means and variances                by each micro-batch
       reached     workers whose passes came to each parameter     by each worker, if not alone
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.batch import Step

SQUARES, STOP, BATCH, LOSS, TOP1, TOP5, STATISTICS = range(7)
COUNTS = STATISTICS - LOSS


def length(statistics: int, parameters: int = 0) -> int:
    """Of the vector of a net whose batch norm has so many statistics, and that has so many
    parameters to tell of."""
    return STATISTICS + statistics + parameters


def counts(logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """Loss, top-1 and top-5 of some images, in the vector's order; `loss` is their sum."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    found = best.sum(0, dtype=loss.dtype)
    return torch.stack([loss, found[0], found.sum()])


def pack_micro_batch(row: Tensor, squares: Tensor, counts: Tensor, statistics: Tensor) -> None:
    """Fill a row with what one micro-batch contributes."""
    nothing = row.new_zeros(LOSS - STOP)
    parts = [squares.view(1), nothing, counts, statistics]
    if parameters := len(row) - length(len(statistics)):
        parts.append(row.new_zeros(parameters))
    torch.cat(parts, out=row)


def pack_worker(
    row: Tensor, stop: bool, batch: int, parameters: int = 0, unreached: Collection[int] = ()
) -> None:
    """Fill a row with what one worker contributes, whether it was dealt micro-batches or not;
    `unreached` are those of the parameters that none of its passes came to."""
    # By fills, whose numbers travel with the launch: an assignment would copy them from the host's
    # memory, and wait for the device.
    row.zero_()
    row[STOP].fill_(float(stop))
    row[BATCH].fill_(batch)
    if len(unreached) < parameters:
        reached = row[-parameters:].fill_(1.0)
        for index in unreached:
            reached[index].fill_(0.0)


@dataclass(frozen=True)
class Control:
    """The sum over all micro-batches and workers, on the device."""

    vector: Tensor
    parameters: int = 0
    """that it tells of"""

    @property
    def good(self) -> Tensor:
        """Whether the step counts, a boolean: every gradient in it is finite."""
        return self.vector[SQUARES] < math.inf  # a sum of squares, or not a number

    def mean_statistics(self, count: int) -> Tensor:
        """Over so many micro-batches."""
        sums = self.vector[STATISTICS : len(self.vector) - self.parameters]
        return sums / count if count > 1 else sums

    def reached(self, index: int) -> Tensor:
        """Whether a pass of any worker came to a parameter, a boolean, where one did not here."""
        if self.parameters == 0:
            return torch.zeros((), dtype=torch.bool, device=self.vector.device)
        return self.vector[index - self.parameters] > 0

    def for_host(self, gradient_square: Tensor, loss_scale: Tensor, good: Tensor) -> Tensor:
        """What the host wants to know of the step, as StepNumbers.unpack reads it."""
        rest = [number.to(self.vector) for number in (gradient_square, loss_scale, good)]
        return torch.cat([self.vector[:STATISTICS], torch.stack(rest)])


@dataclass(frozen=True)
class StepNumbers:
    """What the host learns of a step, one step later. Sums of squares are without the loss
    scale."""

    step: Step
    squares: float
    """of the micro-batches' gradients, each divided by their number"""
    stop: bool
    batch: int
    """that the first worker proposes for the steps to come; 0: none"""
    loss: float
    top1: float
    top5: float
    gradient_square: float
    """squared norm of the whole gradient"""
    loss_scale: float
    skipped: bool

    @staticmethod
    def unpack(step: Step, numbers: list[float]) -> StepNumbers:
        """From the numbers of Control.for_host."""
        squares, stop, batch, loss, top1, top5, gradient_square, scale, good = numbers
        images = step.batch
        return StepNumbers(
            step,
            squares / scale**2,
            stop > 0,
            int(batch),
            loss / images,
            top1 / images,
            top5 / images,
            gradient_square,
            scale,
            good == 0,
        )


def without_stop(numbers: list[float]) -> list[float]:
    """The host's numbers of a step as a resumed run takes them: it does not want to stop."""
    return [*numbers[:STOP], 0.0, *numbers[STOP + 1 :]]
