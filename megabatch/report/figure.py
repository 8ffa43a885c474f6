"""The study's figures as pictures of their own: error against batch, and what an arm
learns epoch by epoch beside the recipe."""

from __future__ import annotations

import math

from megabatch.report.against import batch_axis
from megabatch.report.axes import ChartAxis, axis_of
from megabatch.report.numbers import short
from megabatch.report.picture import DottedLine, picture
from megabatch.study.results import Cell, Study
from megabatch.study.spread import mean
from megabatch.study.trials import RECIPE


def error_figure(study: Study, title: str) -> str:
    """Top-1 error against batch, with 95 % intervals over seeds; empty where no run has
    finished."""
    cells = [cell for cell in study.cells if cell.finished]
    arms = study.lines
    lines = [_errors(arm, [cell for cell in cells if cell.arm == arm]) for arm in arms]
    batches = sorted({cell.batch for cell in cells if cell.arm in arms})
    x = batch_axis(batches)
    y = axis_of([value for line in lines for value in line.reach], keep_all=True)
    if x is None or y is None or study.baseline is None:
        return ""
    return picture(
        title,
        lines,
        x,
        y,
        ticks=[(math.log2(batch), f"{batch:,}") for batch in batches],
        across="images in one step",
        say=_percent,
        level=100 - 100 * mean(study.baseline.top1s).value,
    )


def arm_figure(study: Study, arm: str, batch: int, title: str) -> str:
    """Top-1 of an arm and of the recipe at one batch against epochs, means over seeds; empty where
    one of them has no curve."""
    lines = [
        DottedLine(cell.title, [(epoch, 100 * top1) for epoch, top1 in cell.curve])
        for cell in study.to_compare(batch)
        if cell.arm in (RECIPE, arm)
    ]
    y = axis_of([value for line in lines for value in line.reach], keep_all=True)
    if len(lines) < 2 or y is None:
        return ""
    x = ChartAxis(0.0, 1.01 * max(epoch for line in lines for epoch, _ in line.points))
    ticks = [(tick, short(tick)) for tick in x.ticks(6)]
    return picture(title, lines, x, y, ticks=ticks, across="epochs", say=_percent)


def _errors(arm: str, cells: list[Cell]) -> DottedLine:
    found = [mean([100 - 100 * top1 for top1 in cell.top1s]) for cell in cells]
    places = [math.log2(cell.batch) for cell in cells]
    singles = [
        (math.log2(cell.batch), 100 - 100 * top1)
        for cell in cells
        for top1 in cell.top1s
        if len(cell.top1s) > 1
    ]
    points = [(place, one.value) for place, one in zip(places, found, strict=True)]
    return DottedLine(arm, points, [one.half for one in found], singles)


def _percent(value: float) -> str:
    return f"{value:g} %"
