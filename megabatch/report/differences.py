"""Differences by name: a row each, a dot where the difference lies, its interval through it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megabatch.report.axes import axis_of
from megabatch.report.look import text
from megabatch.study.spread import Mean


def differences(title: str, found: Mapping[str, Mean], unit: str) -> str:
    """Rows from the largest difference down, a line through all of them at 0; nothing where no
    difference is known."""
    known = {name: diff for name, diff in found.items() if math.isfinite(diff.value)}
    ends = [d.value + sign * _half(d) for d in known.values() for sign in (-1, 1)]
    axis = axis_of([*ends, 0.0], keep_all=True)
    if not known or axis is None:
        return ""

    def across(value: float) -> float:
        return 100 * axis.place(value)

    rows = []
    for name, diff in sorted(known.items(), key=lambda item: -item[1].value):
        low, high = (across(diff.value + sign * _half(diff)) for sign in (-1, 1))
        spread = f" ± {diff.half:.2f}" if math.isfinite(diff.half) else ""
        rows.append(
            f"<span>{text(name)}</span>"
            f'<span class="track"><i class="zero" style="left:{across(0.0):.2f}%"></i>'
            f'<i class="reach" style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
            f'<i class="at" style="left:{across(diff.value):.2f}%"></i></span>'
            f'<span class="n">{diff.value:+.2f}{spread}</span>'
        )
    return (
        f'<figure class="wide"><figcaption>{text(title)}<small>{text(unit)}</small></figcaption>'
        f'<div class="versus">{"".join(rows)}</div></figure>'
    )


def _half(diff: Mean) -> float:
    return diff.half if math.isfinite(diff.half) else 0.0
