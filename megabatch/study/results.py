"""What a study found: its runs by arm and batch, held against the baseline.

The baseline is the recipe itself at the smallest batch there is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.config.sections import IMAGES
from megabatch.errors import UserError
from megabatch.runs import record
from megabatch.runs.record import Record, number
from megabatch.study.spread import Mean, difference, mean
from megabatch.study.trials import RECIPE, folders, is_finished, read_object


@dataclass(frozen=True)
class Result:
    """One run of a study, finished, failed or under way."""

    kind: str
    arm: str
    batch: int
    seed: int
    factor: float
    run: Record
    failure: str | None
    flags: str
    """of an arm of the caller's own; empty where its label does not have them"""

    @property
    def config(self) -> Config | None:
        """As its folder has it; None where that is no config of this version."""
        try:
            return (
                Config.from_json(json.dumps(self.run.config)).check() if self.run.config else None
            )
        except UserError:
            return None

    @property
    def rate(self) -> float:
        """The learning rate that it warms up to."""
        return math.nan if self.config is None else self.config.lr.peak(self.config.batch)

    def tried_in_words(self) -> str:
        """Of one in a search: its rate, and how it did."""
        rate = f"{self.rate:.4g}" if math.isfinite(self.rate) else f"{self.factor:g} times its own"
        did = "failed" if self.failure is not None else "not finished"
        return f"{rate}: {f'{self.top1:.2%}' if self.finished else did}"

    @property
    def noise_scale(self) -> float:
        """The gradient's at its end, in images (nan: not known)."""
        return self.noise_scale_at(1.0)

    def noise_scale_at(self, fraction: float) -> float:
        """The gradient's when so much of what the run has come to was behind it, in images (nan:
        not known)."""
        epochs, scales = self.run.steps["epoch"], self.run.steps["noise_scale"]
        until = fraction * max(filter(math.isfinite, epochs), default=math.nan)
        known = [
            scale
            for epoch, scale in zip(epochs, scales, strict=False)
            if epoch <= until and math.isfinite(scale)
        ]
        return known[-1] if known else math.nan

    @property
    def finished(self) -> bool:
        """It ended by itself, with an accuracy: no study begins such a run again, whatever the ages
        of its files."""
        return is_finished(self.run.summary)

    @property
    def top1(self) -> float:
        return number(self.run.summary.get("top1"))

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Epochs and top-1 of its evaluations."""
        pairs = [(number(e.get("epoch")), number(e.get("top1"))) for e in self.run.evaluations]
        return [pair for pair in pairs if math.isfinite(sum(pair))]

    @property
    def curve_is_whole(self) -> bool:
        """It reaches the end of the run, where that is known."""
        curve, end = self.curve, number(self.run.summary.get("epochs"))
        return bool(curve) and not (self.finished and curve[-1][0] < end - 1e-6)


@dataclass(frozen=True)
class Cell:
    """The runs of one arm at one batch, which differ in their seeds alone."""

    arm: str
    batch: int
    runs: list[Result] = field(default_factory=list)

    @property
    def finished(self) -> list[Result]:
        return [run for run in self.runs if run.finished]

    @property
    def top1s(self) -> list[float]:
        return [run.top1 for run in self.finished]

    @property
    def drawn(self) -> list[Result]:
        """The runs that its curves are means of: the finished ones, or where none is, those that
        failed, as far as they came."""
        return self.finished or [run for run in self.runs if run.failure is not None]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Epochs and top-1 of its evaluations, the mean over seeds; of finished runs those whose
        metrics are whole, or a mean would be of different epochs."""
        complete = [run.curve for run in self.drawn if run.curve_is_whole]
        most: dict[float, int] = {}
        for curve in complete:
            end, _ = curve[-1]
            most[end] = max(most.get(end, 0), len(curve))
        curves = [curve for curve in complete if len(curve) == most[curve[-1][0]]]
        return [
            (points[0][0], statistics.fmean(top1 for _, top1 in points))
            for points in zip(*curves, strict=False)
        ]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Epochs and training loss of its steps, the mean over seeds."""
        steps = [run.run.steps for run in self.drawn]
        epochs = steps[0]["epoch"] if steps else ()
        losses = zip(*(one["loss"] for one in steps), strict=False)
        return [(epoch, statistics.fmean(of)) for epoch, of in zip(epochs, losses, strict=False)]

    @property
    def optimizer(self) -> str | None:
        """What its runs are trained by: SGD, LARS, LARC, LAMB or Muon (None: not known)."""
        known = (run.config for run in self.runs)
        return next((config.optimizer.title for config in known if config is not None), None)

    @property
    def flags(self) -> str:
        """What an arm of the caller's own changes, where that is known."""
        return next((run.flags for run in self.runs if run.flags), "")

    @property
    def title(self) -> str:
        return self.arm if self.finished else f"{self.arm} (failed)"

    def epochs_to(self, accuracy: float) -> float:
        """Epochs until the mean curve reached a top-1 (nan: it did not)."""
        return next((epoch for epoch, top1 in self.curve if top1 >= accuracy), math.nan)

    def summaries(self, name: str) -> list[float]:
        """A number of its runs' summaries, one a seed."""
        return [number(run.run.summary.get(name)) for run in self.finished]

    @property
    def images_per_second(self) -> float:
        """Of all its runs together (nan: not known): they have as many images each."""
        known = [rate for rate in self.summaries("images_per_second") if rate > 0]
        return statistics.harmonic_mean(known) if known else math.nan

    def summary(self, name: str) -> Mean:
        return mean(self.summaries(name))

    def errors(self, name: str) -> tuple[float, float]:
        """The mean top-1 error in per cent and its standard deviation over seeds, by a top-1 of the
        summaries: Goyal's numbers where that is median_top1 (nan: unknown, or of one seed)."""
        known = [100 - 100 * top1 for top1 in self.summaries(name) if math.isfinite(top1)]
        spread = statistics.stdev(known) if len(known) > 1 else math.nan
        return mean(known).value, spread


