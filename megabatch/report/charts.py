"""Charts as SVG, drawn here and not in the browser: lines over epochs, shares as bars, a heat map.

The drawing is stretched to whatever width it gets, with strokes that keep theirs; words are HTML
beside it, so that they are as sharp on a phone as on a wall.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megabatch.report.axes import ChartAxis, axis_of, far_apart, smoothed, thinned
from megabatch.report.look import colour, text
from megabatch.report.numbers import short

_WIDE, _HIGH = 1000.0, 1000.0
_SMOOTHED_FROM = 40
"""shorter lines are drawn as they are"""
_MOST_BARS = 60
"""more than these are drawn without a line between them"""


@dataclass
class Curve:
    """A line of a chart: where a value is nan, it is interrupted."""

    name: str
    run: int
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["smooth", "thin", "dots", "stairs", "plain"] = "plain"
    """smooth: a moving mean, with what it is the mean of behind it; thin: the mean alone"""
    middle: tuple[list[float], list[float]] = field(init=False)
    low: list[float] = field(init=False)
    high: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.middle, self.low, self.high = thinned(self.x, self.y, self.style == "stairs")


def chart(
    title: str,
    lines: Sequence[Curve],
    unit: str = "",
    *,
    log: bool = False,
    zero: bool = False,
    percent: bool = False,
    wide: bool = False,
) -> str:
    """Lines over epochs, in powers of ten if `log` and they are far apart; nothing where no line
    has a value."""
    lines = [line for line in lines if any(math.isfinite(v) for v in line.middle[1])]
    drawn = [
        v
        for line in lines
        for v in (_middle(line) if line.style == "thin" else (*line.low, *line.high))
    ]
    log = log and far_apart(drawn)
    y = axis_of(drawn, log, zero, keep_all=all(line.style == "stairs" for line in lines))
    xs = [v for line in lines for v in line.middle[0]]
    if y is None or not xs:
        return ""
    x = ChartAxis(0.0, 1.01 * max(xs) or 1.0)
    say = (lambda v: f"{100 * v:.4g} %") if percent else short
    parts = [
        f'<line class="grid" x1="0" x2="1000" y1="{_y(y, tick)}" y2="{_y(y, tick)}"/>'
        for tick in y.ticks(4)
    ]
    parts += [_paths(line, x, y) for line in lines]
    words = [
        f'<span class="y" style="bottom:{100 * y.place(tick):.2f}%">{text(say(tick))}</span>'
        for tick in y.ticks(4)
    ]
    words += [
        f'<span class="x" style="left:{100 * x.place(tick):.2f}%">{text(short(tick))}</span>'
        for tick in x.ticks(6)
    ]
    tips = {
        "percent": percent,
        "x": [x.low, x.high],
        "lines": [
            {
                "name": line.name,
                "run": line.run,
                "x": [brief(v) for v in line.middle[0]],
                "y": [brief(v) for v in _middle(line)],
            }
            for line in lines
        ],
    }
    caption = ", ".join(word for word in (unit, "log scale" if log else "") if word)
    return figure(title, caption, plot(parts, words, tips), wide)


def _middle(line: Curve) -> list[float]:
    values = line.middle[1]
    if line.style not in ("smooth", "thin") or len(values) < _SMOOTHED_FROM:
        return values
    return smoothed(values, len(values) / 40)


def _paths(line: Curve, x: ChartAxis, y: ChartAxis) -> str:
    xs, raw = line.middle
    style = f'data-run="{line.run}" style="--c:{colour(line.run)}"'
    places = [_WIDE * x.place(v) for v in xs]
    out = ""
    if line.style == "smooth" and len(xs) >= _SMOOTHED_FROM:
        if line.low != line.high:  # each point stands for several steps
            out += f'<path class="band" {style} d="{_band(places, line, y)}"/>'
        else:
            out += f'<path class="raw" {style} d="{_path(places, raw, y)}"/>'
        out += f'<path class="s" {style} d="{_path(places, _middle(line), y)}"/>'
    elif line.style == "stairs":
        out += f'<path class="s" {style} d="{_path(places, raw, y, stairs=True)}"/>'
    else:
        kind = "thin" if line.style == "thin" else "s"
        out += f'<path class="{kind}" {style} d="{_path(places, _middle(line), y)}"/>'
        if line.style == "dots" and len(xs) <= 60:
            # A line of no length with a round end is a dot, whatever the stretch.
            dots = "".join(
                f"M{a:.1f} {_y(y, b)}h0" for a, b in zip(places, raw, strict=True) if _finite(y, b)
            )
            out += f'<path class="dots" {style} d="{dots}"/>'
    return out


def _path(
    places: Sequence[float], values: Sequence[float], y: ChartAxis, stairs: bool = False
) -> str:
    out, drawing = "", False
    for place, value in zip(places, values, strict=True):
        if not _finite(y, value):
            drawing = False
            continue
        if drawing and stairs:
            out += f"H{place:.1f}V{_y(y, value)}"
        else:
            out += f"{'L' if drawing else 'M'}{place:.1f} {_y(y, value)}"
        drawing = True
    return out


def _band(places: Sequence[float], line: Curve, y: ChartAxis) -> str:
    points = [
        (place, low, high)
        for place, low, high in zip(places, line.low, line.high, strict=True)
        if _finite(y, low) and _finite(y, high)
    ]
    upper = "L".join(f"{place:.1f} {_y(y, high)}" for place, _, high in points)
    lower = "L".join(f"{place:.1f} {_y(y, low)}" for place, low, _ in reversed(points))
    return f"M{upper}L{lower}Z" if points else ""


def _finite(y: ChartAxis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not y.log)


def _y(axis: ChartAxis, value: float) -> str:
    return f"{_HIGH * (1 - axis.place(value)):.1f}"


def stacked_bars(title: str, names: Sequence[str], colours: Sequence[str], epochs: Sequence[float],
                 rows: Sequence[Sequence[float]], unit: str = "") -> str:  # fmt: skip
    """Bars of 100 %, one an epoch; row i has the share of each name up to epochs[i]."""
    if not rows:
        return ""
    x = ChartAxis(0.0, max(epochs) or 1.0)
    parts, before = [], 0.0
    kind = "bar" if len(rows) <= _MOST_BARS else ""
    for epoch, row in zip(epochs, rows, strict=True):
        left, right = _WIDE * x.place(before), _WIDE * x.place(epoch)
        before, base = epoch, 0.0
        for fraction, fill in zip(row, colours, strict=True):
            high = fraction * _HIGH
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" width="{max(right - left, 0.1):.1f}" '
                f'y="{_HIGH - base - high:.1f}" height="{high:.1f}" fill="var(--{fill})"/>'
            )
            base += high
    words = [f'<span class="y" style="bottom:{at}%">{at} %</span>' for at in (0, 25, 50, 75, 100)]
    words += [
        f'<span class="x" style="left:{100 * x.place(tick):.2f}%">{text(short(tick))}</span>'
        for tick in x.ticks(6)
    ]
    tips = {
        "percent": True,
        "x": [x.low, x.high],
        "lines": [
            {
                "name": name,
                "run": None,
                "fill": fill,
                "x": [brief(v) for v in epochs],
                "y": [brief(row[at]) for row in rows],
            }
            for at, (name, fill) in enumerate(zip(names, colours, strict=True))
        ],
    }
    return figure(title, unit, plot(parts, words, tips))


# Dark to light through violet, red and yellow: readable on either ground, in grey and to most
# colour-blind eyes.
_RAMP = (
    (34, 24, 88),
    (108, 33, 130),
    (186, 55, 110),
    (238, 104, 70),
    (251, 178, 75),
    (250, 246, 170),
)


def ramp(fraction: float) -> str:
    place = min(max(fraction, 0.0), 1.0) * (len(_RAMP) - 1)
    at = min(int(place), len(_RAMP) - 2)
    mixed = (a + (place - at) * (b - a) for a, b in zip(_RAMP[at], _RAMP[at + 1], strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def heat_map(
    title: str,
    names: Sequence[str],
    epochs: Sequence[float],
    cells: Sequence[Sequence[float]],
    axis: ChartAxis,
) -> str:
    """cells[row][column] by names and epochs, their colours along the axis; nan stays blank."""
    wide, high = _WIDE / len(epochs), _HIGH / len(names)
    parts = ['<rect width="1000" height="1000" fill="var(--blank)"/>']
    for at, row in enumerate(cells):
        for column, value in enumerate(row):
            if _finite(axis, value):
                parts.append(
                    f'<rect x="{column * wide:.2f}" y="{at * high:.2f}" width="{wide + 0.3:.2f}" '
                    f'height="{high + 0.3:.2f}" fill="{ramp(axis.place(value))}"/>'
                )
    ticks = range(0, len(epochs), max(1, -(-len(epochs) // 7)))
    words = [
        f'<span class="x" style="left:{100 * (at + 0.5) / len(epochs):.2f}%">'
        f"{text(f'{epochs[at]:.1f}')}</span>"
        for at in ticks
    ]
    tips = {
        "names": list(names),
        "epochs": [brief(v) for v in epochs],
        "cells": [[brief(v) for v in row] for row in cells],
    }
    row_px = 15 if len(names) > 24 else 20
    stops = ",".join(ramp(at / 8) for at in range(9))
    scale = (
        f'<small>{axis.low:.2g} <i class="ramp" style="background:linear-gradient(90deg,'
        f'{stops})"></i> {axis.high:.2g}</small>'
    )
    cut = ".weight" if all(name.endswith(".weight") for name in names) else ""
    labels = "".join(
        f'<span title="{text(name)}"><bdi>{text(name.removesuffix(cut))}</bdi></span>'
        for name in names
    )
    drawn = plot(parts, words, tips, f"height:{row_px * len(names)}px")
    return (
        f'<figure class="wide"><figcaption>{text(title)}{scale}</figcaption>'
        f'<div class="heat" style="--row:{row_px}px"><div class="names">{labels}</div>{drawn}</div>'
        "</figure>"
    )


def plot(parts: Sequence[str], words: Sequence[str], tips: dict[str, Any], style: str = "") -> str:
    data = json.dumps(tips, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="plot" style="{style}">'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>{''.join(words)}"
        f'<script type="application/json">{data}</script></div>'
    )


def figure(title: str, unit: str, drawn: str, wide: bool = False) -> str:
    extra = f"<small>{text(unit)}</small>" if unit else ""
    kind = "wide" if wide else "narrow"
    return f'<figure class="{kind}"><figcaption>{text(title)}{extra}</figcaption>{drawn}</figure>'


def brief(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
