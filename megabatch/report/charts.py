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

from megabatch.report.look import colour, text
from megabatch.report.numbers import short

_WIDE, _HIGH = 1000.0, 1000.0
_MOST_POINTS = 360
_SMOOTHED_FROM = 40
"""shorter lines are drawn as they are"""
_MOST_EPOCHS = 1e6
_MOST_BARS = 60
"""more than these are drawn without a line between them"""
_NEAR = 3.0
"""times the range of nearly all values, within which the rest may widen an axis"""
_FAR = 20.0
"""times the least value, from which an axis may count in powers"""


@dataclass
class Line:
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


def thinned(
    x: Sequence[float], y: Sequence[float], last: bool = False
) -> tuple[tuple[list[float], list[float]], list[float], list[float]]:
    """At most 360 points: means (or last values) of equal shares of the points, least, largest."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if 0 <= a < _MOST_EPOCHS]
    share = max(1, -(-len(points) // _MOST_POINTS))
    xs: list[float] = []
    ys: list[float] = []
    low: list[float] = []
    high: list[float] = []
    for first in range(0, len(points), share):
        some = points[first : first + share]
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
class Axis:
    """From values to 0 ... 1."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else -math.inf
        low, high = self._ends()
        share = (value - low) / (high - low)
        return min(4.0, max(-3.0, share))  # what lies outside may lie just outside

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
    values: Sequence[float], log: bool = False, zero: bool = False, whole: bool = False
) -> Axis | None:
    """An axis for values; unless `whole`, those that lie far from nearly all others are left
    outside."""
    found = sorted(v for v in values if math.isfinite(v) and (v > 0 or not log))
    if not found:
        return None
    spare = 0 if whole else len(found) // 100
    low, high = found[spare], found[len(found) - 1 - spare]
    if not log:
        room = _NEAR * (high - low)
        low, high = max(found[0], low - room), min(found[-1], high + room)
        low = min(low, 0.0) if zero else low
        largest = max(abs(low), abs(high))
        margin = max(0.04 * (high - low), 1e-6 * largest) if high > low else 0.05 * largest or 1.0
        return Axis(low if zero and low == 0 else low - margin, high + margin)
    if high / low < 4:
        centre = math.sqrt(high) * math.sqrt(low)
        low, high = min(low, centre / 2), max(high, centre * 2)
    margin = (high / low) ** 0.04
    return Axis(low / margin, high * margin, True)


