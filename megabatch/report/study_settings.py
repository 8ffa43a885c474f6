"""What a study's runs were given: the search for rates, the noise that was forecast, settings, and
what did not finish."""

from __future__ import annotations

import math

from megabatch.report.look import table, text
from megabatch.report.named import Named
from megabatch.report.numbers import UNKNOWN, count, percent, short
from megabatch.study.results import Result, Study
from megabatch.study.spread import mean
from megabatch.study.trials import RECIPE, TUNING_SHARE

# --- rates and noise ---------------------------------------------------------------------------

RATES_NOTE = (
    f"Chosen by {100 * TUNING_SHARE:g} % of the training images, held out by hash, while training "
    f"on the rest; the validation images had no part in it. The runs above use the chosen rate and "
    f"train on all training images."
)


def as_reported(study: Study) -> str:
    """Errors as Goyal has them, and the least as You has his peaks."""
    rows = []
    for cell in study.cells:
        errors = [cell.errors(name) for name in ("top1", "median_top1", "best_top1")]
        if cell.finished:
            spreads = [f"{count(value, 2)} ± {count(spread, 2)}" for value, spread in errors]
            rows.append((text(cell.arm), f"{cell.batch:,}", str(len(cell.finished)), *spreads))
    heads = ("", "batch", "seeds", "last", "median of the last five", "least")
    summary = (
        "Top-1 error in per cent as the papers report it: mean ± standard deviation over seeds."
    )
    return f"<details><summary>{summary}</summary>{table(heads, rows)}</details>" if rows else ""


def rates(study: Study) -> str:
    if not study.tried:
        return ""
    rows = []
    chosen = study.chosen()
    for run in study.tried:
        best = run in chosen
        top1 = percent(run.top1) if run.finished else ("failed" if run.failure else UNKNOWN)
        rows.append(
            (
                text(run.arm),
                f"{run.batch:,}",
                f"{run.factor:g}",
                short(run.rate),
                f"<b>{top1}</b>" if best else top1,
                "chosen" if best else "",
            )
        )
    heads = ("", "batch", "times its own", "rate", "held-out top-1", "")
    return table(heads, rows, words=1)


NOISE_NOTE = (
    "The batch at which the gradient's noise and signal are even (McCandlish 2018): well below it "
    "larger batches save steps in proportion, well above it hardly any."
)


def noise(study: Study) -> str:
    rows = []
    probe = study.probe
    if probe is not None:
        rows.append(
            (f"forecast, after {probe.run.epoch:.3g} epochs", f"{probe.batch:,}",
             count(study.noise_scale))
        )  # fmt: skip
    for cell in study.cells:
        known = [r.noise_scale for r in cell.finished if math.isfinite(r.noise_scale)]
        if cell.arm == RECIPE and known:
            rows.append(("at the end of the run", f"{cell.batch:,}", count(mean(known).value)))
    return table(("", "batch", "noise scale, images"), rows) if rows else ""


# --- settings ----------------------------------------------------------------------------------


def ran_with(study: Study) -> str:
    heads = ("", "batch", "optimizer", "peak rate", "warm-up", "decay", "momentum", "weight decay",
             "epochs", "span", "micro")  # fmt: skip
    rows = []
    for cell in study.cells:
        config = next((run.config for run in cell.runs if run.config is not None), None)
        if config is None:
            continue
        chosen = config.optimizer
        rows.append(
            (
                text(cell.arm),
                f"{cell.batch:,}",
                text(chosen.title),
                short(config.lr.peak(config.batch)),
                f"{config.lr.warmup:.3g} epochs",
                text(config.lr.decay),
                f"{chosen.momentum:.4g}",
                short(chosen.weight_decay),
                f"{config.epochs:.4g}",
                f"{config.span:,}",
                f"{config.micro:,}",
            )
        )
    return table(heads, rows) if rows else ""


def first_runs(study: Study) -> list[Named]:
    """One run of each cell: their seeds are all that differs otherwise."""
    runs = [next(iter(cell.finished or cell.runs)) for cell in study.cells]
    return [Named(run.run.name, at, run.run) for at, run in enumerate(runs)]


def unfinished(study: Study) -> str:
    runs: list[Result] = [r for c in study.cells for r in c.runs if not r.finished]
    runs += [run for run in study.tried if not run.finished]
    rows = [(text(run.run.name), text(run.failure or "under way, or stopped")) for run in runs]
    return table(("run", "why"), rows, words=2) if rows else ""
