"""A study in one paragraph, made from its numbers: what the batches cost, what the arms show, and
what the seeds cannot tell."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megabatch.study.results import Cell, Study
from megabatch.study.spread import Mean, mean
from megabatch.study.trials import RECIPE

KEPT_POINTS = 0.3
"""of top-1, within which a batch counts as having kept the baseline's accuracy"""


def reading(study: Study) -> str:
    """The paragraph."""
    return " ".join(_sentences(study))


def _sentences(study: Study) -> Iterator[str]:
    base = study.baseline
    failed = _failed(study)
    if base is None:
        yield "No run of the recipe has finished yet."
        if failed:
            yield f"{failed}."
        return
    found = mean([100 * top1 for top1 in base.top1s])
    smaller = [f"{c.batch:,}" for c in study.cells if c.arm == RECIPE and c.batch < base.batch]
    instead = f" (of {', '.join(smaller)} no run has finished)" if smaller else ""
    yield (
        f"The baseline, a batch of {base.batch:,}{instead}, ends with {found.value:.2f} % top-1"
        f"{_interval(found, ' ± ')} over {_seeds(found.seeds)}."
    )
    larger = [c for c in study.cells if c.arm == RECIPE and c.finished and c is not base]
    for cell in larger:
        yield f"A batch of {cell.batch:,} ends {difference_in_words(study.against_baseline(cell))}."
    if failed:
        yield f"{failed}; what is said of a batch is of the runs that finished."
    yield from _kept(study, base, larger)
    yield from _noise(study, base, larger)
    yield from _arms(study)


def _failed(study: Study) -> str:
    """Which runs failed, of how many; a mean does not show them."""
    counts = [
        f"{failed} of {len(cell.runs)}{_whose(cell)} at {cell.batch:,}"
        for cell in study.cells
        if (failed := sum(run.failure is not None and not run.finished for run in cell.runs))
    ]
    return f"Runs failed: {', '.join(counts)}" if counts else ""


def _whose(cell: Cell) -> str:
    return "" if cell.arm == RECIPE else f" of {cell.arm}"


def _kept(study: Study, base: Cell, larger: list[Cell]) -> Iterator[str]:
    several = _of_several_seeds(base, larger)
    some = len(several) < len(larger)
    most = max((c for c in several if _keeps(study, c)), key=lambda cell: cell.batch, default=None)
    if most is not None:
        yield (
            f"By its mean, {most.batch:,} is the largest batch{' of several seeds' * some} that "
            f"stays within {KEPT_POINTS:g} points of the baseline: "
            f"{most.batch / base.batch:.3g} times the batch, "
            f"{_ratio(most, base, 'steps')} of the steps."
        )
    elif several:
        whose = "those with several seeds" if some else "them"
        yield f"None of {whose} stays within {KEPT_POINTS:g} points of the baseline."


def _noise(study: Study, base: Cell, larger: list[Cell]) -> Iterator[str]:
    """The probe's forecast, held against where the runs lose accuracy."""
    forecast = study.noise_scale
    if not math.isfinite(forecast):
        return
    words = f"The probe's noise scale, {forecast:,.0f} images, roughly forecasts where scaling ends"
    several = _of_several_seeds(base, larger)
    lost = [cell.batch for cell in several if not _keeps(study, cell)]
    if lost:
        yield f"{words}; {min(lost):,} is the first batch to lose more than {KEPT_POINTS:g}."
    elif several:
        most = max(cell.batch for cell in several)
        some = " of several seeds" * (len(several) < len(larger))
        yield f"{words}; up to {most:,} no batch{some} loses more than {KEPT_POINTS:g}."
    else:
        yield f"{words}."


def _of_several_seeds(base: Cell, larger: list[Cell]) -> list[Cell]:
    """The batches that something is concluded from: one seed shows nothing."""
    several = [cell for cell in larger if mean(cell.top1s).seeds > 1]
    return several if mean(base.top1s).seeds > 1 else []


def _keeps(study: Study, cell: Cell) -> bool:
    """Whether a batch ends, by its mean, where the baseline does."""
    return study.against_baseline(cell).value >= -KEPT_POINTS


def _arms(study: Study) -> Iterator[str]:
    arms = [
        (cell, study.against_recipe(cell))
        for cell in study.cells
        if cell.arm != RECIPE and cell.finished and study.against_recipe(cell).seeds
    ]
    if not arms:
        return
    seen = [(cell, diff) for cell, diff in arms if _is_seen(diff)]
    seen.sort(key=lambda pair: pair[1].value)
    if seen:
        listed = "; ".join(
            f"{cell.arm} at {cell.batch:,} {diff.value:+.2f}{_interval(diff, ' ± ')}"
            for cell, diff in seen
        )
        yield f"Of the arms, these differ from the recipe by more than their interval: {listed}."
    unseen = [cell for cell, diff in arms if math.isfinite(diff.half) and not _is_seen(diff)]
    if unseen:
        yield f"No difference can be seen for {_listed(unseen)}."
    alone = [cell for cell, diff in arms if not math.isfinite(diff.half)]
    if alone:
        yield f"One seed tells nothing of {_listed(alone)}."


def _listed(cells: list[Cell]) -> str:
    """Arms by batch."""
    by_batch: dict[int, list[str]] = {}
    for cell in cells:
        by_batch.setdefault(cell.batch, []).append(cell.arm)
    return "; ".join(f"{', '.join(arms)} at {batch:,}" for batch, arms in by_batch.items())


def difference_in_words(diff: Mean) -> str:
    """A difference to the baseline in words, with its interval."""
    if not math.isfinite(diff.value):
        return "with nothing to hold it against"
    size, side = f"{abs(diff.value):.2f} points", "below" if diff.value < 0 else "above"
    if not math.isfinite(diff.half):
        return f"{size} {side} it (one seed: no interval)"
    interval = f"95 % interval {diff.value - diff.half:+.2f} to {diff.value + diff.half:+.2f}"
    seen = "" if _is_seen(diff) else ", which holds 0"
    return f"{size} {side} it ({interval}{seen})"


def _is_seen(diff: Mean) -> bool:
    """Whether an interval leaves 0 out; one seed shows nothing."""
    return math.isfinite(diff.half) and abs(diff.value) > diff.half


def _interval(found: Mean, before: str) -> str:
    return f"{before}{found.half:.2f}" if math.isfinite(found.half) else ""


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def _ratio(one: Cell, other: Cell, name: str) -> str:
    ratio = one.summary(name).value / other.summary(name).value
    return f"1/{1 / ratio:.3g}" if 0 < ratio < 1 else f"{ratio:.3g} times"
