"""What a chart does to numbers before it draws them: thin out, smooth, and place on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_POINTS = 360
_MOST_EPOCHS = 1e6
_NEAR = 3.0
"""times the range of nearly all values, within which the rest may widen an axis"""
_FAR = 20.0
"""times the least value, from which an axis may count in powers"""


def thinned(
    x: Sequence[float], y: Sequence[float], last: bool = False
) -> tuple[tuple[list[float], list[float]], list[float], list[float]]:
    """At most 360 points: means (or last values) of equal shares of the points, least, largest."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if 0 <= a < _MOST_EPOCHS]
    points_each = max(1, -(-len(points) // _MOST_POINTS))
    xs: list[float] = []
    ys: list[float] = []
    low: list[float] = []
    high: list[float] = []
    for first in range(0, len(points), points_each):
        some = points[first : first + points_each]
        values = [b for _, b in some if math.isfinite(b)]
        xs.append(some[-1 if last else len(some) // 2][0])
        ys.append((values[-1] if last else sum(values) / len(values)) if values else math.nan)
        low.append(min(values, default=math.nan))
        high.append(max(values, default=math.nan))
    return (xs, ys), low, high


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """The mean of about `span` values before each and as many after it, the near ones counting
    most: exponential means from both sides, so that nothing lags."""
    before = _exponential_means(values, span)
    after = _exponential_means(values[::-1], span)[::-1]
    return [(a + b) / 2 for a, b in zip(before, after, strict=True)]


def _exponential_means(values: Sequence[float], span: float) -> list[float]:
    keep, mean, weight = 1 - 1 / max(span, 1.0), 0.0, 0.0
    out = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
            out.append(mean / weight)
        else:
            out.append(math.nan)
    return out


@dataclass(frozen=True)
class ChartAxis:
    """From values to 0 ... 1."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else -math.inf
        low, high = self._ends()
        fraction = (value - low) / (high - low)
        return min(4.0, max(-3.0, fraction))  # what lies outside may lie just outside

    def _ends(self) -> tuple[float, float]:
        return (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)

    def ticks(self, about: int) -> list[float]:
        if self.log:
            first, last = (round(end) for end in self._ends())
            apart = max(1, -(-(last - first) // about))
            powers = [10.0**power for power in range(first - apart, last + apart + 1, apart)]
            found = [p for p in powers if self.low * 0.999 <= p <= self.high * 1.001]
            if len(found) >= 2:
                return found
        step = _round_step((self.high - self.low) / about)
        first_tick = math.ceil(self.low / step - 1e-9)
        last_tick = math.floor(self.high / step + 1e-9)
        return [tick * step for tick in range(first_tick, last_tick + 1)]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= least * 0.999)


def axis_of(
    values: Sequence[float], log: bool = False, zero: bool = False, keep_all: bool = False
) -> ChartAxis | None:
    """An axis for values; unless `keep_all`, those that lie far from nearly all others are left
    outside."""
    found = sorted(v for v in values if math.isfinite(v) and (v > 0 or not log))
    if not found:
        return None
    spare = 0 if keep_all else len(found) // 100
    low, high = found[spare], found[len(found) - 1 - spare]
    if not log:
        slack = _NEAR * (high - low)
        low, high = max(found[0], low - slack), min(found[-1], high + slack)
        low = min(low, 0.0) if zero else low
        largest = max(abs(low), abs(high))
        margin = max(0.04 * (high - low), 1e-6 * largest) if high > low else 0.05 * largest or 1.0
        return ChartAxis(low if zero and low == 0 else low - margin, high + margin)
    if high / low < 4:
        centre = math.sqrt(high) * math.sqrt(low)
        low, high = min(low, centre / 2), max(high, centre * 2)
    margin = (high / low) ** 0.04
    return ChartAxis(low / margin, high * margin, True)


def far_apart(values: Sequence[float]) -> bool:
    """Whether powers of ten show them better than a ruler."""
    found = sorted(v for v in values if v > 0)
    spare = len(found) // 50
    return bool(found) and found[len(found) - 1 - spare] > _FAR * found[spare]
