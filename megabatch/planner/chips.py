"""Chips by generation: how much of a pass is fixed cost, and how fast they compute and remember.

A pass over n images takes as long as n + `half` images would at the chip's best rate: launches and
the last, half-empty wave of thread blocks in each layer do not shrink with n. `half` is therefore
the number of images at which ResNet-50 trains at half the chip's best rate. Where several kinds of
software were measured, it is seconds that stay. docs/planner.md has the curves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# One H200, ResNet-50 in bf16, by straight lines through what was measured: the fixed cost is 3.1 ms
# with the net as torch has it, 3.5 compiled whole and 4.0 by this trainer's kernels, while an image
# takes 0.194, 0.132 and 0.084 ms (results/planner). So it is seconds that such a chip has.
H200_FIXED = 3.5e-3
H200_BEST = 7590.0
"""images/s of large passes, compiled whole"""

PER_MULTIPROCESSOR = 0.217
"""`half` for each multiprocessor of a chip with tensor cores: the mean of three curves, V100's 0.19
and 0.26 and the H200's 0.20"""


@dataclass(frozen=True)
class Chip:
    """What is known of a generation. `flops` is the dense peak in the precision that trains on it;
    `bytes_each` what an activation takes in it."""

    name: str
    half: float
    flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    watts: float
    bytes_each: int = 2
    spread: float = 1.7
    """`half` may be so many times as large or as small"""
    source: str = ""
    fixed_seconds: float | None = None
    """of a pass of ResNet-50, whatever the software (None: so many as `half` images take)"""


_CURVE = f"assumed: {PER_MULTIPROCESSOR} for each of its multiprocessors, as on V100 and H200"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("k80", 2.5, 4.1e12, 0.24e12, 12e9, 150, 4, 1.5,
             "MXNet's table 1.5, TensorFlow's 3.4 [found: S29, S30]"),
        Chip("m40", 3.2, 6.8e12, 0.288e12, 12e9, 250, 4, 1.3, "MXNet's table [found: S29]"),
        Chip("p100", 7.5, 10.6e12, 0.732e12, 16e9, 300, 4, 1.3,
             "MXNet's table 6.0, TensorFlow's 9.0 [found: S29, S30]"),
        Chip("p40", 4.0, 12e12, 0.346e12, 24e9, 250, 4, 2.0,
             "assumed: the P100's for 30 multiprocessors in place of 56"),
        Chip("v100", 18.0, 125e12, 0.9e12, 16e9, 300, 2, 1.5,
             "TensorRT 15 [found: S31], Paddle 21 [found: S32]"),
        Chip("a100", 108 * PER_MULTIPROCESSOR, 312e12, 2.0e12, 80e9, 400, source=_CURVE),
        Chip("a30", 56 * PER_MULTIPROCESSOR, 165e12, 0.933e12, 24e9, 165, source=_CURVE),
        Chip("l40s", 12.0, 362e12, 0.864e12, 48e9, 350,
             source="assumed: launches and one wave of tiles take 6.7 ms, at 1,854 images/s"),
        Chip("h100", H200_FIXED * H200_BEST, 989e12, 3.35e12, 80e9, 700, 2, 1.3,
             "the H200's: the same multiprocessors", H200_FIXED),
        Chip("h200", H200_FIXED * H200_BEST, 989e12, 4.8e12, 141e9, 700, 2, 1.3,
             "measured: three kinds of software, 3.1, 3.5 and 4.0 ms (results/planner)",
             H200_FIXED),
        Chip("b200", 148 * PER_MULTIPROCESSOR, 2250e12, 7.7e12, 180e9, 1000, source=_CURVE),
        Chip("tpu", 8.0, 275e12, 1.2e12, 32e9, 200, 2, 2.2,
             "assumed: few large matrix units and no launches, half of a GPU of its speed"),
        Chip("cpu", 1.0, 3e12, 0.12e12, 96e9, 200, 4, 2.0,
             "MXNet's table: no faster beyond 4 images [found: S29]"),
    )
}  # fmt: skip

_OTHER_NAMES = {"xeon": "cpu", "epyc": "cpu", "knl": "cpu", "skx": "cpu", "l40": "l40s"}


def named_in(*texts: str) -> Chip | None:
    """The chip that a machine's name or its host's facts speak of."""
    for text in texts:
        words = re.findall(r"[a-z]+\d*[a-z]*", text.lower())
        for word in words:
            known = _OTHER_NAMES.get(word, word)
            if known in CHIPS:
                return CHIPS[known]
            # "tpuv4", "a100x8", "h100sxm5"
            begun = [name for name in CHIPS if word.startswith(name)]
            if begun:
                return CHIPS[max(begun, key=len)]
    return None


def unknown(rate: float) -> Chip:
    """A chip nobody named, that trains ResNet-50 at so many images/s.

    From a K80 to an H200, `half` grows as the square root of the rate does, within a factor of two.
    """
    h200 = CHIPS["h200"]
    scale = rate / H200_BEST
    half = h200.half * min(1.0, scale) ** 0.5
    return Chip(
        "unknown",
        half,
        scale * h200.flops,
        scale * h200.memory_bytes_per_second,
        0.0,
        0.0,
        spread=2.0,
        source="assumed from its speed: the chip is not named",
    )