@dataclass(frozen=True)
class Study:
    path: Path
    cells: list[Cell]
    """by arm, the recipe first, and by batch"""
    tried: list[Result]
    """runs that rates were chosen by, by batch and rate"""
    probes: list[Result]

    @property
    def baseline(self) -> Cell | None:
        """The smallest batch of the recipe that has a finished run."""
        return next((c for c in self.cells if c.arm == RECIPE and c.finished), None)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(cell.arm for cell in self.cells))

    @property
    def lines(self) -> list[str]:
        """The arms that are lines over batches: the recipe, and those that ran at several."""
        finished = [cell.arm for cell in self.cells if cell.finished]
        return [arm for arm in dict.fromkeys(finished) if arm == RECIPE or finished.count(arm) > 1]

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.cells})

    def cell(self, arm: str, batch: int) -> Cell | None:
        return next((c for c in self.cells if (c.arm, c.batch) == (arm, batch)), None)

    def to_compare(self, batch: int) -> list[Cell]:
        """The recipe and its arms at one batch, as far as they have curves; empty where fewer than
        two have."""
        found = [cell for cell in self.cells if cell.batch == batch and cell.curve]
        return found if len(found) > 1 else []

    def against_baseline(self, cell: Cell) -> Mean:
        """Top-1 less the baseline's, in points."""
        base = self.baseline
        if base is None or not cell.finished or cell is base:
            return mean([])
        return difference([100 * t for t in cell.top1s], [100 * t for t in base.top1s])

    def against_recipe(self, cell: Cell) -> Mean:
        """Top-1 less that of the recipe itself at the same batch, in points."""
        recipe = self.cell(RECIPE, cell.batch)
        if recipe is None or recipe is cell or not cell.finished or not recipe.finished:
            return mean([])
        return difference([100 * t for t in cell.top1s], [100 * t for t in recipe.top1s])

    def epochs_to_baseline(self, cell: Cell, fraction: float = 1.0) -> float:
        """Epochs until a cell's mean curve reached what the baseline ended with, or a share of it
        (nan: it did not)."""
        if self.baseline is None or not cell.finished:
            return math.nan
        # The baseline reaches its own end, whatever the rounding of a mean.
        curve = self.baseline.curve
        return cell.epochs_to(fraction * curve[-1][1]) if curve else math.nan

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line for each cell, for tables and JSON; None where a number is not known."""
        for cell in self.cells:
            top1 = mean([100 * t for t in cell.top1s])
            less, arm = self.against_baseline(cell), self.against_recipe(cell)
            yield {
                "arm": cell.arm,
                "batch": cell.batch,
                "seeds": [run.seed for run in cell.finished],
                "failed": {run.seed: run.failure for run in cell.runs if run.failure},
                "top1": known(top1.value),
                "top1_half": known(top1.half),
                "median_error": known(cell.errors("median_top1")[0]),
                "median_error_deviation": known(cell.errors("median_top1")[1]),
                "least_error": known(cell.errors("best_top1")[0]),
                "to_baseline": known(less.value),
                "to_baseline_half": known(less.half),
                "to_recipe": known(arm.value),
                "to_recipe_half": known(arm.half),
                "epochs_to_baseline": known(self.epochs_to_baseline(cell)),
                "steps": known(cell.summary("steps").value),
                "images_per_second": known(cell.images_per_second),
                "seconds": known(cell.summary("seconds").value),
            }

    # --- rates and noise

    def searches(self) -> list[list[Result]]:
        """The runs that rates were chosen by, those of one arm and batch together, by rate."""
        found: dict[tuple[str, int], list[Result]] = {}
        for run in self.tried:
            found.setdefault((run.arm, run.batch), []).append(run)
        return list(found.values())

    def check_searched(
        self, wanted: Collection[tuple[str, int]], to_come: Collection[str] = ()
    ) -> None:
        """Refuse to choose a rate, for any of these arms and batches, by a search that was stopped
        before its end, unless what it lacks is to come."""
        for run in self.tried:
            ended = run.finished or run.failure is not None
            if (run.arm, run.batch) in wanted and not ended and run.run.name not in to_come:
                raise UserError(
                    f"the search for rates at {run.batch:,} was stopped before its end: give the "
                    f"same --rates to go on with it, or remove {self.path / run.run.name}"
                )

    def chosen(self) -> list[Result]:
        """Of each search the run that did best on held-out training images."""
        finished = [[run for run in search if run.finished] for search in self.searches()]
        return [max(search, key=lambda run: run.top1) for search in finished if search]

    def chosen_factors(self) -> dict[tuple[str, int], float]:
        return {(run.arm, run.batch): run.factor for run in self.chosen()}

    def search_in_words(self) -> Iterator[str]:
        """What was tried at each batch, and what was chosen."""
        chosen = self.chosen()
        for search in self.searches():
            tried = ", ".join(run.tried_in_words() for run in search)
            end = "none can be chosen, and the rate stays as it is"
            for run in search:
                if run in chosen:
                    end = f"{run.rate:.4g} is chosen"
                    if len(search) > 1 and run in (search[0], search[-1]):
                        end += ", at the edge of what was tried: widen --rates"
            arm, batch = search[0].arm, search[0].batch
            whose = "" if arm == RECIPE else f" for {arm}"
            yield f"rates at {batch:,}{whose}, by held-out training images: {tried}; {end}"

    @property
    def probe(self) -> Result | None:
        """The one that forecasts: of those that finished and tell a noise scale, the largest
        batch's."""
        telling = [p for p in self.probes if p.finished and math.isfinite(p.noise_scale)]
        return max(telling, key=lambda probe: probe.batch, default=None)

    @property
    def noise_scale(self) -> float:
        """The batch at which noise and signal of the gradient are even, by the probe (nan: none
        was run)."""
        return math.nan if self.probe is None else self.probe.noise_scale

    def forecast_in_words(self) -> str:
        if self.probes and not any(probe.finished for probe in self.probes):
            return "the probe failed, and forecasts nothing"
        if self.probe is None:
            return "the probe does not tell where scaling ends: its noise scale is undefined"
        return (
            f"forecast: after {self.probe.run.epoch:.3g} epochs the gradient's noise scale is "
            f"{self.noise_scale:,.0f} images; a batch that large needs about twice the epochs of a "
            f"small one to the same loss, and larger ones in proportion"
        )


