"""Lines as a picture of their own: an SVG with words in it, for a README or a talk, in light or
dark as the reader's system is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megabatch.report.axes import ChartAxis
from megabatch.report.look import RUN_COLOURS, text

_WIDE, _HIGH = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 36, 52
_ROW = 20
"""height of a row of names"""
_LETTER = 8.0
"""no letter of a name is wider on average"""
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
    "fill:#5d6672}.t{font-size:15px;font-weight:600;fill:#16191d}"
    ".ground{fill:#fff}.grid{stroke:#e2e5ea}.level{stroke:#5d6672;stroke-dasharray:5 4}"
    ".c0{--c:#2563eb}.c1{--c:#e0580b}.c2{--c:#0a8f63}.c3{--c:#b8257a}.c4{--c:#7044e0}"
    ".c5{--c:#08788c}.c6{--c:#8a6400}.c7{--c:#59606b}"
    ".s{stroke:var(--c);stroke-width:2.5;fill:none}.dash{stroke-dasharray:6 5}"
    ".bar{stroke:var(--c);stroke-width:1.5}"
    ".dot{fill:var(--c)}.one{fill:var(--c);opacity:.35}text.name{fill:var(--c);font-weight:600}"
    "@media (prefers-color-scheme:dark){text{fill:#9aa4b2}.t{fill:#e8eaee}.ground{fill:#181c22}"
    ".grid{stroke:#2a303a}.level{stroke:#9aa4b2}.c0{--c:#6ea0ff}.c1{--c:#ff9752}.c2{--c:#46cf9b}"
    ".c3{--c:#f47cc0}.c4{--c:#b197fc}.c5{--c:#4cc9dd}.c6{--c:#dcb550}.c7{--c:#aab2bf}}"
)


@dataclass(frozen=True)
class DottedLine:
    """A line of a picture, with a dot at every point."""

    name: str
    points: Sequence[tuple[float, float]]
    halves: Sequence[float] = ()
    """of the intervals around the points; nan: none"""
    singles: Sequence[tuple[float, float]] = ()
    """what the points are the means of, pale beside them"""
    dashed: bool = False

    @property
    def reach(self) -> list[float]:
        """Every height that the line needs room for."""
        ends = [
            value + sign * half
            for (_, value), half in zip(self.points, self.halves or (), strict=False)
            for sign in (-1, 1)
        ]
        values = [value for _, value in (*self.points, *self.singles)]
        return [value for value in (*values, *ends) if math.isfinite(value)]


def picture(
    title: str,
    lines: Sequence[DottedLine],
    x: ChartAxis,
    y: ChartAxis,
    *,
    ticks: Sequence[tuple[float, str]],
    across: str,
    say: Callable[[float], str],
    level: float = math.nan,
) -> str:
    """The whole file: `ticks` are places along x with their words, `across` says what x counts,
    `say` puts a height into words, and `level` is drawn from side to side."""
    names, rows = _names(lines if len(lines) > 1 else ())
    top, bottom = _TOP + rows * _ROW, _HIGH + rows * _ROW - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (
            _LEFT + x.place(point[0]) * (_WIDE - _LEFT - _RIGHT),
            bottom - y.place(point[1]) * (bottom - top),
        )

    def level_line(kind: str, value: float) -> str:
        return (
            f'<path class="{kind}" d="M{_LEFT} {place((x.low, value))[1]:.1f}H{_WIDE - _RIGHT}"/>'
        )

    high = bottom + _BOTTOM
    parts = [f'<rect class="ground" width="{_WIDE}" height="{high}" rx="10"/>']
    parts.append(f'<text class="t" x="{_LEFT}" y="26">{text(title)}</text>')
    for tick in y.ticks(5):
        down = place((x.low, tick))[1]
        parts.append(level_line("grid", tick))
        parts.append(
            f'<text x="{_LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{text(say(tick))}</text>'
        )
    for at, words in ticks:
        parts.append(
            f'<text x="{place((at, y.low))[0]:.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{text(words)}</text>"
        )
    parts.append(
        f'<text x="{(_WIDE + _LEFT) / 2:.0f}" y="{high - 10}" text-anchor="middle">'
        f"{text(across)}</text>"
    )
    if math.isfinite(level):
        parts.append(level_line("level", level))
    for at, line in enumerate(lines):
        named = names[at] if names else ""
        parts.append(f'<g class="c{at % RUN_COLOURS}">{_drawn(line, place)}{named}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {high}" width="{_WIDE}" '
        f'height="{high}" role="img"><title>{text(title)}</title><style>{_STYLE}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def _names(lines: Sequence[DottedLine]) -> tuple[list[str], int]:
    """Each line's name behind a piece of it, in rows under the title, and how many rows."""
    out, left, row = [], float(_LEFT), 0
    for line in lines:
        wide = 28 + _LETTER * len(line.name)
        if left > _LEFT and left + wide > _WIDE - _RIGHT:
            left, row = float(_LEFT), row + 1
        down = 46 + row * _ROW
        out.append(
            f'<path class="{_kind(line)}" d="M{left:.0f} {down - 4}h20"/>'
            f'<text class="name" x="{left + 26:.0f}" y="{down}">{text(line.name)}</text>'
        )
        left += wide + 14
    return out, row + 1 if out else 0


def _kind(line: DottedLine) -> str:
    return "s dash" if line.dashed else "s"


def _drawn(line: DottedLine, place: Callable[[tuple[float, float]], tuple[float, float]]) -> str:
    known = [point for point in line.points if math.isfinite(point[1])]
    path = "L".join(f"{across:.1f} {down:.1f}" for across, down in map(place, known))
    out = f'<path class="{_kind(line)}" d="M{path}"/>' if path else ""
    for (at, value), half in zip(line.points, line.halves, strict=False):
        if math.isfinite(half):
            (middle, low), (_, high) = (place((at, value + sign * half)) for sign in (-1, 1))
            out += (
                f'<path class="bar" d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 5:.1f} '
                f'{low:.1f}h10M{middle - 5:.1f} {high:.1f}h10"/>'
            )
    for across, down in map(place, line.singles):
        out += f'<circle class="one" cx="{across + 9:.1f}" cy="{down:.1f}" r="2.5"/>'
    for across, down in map(place, known):
        out += f'<circle class="dot" cx="{across:.1f}" cy="{down:.1f}" r="4.5"/>'
    return out
