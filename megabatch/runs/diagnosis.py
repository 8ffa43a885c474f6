"""What is known of a step whose loss or gradient is not a finite number, in a file and in words."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.errors import RunFailed
from megabatch.runs import checkpoint
from megabatch.runs.folder import RunFolder
from megabatch.sync.control import StepNumbers


def diagnosis(
    numbers: StepNumbers,
    losses: list[tuple[int, Tensor]],
    net: nn.Module,
    folder: RunFolder,
    cluster: Cluster,
) -> RunFailed:
    """The error to raise; every worker calls it, with the losses of its own micro-batches.

    The step's update was left out, so the weights are still those before it.
    """
    bad = [first for first, loss in losses if not math.isfinite(float(loss))]
    found: list[list[int]] = [bad]
    if cluster.world > 1:
        found = [[]] * cluster.world
        dist.all_gather_object(found, bad, group=cluster.group)
    positions = sorted(first for part in found for first in part)
    with torch.no_grad():
        norms = {name: float(p.norm()) for name, p in net.named_parameters()}
    step = numbers.step
    record = {
        "step": step.index,
        "epoch": step.epoch,
        "loss": str(numbers.loss),
        "loss_scale": numbers.loss_scale,
        "positions": [step.seen, step.seen + step.batch],
        "micro_batches_with_bad_loss": positions,
        "weight_norms": norms,
    }
    folder.write("diagnosis.json", record)
    cluster.barrier()  # the first worker to fail ends the others: not before it is written
    largest = sorted(norms, key=lambda name: -norms[name])[:3]
    where = f"at positions {positions[:5]}" if positions else "in the gradient, not in the loss"
    saved = checkpoint.newest(folder.path / "checkpoints") if folder.path else None
    return RunFailed(
        f"step {step.index} (epoch {step.epoch:.2f}) has no finite "
        f"{'loss' if positions else 'gradient'}: loss {numbers.loss}, "
        f"images at positions {step.seen} to {step.seen + step.batch - 1}, found {where}; "
        f"largest weights: "
        + ", ".join(f"{name} |w| {norms[name]:.3g}" for name in largest)
        + "; "
        + (f"last good checkpoint: {saved}; " if saved else "")
        + "lower the rate, lengthen the warm-up or check those images"
    )
