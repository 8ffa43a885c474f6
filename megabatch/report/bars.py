"""Bars for pages: a name, a number, and pieces along one line, as wide as the screen is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megabatch.report.look import text


class BarPiece(NamedTuple):
    """A part of a bar, from one share of its width to another."""

    start: float
    end: float
    colour: str
    words: str = ""


def bar(left: str, right: str, pieces: Iterable[BarPiece], marks: Iterable[BarPiece] = ()) -> str:
    """A named bar; marks lie over it (an interval)."""
    inside = "".join(_piece(piece, "top:0;bottom:0;min-width:1.5px") for piece in pieces)
    over = "".join(_piece(mark, "top:35%;bottom:35%;opacity:.45") for mark in marks)
    return (
        '<div style="display:flex;justify-content:space-between;gap:1em;font-size:13.5px">'
        f"<span>{text(left)}</span><span>{text(right)}</span></div>"
        '<div style="position:relative;height:20px;overflow:hidden;border-radius:4px;'
        f'margin:2px 0 10px;background:var(--blank)">{inside}{over}</div>'
    )


def key(colours: dict[str, str]) -> str:
    """What each colour stands for."""
    spans = "".join(
        f'<span><i class="dot box" style="--c:var(--{colour})"></i>{text(words)}</span>'
        for words, colour in colours.items()
    )
    return f'<div class="key" style="margin-bottom:12px">{spans}</div>'


def _piece(piece: BarPiece, style: str) -> str:
    width = piece.end - piece.start
    if width <= 0:
        return ""
    return (
        f'<i style="position:absolute;{style};left:{100 * piece.start:.3f}%;'
        f'width:{100 * width:.3f}%;background:var(--{piece.colour})" '
        f'title="{text(piece.words)}"></i>'
    )
