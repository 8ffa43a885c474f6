"""How long a run is: steps by stage of the batch, and epochs to a target."""

from __future__ import annotations

from math import ceil

from megabatch.config import Config
from megabatch.planner.workload import Images, Workload

# Batch against epochs to 75.9 % of top-1: MLPerf's reference convergence points [found: S9].
EPOCHS_TO_759 = (
    (1632, 35.0), (3264, 35.2), (4096, 40.0), (8192, 42.0), (13056, 45.4), (32768, 56.0),
    (49152, 68.0), (58880, 79.9), (65536, 84.5), (67840, 85.9),
)  # fmt: skip


def stretches(config: Config, images: int, epochs: float) -> list[tuple[int, int]]:
    """(batch, steps) of each stage, as the trainer counts them, without walking through the
    steps."""
    found, seen = [], 0
    begins = [stage.epoch for stage in config.all_stages[1:]] + [epochs]
    for stage, until in zip(config.all_stages, begins, strict=True):
        count = max(0, ceil((min(until, epochs) * images - seen) / stage.batch))
        if count:
            found.append((stage.batch, count))
            seen += count * stage.batch
    return found


def epochs_to_target(config: Config, workload: Workload, images: Images) -> float:
    """The config's epochs; fewer if it stops at a top-1 that MLPerf's ResNet-50 runs reach
    sooner."""
    target = config.target_accuracy
    if target is None or workload.name != "resnet50" or images.classes != 1000 or target > 0.759:
        return config.epochs
    batch = max(stage.batch for stage in config.all_stages)
    (low, first), *rest = EPOCHS_TO_759
    if batch <= low:
        return min(first, config.epochs)
    for high, last in rest:
        if batch <= high:
            known = first + (last - first) * (batch - low) / (high - low)
            return min(known, config.epochs)
        low, first = high, last
    return config.epochs