def known(value: float) -> float | None:
    """A number for JSON, which has no nan."""
    return value if math.isfinite(value) else None


def read(path: Path) -> Study:
    """What the folders of a study's runs hold."""
    cells: dict[tuple[str, int], Cell] = {}
    others: dict[str, list[Result]] = {"rate": [], "probe": []}
    for folder in folders(path):
        label = read_object(folder / "trial.json")
        batch, seed, factor = (label.get(name) for name in ("batch", "seed", "factor"))
        if type(batch) is not int or type(seed) is not int or not 0 < batch <= IMAGES:
            continue
        result = Result(
            kind=str(label.get("kind")),
            arm=str(label.get("arm")),
            batch=batch,
            seed=seed,
            factor=number(factor),
            run=record.read(folder) if record.is_run(folder) else Record(folder),
            failure=str(label["failure"]) if "failure" in label else None,
            flags=str(label.get("flags", "")),
        )
        if result.kind in others:
            if math.isfinite(result.factor):
                others[result.kind].append(result)
        else:
            key = result.arm, batch
            cells.setdefault(key, Cell(*key)).runs.append(result)
    for cell in cells.values():
        cell.runs.sort(key=lambda run: run.seed)
    tried = sorted(
        others["rate"], key=lambda run: (run.arm != RECIPE, run.arm, run.batch, run.factor)
    )
    ordered = sorted(cells.values(), key=lambda cell: (cell.arm != RECIPE, cell.arm, cell.batch))
    return Study(path, ordered, tried, others["probe"])
