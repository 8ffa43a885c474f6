"""The gradient noise scale, measured for free, and a batch that follows it.

With B images a step in micro-batches of m, the mean squared norm of the micro-batches' gradients
and the squared norm of their mean give two equations for |G|^2, the true gradient, and tr(S), the
noise of one image: E|g_m|^2 = |G|^2 + tr(S)/m and E|g_B|^2 = |G|^2 + tr(S)/B. Their ratio
tr(S)/|G|^2 is the batch at which noise and signal are even (McCandlish 2018, appendix A.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megabatch.config import Config


@dataclass
class NoiseScale:
    """Two moving averages; their ratio is the estimate (a mean of ratios would be biased)."""

    trace: float = 0.0
    square: float = 0.0

    def update(
        self, squares: float, mean_square: float, count: int, micro: int, memory: float
    ) -> None:
        """Take in one step.

        `squares` is the sum of the micro-batches' squared gradient norms as the control vector has
        it (each gradient already divided by the number of micro-batches, `count`), `mean_square`
        the squared norm of the whole gradient. A step of one micro-batch says nothing; nor does
        one that overflowed.
        """
        if count < 2 or not math.isfinite(squares + mean_square):
            return
        small, large = micro, micro * count
        small_square = squares * count
        square = (large * mean_square - small * small_square) / (large - small)
        trace = (small_square - mean_square) / (1 / small - 1 / large)
        self.square = memory * self.square + (1 - memory) * square
        self.trace = memory * self.trace + (1 - memory) * trace

    @property
    def scale(self) -> float | None:
        """In images; None while it is undefined."""
        return self.trace / self.square if self.square > 0 and self.trace > 0 else None


def following_batch(config: Config, batch: int, scale: float | None) -> int:
    """The batch after `batch`: doubled or halved once the noise scale asks for that much, in
    bounds."""
    if scale is None:
        return batch
    least = config.noise.least or config.batch
    most = config.noise.most or 8 * config.batch
    wanted = config.noise.multiple * scale
    if wanted >= 2 * batch and 2 * batch <= most:
        return 2 * batch
    if wanted <= batch / 2 and batch % (2 * config.micro) == 0 and batch // 2 >= least:
        return batch // 2
    return batch
