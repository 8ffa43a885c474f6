"""A study in one paragraph, made from its numbers: what the batches cost, what the arms show, and
what the seeds cannot tell."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megabatch.study.results import Cell, Study
from megabatch.study.spread import Mean, difference, mean
from megabatch.study.trials import RECIPE

KEPT_POINTS = 0.3
"""of top-1, within which a batch counts as having kept the baseline's accuracy"""
_AS_MANY = 0.1
"""of the steps, by which two runs may differ and have as many"""
_MANY = 10
"""intervals, from which on chance is named"""


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
        diff = study.against_baseline(cell)
        whose = "the baseline has " * (found.seeds == 1 and len(cell.finished) > 1)
        yield f"A batch of {cell.batch:,} ends {difference_in_words(diff, whose)}."
    yield from _optimizers([base, *larger])
    yield from _beside_baseline(study, base, larger)
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


def _optimizers(cells: list[Cell]) -> Iterator[str]:
    """That batches were trained by different optimizers, which no difference tells apart."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.optimizer is not None:
            found.setdefault(cell.optimizer, []).append(f"{cell.batch:,}")
    if len(found) > 1:
        listed = "; ".join(f"{name} at {', '.join(batches)}" for name, batches in found.items())
        yield f"The optimizer goes with the batch ({listed}): these differences are of both."


def _beside_baseline(study: Study, base: Cell, larger: list[Cell]) -> Iterator[str]:
    """The arm that does best at the baseline's own batch, where that is above the baseline: larger
    batches that keep up with the baseline need not keep up with it."""
    arms = [
        (cell, diff)
        for cell in study.cells
        if cell.arm != RECIPE and cell.batch == base.batch
        if (diff := study.against_recipe(cell)).value > KEPT_POINTS
        and (_is_seen(diff) or not _has_spread(diff))
    ]
    if not arms or not larger:
        return
    best, above = max(arms, key=lambda pair: pair[1].value)
    held = [(cell, difference(_per_cent(cell), _per_cent(best))) for cell in larger]
    listed = ", ".join(
        f"{cell.batch:,} {diff.value:+.2f}{_interval(diff, ' ± ')}" for cell, diff in held
    )
    sure = "is" if _is_seen(above) else "may be"
    yield (
        f"At {base.batch:,} itself {best.arm} {sure} the better baseline: it ends "
        f"{difference_in_words(above, to='the recipe')}{_other_steps(study, best)}; held against "
        f"that: {listed}."
    )


def _per_cent(cell: Cell) -> list[float]:
    return [100 * top1 for top1 in cell.top1s]


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
        yield f"None of {whose} stays within {KEPT_POINTS:g} points of the baseline by its mean."


def _noise(study: Study, base: Cell, larger: list[Cell]) -> Iterator[str]:
    """The probe's forecast, held against where the runs lose accuracy."""
    forecast = study.noise_scale
    if not math.isfinite(forecast):
        return
    words = f"The probe's noise scale, {forecast:,.0f} images, roughly forecasts where scaling ends"
    several = _of_several_seeds(base, larger)
    lost = [cell.batch for cell in several if not _keeps(study, cell)]
    if lost:
        first = f"{min(lost):,} is the first batch to lose more than {KEPT_POINTS:g}"
        yield f"{words}; by its mean {first}."
    elif several:
        most = max(cell.batch for cell in several)
        some = " of several seeds" * (len(several) < len(larger))
        none = f"up to {most:,} no batch{some} loses more than {KEPT_POINTS:g}"
        yield f"{words}; by their means {none}."
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
    finished = [cell for cell in study.cells if cell.arm != RECIPE and cell.finished]
    arms = [(cell, diff) for cell in finished if (diff := study.against_recipe(cell)).seeds]
    seen = [(cell, diff) for cell, diff in arms if _is_seen(diff)]
    seen.sort(key=lambda pair: pair[1].value)
    if seen:
        listed = "; ".join(
            _with_difference(cell, diff) + _other_steps(study, cell) for cell, diff in seen
        )
        yield f"Of the arms, these differ from the recipe by more than their interval: {listed}."
    unseen = [cell for cell, diff in arms if _has_spread(diff) and not _is_seen(diff)]
    if unseen:
        yield f"No difference can be seen for {_listed(unseen)}."
    if seen and len(seen) + len(unseen) >= _MANY:
        yield "One interval in twenty leaves 0 out by chance."
    alike = [cell for cell, diff in arms if diff.half == 0]
    if alike:
        yield f"Seeds that end alike tell no spread: nothing can be said of {_listed(alike)}."
    alone = [cell for cell, diff in arms if not math.isfinite(diff.half)]
    if alone:
        yield f"One seed tells nothing of {_listed(alone)}."
    without = [
        (cell, study.against_baseline(cell))
        for cell in finished
        if not study.against_recipe(cell).seeds
    ]
    if without and study.baseline is not None:
        yield (
            f"Where the recipe itself has no finished run, the arms to the baseline: "
            f"{'; '.join(_with_difference(cell, diff) for cell, diff in without)}."
        )


def _with_difference(cell: Cell, diff: Mean) -> str:
    return f"{cell.arm} at {cell.batch:,} {diff.value:+.2f}{_interval(diff, ' ± ')}"


def _other_steps(study: Study, cell: Cell) -> str:
    """That an arm took more steps than the recipe at its batch, or fewer: a batch that follows the
    noise is mostly another than it is called by."""
    recipe = study.cell(RECIPE, cell.batch)
    steps, usual = (of.summary("steps").value if of else math.nan for of in (cell, recipe))
    if not usual > 0 or not abs(steps / usual - 1) > _AS_MANY:
        return ""
    return f" in {steps / usual:.2g} times the steps"


def _listed(cells: list[Cell]) -> str:
    """Arms by batch."""
    by_batch: dict[int, list[str]] = {}
    for cell in cells:
        by_batch.setdefault(cell.batch, []).append(cell.arm)
    return "; ".join(f"{', '.join(arms)} at {batch:,}" for batch, arms in by_batch.items())


def difference_in_words(diff: Mean, whose: str = "", to: str = "it") -> str:
    """A difference to the baseline in words, with its interval; `whose` says who has one seed."""
    if not math.isfinite(diff.value):
        return "with nothing to hold it against"
    size, side = f"{abs(diff.value):.2f} points", "below" if diff.value < 0 else "above"
    if not math.isfinite(diff.half):
        return f"{size} {side} {to} ({whose}one seed: no interval)"
    if not _has_spread(diff):
        return f"{size} {side} {to} (its seeds end alike: no interval)"
    interval = f"95 % interval {diff.value - diff.half:+.2f} to {diff.value + diff.half:+.2f}"
    seen = "" if _is_seen(diff) else ", which holds 0"
    return f"{size} {side} {to} ({interval}{seen})"


def _is_seen(diff: Mean) -> bool:
    """Whether an interval leaves 0 out; one seed shows nothing."""
    return _has_spread(diff) and abs(diff.value) > diff.half


def _has_spread(diff: Mean) -> bool:
    """One seed has none; and a few that happen to get as many images right, both here and there,
    do not show that all would."""
    return math.isfinite(diff.half) and diff.half > 0


def _interval(found: Mean, before: str) -> str:
    return f"{before}{found.half:.2f}" if _has_spread(found) else ""


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def _ratio(one: Cell, other: Cell, name: str) -> str:
    ratio = one.summary(name).value / other.summary(name).value
    return f"1/{1 / ratio:.3g}" if 0 < ratio < 1 else f"{ratio:.3g} times"
