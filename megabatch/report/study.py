"""The page of a study: error against batch, epochs to the baseline's accuracy, arms, curves, time,
the search for rates, settings, and a reading of it all."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from megabatch.report.against import Points, against_batch
from megabatch.report.charts import Curve, chart
from megabatch.report.differences import differences
from megabatch.report.look import RUN_COLOURS, Section, dot, page, table, text
from megabatch.report.numbers import UNKNOWN, count, duration, percent
from megabatch.report.pointing import SCRIPT
from megabatch.report.settings import environment_table, settings
from megabatch.report.study_settings import (
    NOISE_NOTE,
    RATES_NOTE,
    as_reported,
    first_runs,
    noise,
    ran_with,
    rates,
    unfinished,
)
from megabatch.study.arms import ARMS
from megabatch.study.reading import reading
from megabatch.study.results import Cell, Study
from megabatch.study.spread import Mean, mean
from megabatch.study.trials import RECIPE

_FRACTIONS = (1.0, 0.98, 0.95, 0.9)
"""of the baseline's accuracy, that epochs are counted to"""


def study_page(study: Study, now: float | None = None) -> str:
    """HTML of a study; one file that needs nothing else."""
    colours = {arm: at for at, arm in enumerate(study.arms)}
    sections = [
        Section("Reading", f"<p>{text(reading(study))}</p>", "Made from the numbers below."),
        Section("Error against batch", _errors(study, colours), _errors_note(study)),
        Section("Epochs to the baseline's accuracy", _epochs(study), _EPOCHS_NOTE),
        Section("Arms", _arms(study), _ARMS_NOTE),
        Section("Curves", _curves(study), "Against epochs: means over seeds."),
        Section("Time", _time(study, colours)),
        Section("Rates", rates(study), RATES_NOTE),
        Section("Gradient noise", noise(study), NOISE_NOTE),
        Section("What each batch ran with", ran_with(study)),
        Section("Settings", settings(first_runs(study))),
        Section("Environment", environment_table(first_runs(study)[:1])),
        Section("Not finished", unfinished(study)),
    ]
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() if now is None else now))
    recipes = {str(r.run.config.get("name", "")) for c in study.cells for r in c.runs} - {""}
    runs = sum(len(cell.finished) for cell in study.cells)
    lead = f"recipe {', '.join(sorted(recipes)[:5])}; {runs} finished runs; report made {made}"
    name = study.path.resolve().name
    shown = [section for section in sections if section.body]
    return page(f"megabatch study: {name}", shown, f'<p class="soft">{text(lead)}</p>', [SCRIPT])


# --- error against batch -----------------------------------------------------------------------


def _errors_note(study: Study) -> str:
    configs = [run.config for cell in study.cells for run in cell.runs]
    held_out = any(config is not None and config.data.tuning_share > 0 for config in configs)
    return (
        f"Top-1 error on {'held-out training' if held_out else 'the validation'} images after the "
        f"last epoch. Dots are means over seeds, bars their 95 % intervals (Student's t), pale "
        f"dots the single runs; across goes the baseline."
    )


def _errors(study: Study, colours: dict[str, int]) -> str:
    base = study.baseline
    level = 1 - mean(base.top1s).value if base is not None else math.nan
    lines = [_error_line(study, arm, colours[arm]) for arm in study.lines]
    drawn = against_batch("Error", lines, "top-1 error", percent=True, level=level, wide=True)
    if not drawn:
        return ""
    if len(study.batches) == 1:
        drawn = ""  # a dot on its own level
    key = "".join(f"<span>{dot(colours[arm])}{text(arm)}</span>" for arm in study.lines)
    key = f'<div class="key">{key}</div>' if len(lines) > 1 else ""
    heads = ("", "batch", "seeds", "top-1", "95 %", "to the baseline", "95 %", "steps")
    rows = [
        (
            f"{dot(colours[cell.arm])}{text(cell.arm)}",
            f"{cell.batch:,}",
            str(len(cell.finished)),
            percent(mean(cell.top1s).value),
            _half(mean([100 * t for t in cell.top1s])),
            _points(study.against_baseline(cell)),
            _half(study.against_baseline(cell)),
            count(cell.summary("steps").value),
        )
        for cell in study.cells
        if cell.arm == RECIPE
    ]
    return f'{key}<div class="charts">{drawn}</div>{table(heads, rows)}{as_reported(study)}'


