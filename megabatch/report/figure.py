"""The study's figure as a picture of its own: an SVG with words in it, for a README or a talk, in
light or dark as the reader's system is."""

from __future__ import annotations

import math

from megabatch.report.against import batch_axis
from megabatch.report.axes import axis_of
from megabatch.report.look import text
from megabatch.study.results import Cell, Study
from megabatch.study.spread import mean
from megabatch.study.trials import RECIPE

_WIDE, _HIGH = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 56, 52
_COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
    "fill:#5d6672}.t{font-size:15px;font-weight:600;fill:#16191d}"
    ".ground{fill:#fff}.grid{stroke:#e2e5ea}.level{stroke:#5d6672;stroke-dasharray:5 4}"
    ".c0{--c:#2563eb}.c1{--c:#e0580b}.c2{--c:#0a8f63}.c3{--c:#b8257a}.c4{--c:#7044e0}"
    ".c5{--c:#08788c}.c6{--c:#8a6400}.c7{--c:#59606b}"
    ".s{stroke:var(--c);stroke-width:2.5;fill:none}.bar{stroke:var(--c);stroke-width:1.5}"
    ".dot{fill:var(--c)}.one{fill:var(--c);opacity:.35}text.name{fill:var(--c);font-weight:600}"
    "@media (prefers-color-scheme:dark){text{fill:#9aa4b2}.t{fill:#e8eaee}.ground{fill:#181c22}"
    ".grid{stroke:#2a303a}.level{stroke:#9aa4b2}.c0{--c:#6ea0ff}.c1{--c:#ff9752}.c2{--c:#46cf9b}"
    ".c3{--c:#f47cc0}.c4{--c:#b197fc}.c5{--c:#4cc9dd}.c6{--c:#dcb550}.c7{--c:#aab2bf}}"
)


def error_figure(study: Study, title: str) -> str:
    """Top-1 error against batch, with 95 % intervals over seeds; empty where no run has
    finished."""
    cells = [cell for cell in study.cells if cell.finished]
    arms = list(dict.fromkeys(c.arm for c in cells if _is_line(cells, c)))
    cells = [cell for cell in cells if cell.arm in arms]
    x = batch_axis([cell.batch for cell in cells])
    y = axis_of([v for cell in cells for v in _reach(cell)], whole=True)
    if x is None or y is None or study.baseline is None:
        return ""

    def across(batch: int) -> float:
        return _LEFT + x.place(math.log2(batch)) * (_WIDE - _LEFT - _RIGHT)

    def down(error: float) -> float:
        return _HIGH - _BOTTOM - y.place(error) * (_HIGH - _TOP - _BOTTOM)

    def across_all(kind: str, at: float) -> str:
        return f'<path class="{kind}" d="M{_LEFT} {at:.1f}H{_WIDE - _RIGHT}"/>'

    parts = [f'<rect class="ground" width="{_WIDE}" height="{_HIGH}" rx="10"/>']
    parts.append(f'<text class="t" x="{_LEFT}" y="26">{text(title)}</text>')
    for tick in y.ticks(5):
        parts.append(across_all("grid", down(tick)))
        parts.append(
            f'<text x="{_LEFT - 8}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:g} %</text>'
        )
    for batch in sorted({cell.batch for cell in cells}):
        parts.append(
            f'<text x="{across(batch):.1f}" y="{_HIGH - _BOTTOM + 20}" text-anchor="middle">'
            f"{batch:,}</text>"
        )
    parts.append(
        f'<text x="{(_WIDE + _LEFT) / 2:.0f}" y="{_HIGH - 10}" text-anchor="middle">images in one '
        f"step</text>"
    )
    parts.append(across_all("level", down(100 - 100 * mean(study.baseline.top1s).value)))
    for at, arm in enumerate(arms):
        kind, some = _COLOURS[at % len(_COLOURS)], [cell for cell in cells if cell.arm == arm]
        means = [mean([100 - 100 * top1 for top1 in cell.top1s]) for cell in some]
        path = "L".join(
            f"{across(cell.batch):.1f} {down(found.value):.1f}"
            for cell, found in zip(some, means, strict=True)
        )
        drawn = f'<path class="s" d="M{path}"/>'
        for cell, found in zip(some, means, strict=True):
            place = across(cell.batch)
            if math.isfinite(found.half):
                low, high = (down(found.value + sign * found.half) for sign in (-1, 1))
                drawn += (
                    f'<path class="bar" d="M{place:.1f} {low:.1f}V{high:.1f}M{place - 5:.1f} '
                    f'{low:.1f}h10M{place - 5:.1f} {high:.1f}h10"/>'
                )
            if len(cell.top1s) > 1:
                drawn += "".join(
                    f'<circle class="one" cx="{place + 9:.1f}" cy="{down(100 - 100 * top1):.1f}" '
                    f'r="2.5"/>'
                    for top1 in cell.top1s
                )
            drawn += f'<circle class="dot" cx="{place:.1f}" cy="{down(found.value):.1f}" r="4.5"/>'
        name = f'<text class="name" x="{_LEFT + 130 * at}" y="46">{text(arm)}</text>'
        parts.append(f'<g class="{kind}">{drawn}{name if len(arms) > 1 else ""}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" '
        f'height="{_HIGH}" role="img"><title>{text(title)}</title><style>{_STYLE}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def _is_line(cells: list[Cell], cell: Cell) -> bool:
    """The recipe, and arms that ran at several batches."""
    return cell.arm == RECIPE or sum(other.arm == cell.arm for other in cells) > 1


def _reach(cell: Cell) -> list[float]:
    errors = [100 - 100 * top1 for top1 in cell.top1s]
    found = mean(errors)
    half = found.half if math.isfinite(found.half) else 0.0
    return [*errors, found.value - half, found.value + half]
