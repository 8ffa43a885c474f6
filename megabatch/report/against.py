"""Values against the batch: means with 95 % intervals, and the single runs pale beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.report.axes import ChartAxis, axis_of, far_apart
from megabatch.report.charts import brief, figure, plot
from megabatch.report.look import colour, text
from megabatch.report.numbers import short

_MARGIN = 0.45
"""in doublings of the batch, left and right of the outermost"""
_CAP = 5.0
"""half the width of an interval's ends, in thousandths of the chart's"""


@dataclass(frozen=True)
class Points:
    """A line over batches; nan interrupts it."""

    name: str
    run: int
    """its colour"""
    batches: Sequence[int]
    values: Sequence[float]
    halves: Sequence[float] = ()
    """of the intervals around the values"""
    singles: Sequence[tuple[int, float]] = ()
    dashed: bool = False


def against_batch(
    title: str,
    lines: Sequence[Points],
    unit: str = "",
    *,
    percent: bool = False,
    log: bool = False,
    zero: bool = False,
    level: float = math.nan,
    wide: bool = False,
) -> str:
    """Lines over batches, each doubling as wide as the next; `level` is drawn across. Nothing where
    no line has a value."""
    lines = [line for line in lines if any(map(math.isfinite, line.values))]
    x = batch_axis([batch for line in lines for batch in line.batches])
    reach = [v for line in lines for v in _reach(line)] + [level]
    log = log and far_apart(reach)
    y = axis_of(reach, log, zero, keep_all=True)
    if x is None or y is None:
        return ""
    say = (lambda v: f"{100 * v:.4g} %") if percent else short
    ticks = sorted({batch for line in lines for batch in line.batches})
    parts = [
        f'<line class="grid" x1="0" x2="1000" y1="{_down(y, tick)}" y2="{_down(y, tick)}"/>'
        for tick in y.ticks(4)
    ]
    if math.isfinite(level):
        at = _down(y, level)
        parts.append(f'<line class="level" x1="0" x2="1000" y1="{at}" y2="{at}"/>')
    parts += [_drawn(line, x, y) for line in lines]
    words = [
        f'<span class="y" style="bottom:{100 * y.place(tick):.2f}%">{text(say(tick))}</span>'
        for tick in y.ticks(4)
    ]
    words += [
        f'<span class="x" style="left:{100 * x.place(math.log2(batch)):.2f}%">{batch:,}</span>'
        for batch in ticks
    ]
    tips = {
        "percent": percent,
        "batches": True,
        "x": [x.low, x.high],
        "lines": [
            {
                "name": line.name,
                "run": line.run,
                "x": [brief(math.log2(batch)) for batch in line.batches],
                "y": [brief(value) for value in line.values],
            }
            for line in lines
        ],
    }
    caption = ", ".join(word for word in (unit, "log scale" if log else "") if word)
    return figure(title, caption, plot(parts, words, tips), wide)


def batch_axis(batches: Sequence[int]) -> ChartAxis | None:
    """Of the logarithms to base 2, with room on both sides."""
    if not batches:
        return None
    return ChartAxis(math.log2(min(batches)) - _MARGIN, math.log2(max(batches)) + _MARGIN)


def _reach(line: Points) -> list[float]:
    halves = line.halves or [math.nan] * len(line.values)
    ends = [v + sign * h for v, h in zip(line.values, halves, strict=True) for sign in (-1, 1)]
    return [v for v in (*line.values, *ends, *(v for _, v in line.singles)) if math.isfinite(v)]


def _drawn(line: Points, x: ChartAxis, y: ChartAxis) -> str:
    style = f'data-run="{line.run}" style="--c:{colour(line.run)}"'
    places = [1000 * x.place(math.log2(batch)) for batch in line.batches]
    path, dots, bars, drawing = "", "", "", False
    halves = line.halves or [math.nan] * len(line.values)
    for place, value, half in zip(places, line.values, halves, strict=True):
        if not math.isfinite(value):
            drawing = False
            continue
        path += f"{'L' if drawing else 'M'}{place:.1f} {_down(y, value)}"
        dots += f"M{place:.1f} {_down(y, value)}h0"
        drawing = True
        if math.isfinite(half) and half > 0:
            low, high = (_down(y, value + sign * half) for sign in (-1, 1))
            bars += f"M{place:.1f} {low}V{high}"
            bars += "".join(f"M{place - _CAP:.1f} {end}h{2 * _CAP:g}" for end in (low, high))
    singles = "".join(
        f"M{1000 * x.place(math.log2(batch)) + 9:.1f} {_down(y, value)}h0"
        for batch, value in line.singles
        if math.isfinite(value)
    )
    dash = " dash" if line.dashed else ""
    out = f'<path class="s{dash}" {style} d="{path}"/>'
    out += f'<path class="whisker" {style} d="{bars}"/>' if bars else ""
    out += f'<path class="single" {style} d="{singles}"/>' if singles else ""
    return out + f'<path class="dots" {style} d="{dots}"/>'


def _down(axis: ChartAxis, value: float) -> str:
    return f"{1000 * (1 - axis.place(value)):.1f}"