def _error_line(study: Study, arm: str, at: int) -> Points:
    cells = [cell for cell in study.cells if cell.arm == arm and cell.finished]
    means = [mean([1 - top1 for top1 in cell.top1s]) for cell in cells]
    return Points(
        arm,
        at,
        [cell.batch for cell in cells],
        [found.value for found in means],
        [found.half for found in means],
        [(c.batch, 1 - top1) for c in cells for top1 in c.top1s if len(c.top1s) > 1],
        dashed=arm != RECIPE,
    )


# --- epochs ------------------------------------------------------------------------------------

_EPOCHS_NOTE = (
    "Epochs until the mean curve of a batch reached what the baseline ended with, and shares of "
    "it. Flat lines scale: the work stays the same and the steps get fewer. Where a line rises the "
    "returns diminish; where it ends, the accuracy was not reached."
)


def _epochs(study: Study) -> str:
    cells = [cell for cell in study.cells if cell.arm == RECIPE and cell.finished]
    if len(cells) < 2:
        return ""
    batches = [cell.batch for cell in cells]
    found = {
        fraction: [study.epochs_to_baseline(cell, fraction) for cell in cells]
        for fraction in _FRACTIONS
    }
    lines = [
        Points(_fraction_name(fraction), at, batches, epochs)
        for at, (fraction, epochs) in enumerate(found.items())
    ]
    heads = ("accuracy", *(f"{batch:,}" for batch in batches))
    rows = [
        (f"{dot(at)}{text(_fraction_name(fraction))}", *(count(value, 1) for value in epochs))
        for at, (fraction, epochs) in enumerate(found.items())
    ]
    drawn = against_batch("Epochs", lines, "epochs", zero=True, wide=True)
    return f'<div class="charts">{drawn}</div>{table(heads, rows)}'


def _fraction_name(fraction: float) -> str:
    return "the baseline's" if fraction == 1 else f"{100 * fraction:g} % of it"


# --- arms --------------------------------------------------------------------------------------

_ARMS_NOTE = (
    "One thing switched at a time, held against the recipe itself at the same batch, in points of "
    "top-1 with a 95 % interval over seeds (Welch)."
)


def _arms(study: Study) -> str:
    cells = [cell for cell in study.cells if cell.arm != RECIPE]
    if not cells:
        return ""
    rows = []
    for cell in cells:
        diff = study.against_recipe(cell)
        says = ARMS[cell.arm].says if cell.arm in ARMS else cell.flags or "of its own flags"
        failed = sum(run.failure is not None for run in cell.runs)
        rows.append(
            (
                f'{text(cell.arm)}<br><span class="note">{text(says)}</span>',
                f"{cell.batch:,}",
                _surely(diff),
                _half(diff),
                percent(mean(cell.top1s).value),
                f"{len(cell.finished)}" + (f", {failed} failed" if failed else ""),
                count(cell.summary("steps").value),
            )
        )
    heads = ("arm", "batch", "to the recipe", "95 %", "top-1", "seeds", "steps")
    drawn = "".join(_versus_recipe(study, batch) for batch in study.batches)
    return f'<div class="charts">{drawn}</div>{table(heads, rows)}'


def _versus_recipe(study: Study, batch: int) -> str:
    found = {
        cell.arm: study.against_recipe(cell)
        for cell in study.cells
        if cell.batch == batch and cell.arm != RECIPE
    }
    return differences(f"Arms at {batch:,}", found, "points of top-1 to the recipe")


