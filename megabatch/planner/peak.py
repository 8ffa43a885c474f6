"""The share of a chip's peak FLOP/s that training reaches, by the nets' formulas."""

from __future__ import annotations

from megabatch.planner.chips import named_in
from megabatch.planner.nets import BUILDERS


def share_of_peak(
    chip: str, model: str, size: int, channels: int, classes: int, images_per_second: float
) -> float | None:
    """Of one chip that trains so many images/s; None where its name or the model's says nothing.

    A multiply-add is two operations, and backward does each of forward's twice. The peak is that of
    the precision the chip is for: a V100's or an H200's in half precision.
    """
    known = named_in(chip)
    if known is None or model not in BUILDERS:
        return None
    forward = 2 * sum(each.multiply_adds for each in BUILDERS[model](size, channels, classes))
    return 3 * forward * images_per_second / known.flops
