"""Means with their spread: 95 % intervals of Student's t, over as few seeds as there are."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean over seeds and half of its 95 % interval (nan: one value has no spread)."""

    value: float
    half: float
    seeds: int

    def __str__(self) -> str:
        spread = f" ± {self.half:.3g}" if math.isfinite(self.half) else ""
        return f"{self.value:.4g}{spread}"


def mean(values: Sequence[float]) -> Mean:
    """Of those that are known."""
    values = _known(values)
    count = len(values)
    if count == 0:
        return Mean(math.nan, math.nan, 0)
    if count == 1:
        return Mean(values[0], math.nan, 1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Mean(statistics.fmean(values), quantile(count - 1) * error, count)


def difference(values: Sequence[float], others: Sequence[float]) -> Mean:
    """The mean of `values` less that of `others`, each with a spread of its own (Welch)."""
    values, others = _known(values), _known(others)
    value = mean(values).value - mean(others).value
    count = min(len(values), len(others))
    if count < 2:
        return Mean(value, math.nan, count)
    parts = [(statistics.variance(some) / len(some), len(some) - 1) for some in (values, others)]
    square = sum(part for part, _ in parts)
    if square == 0:
        return Mean(value, 0.0, count)
    freedom = square**2 / sum(part**2 / degrees for part, degrees in parts)
    return Mean(value, quantile(freedom) * math.sqrt(square), count)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


@functools.lru_cache(maxsize=256)
def quantile(freedom: float, level: float = LEVEL) -> float:
    """The t with P(|T| < t) = level. With t = sqrt(freedom) tan(x) that probability is the
    integral of cos^(freedom - 1) up to x, over the one up to pi / 2."""
    if not freedom > 0:
        return math.nan
    full = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    full *= math.sqrt(math.pi) / 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _integral(middle, freedom - 1) < level * full:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _integral(end: float, power: float, pieces: int = 400) -> float:
    """Of cos^power from 0 to `end`, by Simpson's rule."""
    wide = end / pieces
    total = 0.0
    for index in range(pieces + 1):
        weight = 1 if index in (0, pieces) else 4 if index % 2 else 2
        total += weight * max(0.0, math.cos(index * wide)) ** power
    return total * wide / 3
