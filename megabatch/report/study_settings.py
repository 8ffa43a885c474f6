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
    "larger batches save steps in proportion, well above it hardly any. It moves as a run learns; "
    "where a rate falls to 0 hardly a gradient is left, and the number at the end says little."
)
_QUARTERS = (0.25, 0.5, 0.75, 1.0)


def noise(study: Study) -> str:
    rows = []
    probe = study.probe
    if probe is not None:
        epochs = f"forecast, after {probe.run.epoch:.3g} epochs"
        rows.append((epochs, f"{probe.batch:,}", *[""] * 3, count(study.noise_scale)))
    for cell in study.cells:
        known = [[run.noise_scale_at(quarter) for quarter in _QUARTERS] for run in cell.finished]
        at = [[v for v in values if math.isfinite(v)] for values in zip(*known, strict=True)]
        if cell.arm == RECIPE and any(at):
            scales = (count(mean(values).value) if values else UNKNOWN for values in at)
            rows.append(("noise scale of the runs, images", f"{cell.batch:,}", *scales))
    heads = ("", "batch", "at a quarter", "half", "three quarters", "the end")
    return table(heads, rows) if rows else ""


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