def chart(
    title: str,
    lines: Sequence[Line],
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
    log = log and _far_apart(drawn)
    y = axis_of(drawn, log, zero, whole=all(line.style == "stairs" for line in lines))
    xs = [v for line in lines for v in line.middle[0]]
    if y is None or not xs:
        return ""
    x = Axis(0.0, 1.01 * max(xs) or 1.0)
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
    told = {
        "percent": percent,
        "x": [x.low, x.high],
        "lines": [
            {
                "name": line.name,
                "run": line.run,
                "x": [_brief(v) for v in line.middle[0]],
                "y": [_brief(v) for v in _middle(line)],
            }
            for line in lines
        ],
    }
    said = ", ".join(word for word in (unit, "log scale" if log else "") if word)
    return _figure(title, said, _plot(parts, words, told), wide)


def _far_apart(values: Sequence[float]) -> bool:
    """Whether powers of ten show them better than a ruler."""
    found = sorted(v for v in values if v > 0)
    spare = len(found) // 50
    return bool(found) and found[len(found) - 1 - spare] > _FAR * found[spare]


def _middle(line: Line) -> list[float]:
    values = line.middle[1]
    if line.style not in ("smooth", "thin") or len(values) < _SMOOTHED_FROM:
        return values
    return smoothed(values, len(values) / 40)


def _paths(line: Line, x: Axis, y: Axis) -> str:
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


def _path(places: Sequence[float], values: Sequence[float], y: Axis, stairs: bool = False) -> str:
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


def _band(places: Sequence[float], line: Line, y: Axis) -> str:
    points = [
        (place, low, high)
        for place, low, high in zip(places, line.low, line.high, strict=True)
        if _finite(y, low) and _finite(y, high)
    ]
    upper = "L".join(f"{place:.1f} {_y(y, high)}" for place, _, high in points)
    lower = "L".join(f"{place:.1f} {_y(y, low)}" for place, low, _ in reversed(points))
    return f"M{upper}L{lower}Z" if points else ""


def _finite(y: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not y.log)


def _y(axis: Axis, value: float) -> str:
    return f"{_HIGH * (1 - axis.place(value)):.1f}"


def shares(title: str, names: Sequence[str], colours: Sequence[str], epochs: Sequence[float],
           rows: Sequence[Sequence[float]], unit: str = "") -> str:  # fmt: skip
    """Bars of 100 %, one an epoch; row i has the share of each name up to epochs[i]."""
    if not rows:
        return ""
    x = Axis(0.0, max(epochs) or 1.0)
    parts, before = [], 0.0
    kind = "bar" if len(rows) <= _MOST_BARS else ""
    for epoch, row in zip(epochs, rows, strict=True):
        left, right = _WIDE * x.place(before), _WIDE * x.place(epoch)
        before, base = epoch, 0.0
        for share, fill in zip(row, colours, strict=True):
            high = share * _HIGH
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
    told = {
        "percent": True,
        "x": [x.low, x.high],
        "lines": [
            {
                "name": name,
                "run": None,
                "fill": fill,
                "x": [_brief(v) for v in epochs],
                "y": [_brief(row[at]) for row in rows],
            }
            for at, (name, fill) in enumerate(zip(names, colours, strict=True))
        ],
    }
    return _figure(title, unit, _plot(parts, words, told))


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


def ramp(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    at = min(int(place), len(_RAMP) - 2)
    mixed = (a + (place - at) * (b - a) for a, b in zip(_RAMP[at], _RAMP[at + 1], strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def heat_map(
    title: str,
    names: Sequence[str],
    epochs: Sequence[float],
    cells: Sequence[Sequence[float]],
    axis: Axis,
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
    told = {
        "names": list(names),
        "epochs": [_brief(v) for v in epochs],
        "cells": [[_brief(v) for v in row] for row in cells],
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
    plot = _plot(parts, words, told, f"height:{row_px * len(names)}px")
    return (
        f'<figure class="wide"><figcaption>{text(title)}{scale}</figcaption>'
        f'<div class="heat" style="--row:{row_px}px"><div class="names">{labels}</div>{plot}</div>'
        "</figure>"
    )


def _plot(parts: Sequence[str], words: Sequence[str], told: dict[str, Any], style: str = "") -> str:
    data = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="plot" style="{style}">'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>{''.join(words)}"
        f'<script type="application/json">{data}</script></div>'
    )


def _figure(title: str, unit: str, plot: str, wide: bool = False) -> str:
    extra = f"<small>{text(unit)}</small>" if unit else ""
    kind = "wide" if wide else "narrow"
    return f'<figure class="{kind}"><figcaption>{text(title)}{extra}</figcaption>{plot}</figure>'


def _brief(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


SCRIPT = r"""
(() => {
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip"; tip.hidden = true;
const say = (v, percent) => v == null ? "\u2013" : percent ? (100 * v).toFixed(2) + " %" :
  Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
const nearest = (xs, x) => {
  let a = 0, b = xs.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
  return Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
};
const row = (name, value, colour, box) => {
  const line = document.createElement("div");
  if (colour) {
    const dot = line.appendChild(document.createElement("i"));
    dot.className = box ? "dot box" : "dot"; dot.style.setProperty("--c", colour);
  }
  line.appendChild(document.createElement("span")).textContent = name;
  line.appendChild(document.createElement("span")).textContent = value;
  return line;
};
const hidden = new Set();
const lines = (told, share) => {
  const x = told.x[0] + share * (told.x[1] - told.x[0]), rows = [];
  let near = null;
  for (const line of told.lines) {
    if (!line.x.length || hidden.has(line.run)) continue;
    // A bar ends at its epoch; a line has a point there.
    let at = nearest(line.x, x);
    if (line.fill) { at = line.x.findIndex(end => end >= x); if (at < 0) at = line.x.length - 1; }
    if (near == null) near = line.x[at];
    rows.push(row(line.name, say(line.y[at], told.percent),
      line.fill ? `var(--${line.fill})` : `var(--c${line.run % 8})`, line.fill));
  }
  return [row("epoch " + (near == null ? "" : +near.toPrecision(4)), ""), ...rows];
};
const cell = (told, share, down) => {
  const column = Math.min(told.epochs.length - 1, Math.floor(share * told.epochs.length));
  const at = Math.min(told.names.length - 1, Math.floor(down * told.names.length));
  const value = say(told.cells[at][column]);
  return [row(told.names[at], ""), row("epoch " + told.epochs[column], value)];
};
for (const plot of document.querySelectorAll(".plot")) {
  const told = JSON.parse(plot.querySelector("script").textContent);
  const cross = plot.appendChild(document.createElement("div"));
  cross.className = "cross"; cross.hidden = true;
  const show = event => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const down = Math.min(1, Math.max(0, (event.clientY - box.top) / box.height));
    tip.replaceChildren(...(told.lines ? lines(told, share) : cell(told, share, down)));
    cross.style.left = 100 * share + "%";
    tip.hidden = cross.hidden = false;
    const size = tip.getBoundingClientRect();
    const left = event.clientX + 16 + size.width > innerWidth
      ? event.clientX - 16 - size.width : event.clientX + 16;
    tip.style.left = Math.max(6, left) + "px";
    tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - size.height - 6)) + "px";
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { tip.hidden = cross.hidden = true; });
}
for (const button of document.querySelectorAll("button[data-run]")) {
  button.addEventListener("click", () => {
    const run = +button.dataset.run, off = !hidden.has(run);
    hidden[off ? "add" : "delete"](run);
    button.setAttribute("aria-pressed", String(!off));
    const parts = document.querySelectorAll(`svg [data-run="${run}"]`);
    for (const part of parts) part.toggleAttribute("hidden", off);
  });
}
})();
"""