# --- curves and time ---------------------------------------------------------------------------


def _curves(study: Study) -> str:
    recipe = [cell for cell in study.cells if cell.arm == RECIPE and cell.curve]
    drawn = chart(
        "The recipe, by batch",
        [_curve(f"{cell.batch:,}", at, cell) for at, cell in enumerate(recipe)],
        "top-1",
        percent=True,
        wide=True,
    )
    key = "".join(f"<span>{dot(at)}{cell.batch:,}</span>" for at, cell in enumerate(recipe))
    out = f'<div class="key">{key}</div><div class="charts">{drawn}</div>' if drawn else ""
    return out + "".join(_compared(study, batch) for batch in study.batches)


def _compared(study: Study, batch: int) -> str:
    """The arms at one batch, epoch by epoch, each few of them beside the recipe: more lines than
    colours would tell nothing."""
    recipe = [cell for cell in study.to_compare(batch) if cell.arm == RECIPE]
    arms = [cell for cell in study.to_compare(batch) if cell.arm != RECIPE]
    few = RUN_COLOURS - len(recipe)
    groups = [[*recipe, *arms[first : first + few]] for first in range(0, len(arms), few)]
    return "".join(_learning(batch, cells) for cells in groups)


def _learning(batch: int, cells: Sequence[Cell]) -> str:
    """What the runs of some cells know, and what they lose."""
    known = [_curve(cell.title, at, cell) for at, cell in enumerate(cells)]
    lost = [
        Curve(cell.title, at, [x for x, _ in cell.losses], [y for _, y in cell.losses], "smooth")
        for at, cell in enumerate(cells)
    ]
    key = "".join(f"<span>{dot(at)}{text(cell.title)}</span>" for at, cell in enumerate(cells))
    drawn = chart(f"Arms at {batch:,}", known, "top-1", percent=True)
    drawn += chart(f"Arms at {batch:,}", lost, "training loss, each by its own labels")
    return f'<div class="key">{key}</div><div class="charts">{drawn}</div>'


def _curve(name: str, at: int, cell: Cell) -> Curve:
    epochs, top1s = zip(*cell.curve, strict=True)
    return Curve(name, at, epochs, top1s, "dots")


def _time(study: Study, colours: dict[str, int]) -> str:
    cells = [cell for cell in study.cells if cell.finished]
    recipe = [cell for cell in cells if cell.arm == RECIPE]
    batches = [cell.batch for cell in recipe]
    drawn = "".join(
        against_batch(title, [Points(RECIPE, 0, batches, values)], unit, zero=True)
        for title, unit, values in (
            (
                "Throughput",
                "images/s while training",
                [c.images_per_second for c in recipe],
            ),
            ("Length of a run", "seconds, evaluations included", _seconds(recipe)),
        )
    )
    heads = ("", "batch", "time", "images/s", "epochs")
    rows = [
        (
            f"{dot(colours[cell.arm])}{text(cell.arm)}",
            f"{cell.batch:,}",
            duration(cell.summary("seconds").value),
            count(cell.images_per_second),
            count(cell.summary("epochs").value, 1),
        )
        for cell in cells
    ]
    return f'<div class="charts">{drawn}</div>{table(heads, rows)}' if rows else ""


def _seconds(cells: Sequence[Cell]) -> list[float]:
    return [cell.summary("seconds").value for cell in cells]


def _points(found: Mean) -> str:
    return f"{found.value:+.2f}" if math.isfinite(found.value) else UNKNOWN


def _surely(found: Mean) -> str:
    """It stands out where its interval tells it from chance."""
    return f"<b>{_points(found)}</b>" if abs(found.value) > found.half else _points(found)


def _half(found: Mean) -> str:
    return f"± {found.half:.2f}" if math.isfinite(found.half) else UNKNOWN
