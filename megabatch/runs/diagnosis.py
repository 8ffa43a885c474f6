"""What is known of a run that cannot go on, in words: its loss or gradient is not a finite number,
or its workers no longer hold the same weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.errors import RunFailed
from megabatch.runs import checkpoint
from megabatch.runs.folder import RunFolder
from megabatch.sync.control import StepNumbers
from megabatch.sync.replicas import Comparison


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
    positions = sorted(first for part in cluster.gather(bad) for first in part)
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
    folder.wait()
    folder.write("diagnosis.json", record)
    cluster.barrier()  # the first worker to fail ends the others: not before it is written
    largest = sorted(norms, key=lambda name: -norms[name])[:3]
    where = f"at positions {positions[:5]}" if positions else "in the gradient, not in the loss"
    saved = checkpoint.newest(folder.path / "checkpoints") if folder.path else None
    # A dynamic scale is at its least before a run ends by it; a fixed one may be the whole cause.
    scaled = not positions and numbers.loss_scale > 1
    return RunFailed(
        f"step {step.index} (epoch {step.epoch:.2f}) has no finite "
        f"{'loss' if positions else 'gradient'}: loss {numbers.loss}, "
        f"images at positions {step.seen} to {step.seen + step.batch - 1}, found {where}; "
        f"largest weights: "
        + ", ".join(f"{name} |w| {norms[name]:.3g}" for name in largest)
        + "; "
        + (f"last good checkpoint: {saved}; " if saved else "")
        + (f"lower --loss-scale, which is {numbers.loss_scale:g}, " if scaled else "")
        + "lower the rate, lengthen the warm-up or check those images"
    )


def divergence(comparison: Comparison, run: Path | None) -> RunFailed:
    """The error to raise. It waits for nobody: of those who differ one may be gone. What was saved
    in the run's folder had been compared before."""
    differing = comparison.differing()
    named = _listed([f"rank {rank} ({comparison.hosts[rank]})" for rank in differing])
    hold = "holds" if len(differing) == 1 else "hold"
    what = f"no longer {hold} the weights of the others"
    if len(differing) == len(comparison.hosts):
        what = "no longer hold the same weights, and no majority does"
    saved = checkpoint.newest(run / "checkpoints") if run is not None else None
    return RunFailed(
        f"after step {comparison.step} {named} {what}: a broken chip or memory, or machines that "
        f"do not compute alike; "
        + (f"the last checkpoint that agreed is {saved} (--resume); " if saved else "")
        + "--compare-every 0 compares no more"
    )


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 8 else [*names[:7], f"{len(names) - 7} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)
