"""Numbers in few letters, for pages and lines alike; what is not known is a dash."""

from __future__ import annotations

import math

UNKNOWN = "\N{EN DASH}"


def short(value: float) -> str:
    """A number in few letters: 12,800, 0.0312, 1.2e-05."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 1e5:
        for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= scale:
                return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %" if math.isfinite(fraction) else UNKNOWN


def count(value: float, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}" if math.isfinite(value) else UNKNOWN


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return UNKNOWN
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
