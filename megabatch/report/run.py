"""The page of one run or several: results, curves over epochs, where the time went, trust ratios,
derived numbers, what differs between them, and what they ran on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from megabatch.report.axes import axis_of
from megabatch.report.charts import Curve, chart, heat_map, stacked_bars
from megabatch.report.look import Section, called, colour, dot, page, table, text
from megabatch.report.named import Named, named
from megabatch.report.numbers import UNKNOWN, count, duration, percent, short
from megabatch.report.pointing import SCRIPT
from megabatch.report.settings import derived_numbers, environment_table, settings
from megabatch.runs.record import Record, images_per_second, number, seconds_of, speeds

_MOST_CARDS = 4
_MOST_COLUMNS = 120
_MOST_LAYERS = 400
_WAITS = ("computing", "waiting for images", "waiting for other workers")
_WAIT_COLOURS = ("compute", "input", "wire")


def report(records: Sequence[Record], now: float | None = None) -> str:
    """HTML of some runs; one file that needs nothing else."""
    now = time.time() if now is None else now
    runs = named(records)
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].name
    sections = [
        Section("Result", _result(runs, now)),
        Section("Curves", _curves(runs), _curves_note(runs)),
        Section("Speed", _speed(runs), "Where the first worker's time went, epoch by epoch."),
        Section(
            "Trust ratios",
            _trust(runs),
            "The ratio of each adapted layer at each evaluation: "
            "how far LARS lets its weights move, by their norm over their gradient's.",
        ),
        Section("Derived numbers", derived_numbers(runs)),
        Section("Settings", settings(runs)),
        Section("Environment", environment_table(runs)),
    ]
    lead = f'<p class="soft">{text(_lead(runs, now))}</p>'
    shown = [section for section in sections if section.body]
    return page(f"megabatch: {title}", shown, lead + _faults(runs), [SCRIPT])


# --- results -----------------------------------------------------------------------------------


def _lead(runs: Sequence[Named], now: float) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    recipes = {str(run.record.config.get("name", "")) for run in runs} - {""}
    what = f"recipe {', '.join(sorted(recipes)[:5])}; " if recipes else ""
    return f"{what}report made {made}"


def _faults(runs: Sequence[Named]) -> str:
    faults = []
    for run in runs:
        words = list(run.record.faults)
        if run.record.bad_lines:
            lines = "line" if run.record.bad_lines == 1 else "lines"
            words.append(f"{run.record.bad_lines:,} {lines} of metrics.jsonl could not be read")
        if words:
            faults.append(f"{run.name}: {'; '.join(words)}")
    return f'<p class="faults soft">{"<br>".join(map(text, faults))}</p>' if faults else ""


def _result(runs: Sequence[Named], now: float) -> str:
    cards = "".join(_card(run, now) for run in runs) if len(runs) <= _MOST_CARDS else ""
    heads = ("run", "state", "top-1", "top-5", "loss", "best top-1", "epochs", "steps", "images",
             "time", "images/s", "workers")  # fmt: skip
    rows = []
    for run in runs:
        record, state = run.record, run.record.state(now)
        best = max((number(e.get("top1")) for e in record.evaluations), default=math.nan)
        last = record.steps.last()
        steps, seen = (number(record.summary.get(name)) for name in ("steps", "seen"))
        if last and not steps >= last["step"]:
            steps, seen = last["step"] + 1, last["seen"]
        rows.append(
            (
                called(run.at, run.name),
                _chip(state),
                percent(record.result("top1")),
                percent(record.result("top5")),
                short(record.result("loss")),
                percent(best),
                count(record.epoch, 2),
                count(steps),
                count(seen),
                text(duration(seconds_of(record))),
                count(images_per_second(record)),
                count(number(record.summary.get("world"))),
            )
        )
    return f'<div class="cards">{cards}</div>{table(heads, rows, words=2)}'


def _card(run: Named, now: float) -> str:
    record = run.record
    small = [
        f"{count(record.epoch, 2)} epochs",
        duration(seconds_of(record)),
        f"{count(images_per_second(record))} images/s",
    ]
    few = "".join(f"<span>{text(word)}</span>" for word in small if UNKNOWN not in word)
    return (
        f'<div class="card" style="--c:{colour(run.at)}"><div class="name">'
        f"<span>{text(run.name)}</span>{_chip(record.state(now))}</div>"
        f'<b>{percent(record.result("top1"))}</b><div class="soft">top-1 at the last evaluation'
        f'</div><div class="few">{few}</div></div>'
    )


def _chip(state: str) -> str:
    label = {"target": "target reached", "silent": "silent: killed?"}.get(state, state)
    kind = state if state.isalpha() else "other"
    return f'<span class="chip {text(kind)}">{text(label)}</span>'


# --- curves ------------------------------------------------------------------------------------


def _curves_note(runs: Sequence[Named]) -> str:
    longest = max(len(run.record.steps) for run in runs)
    smooth = ", smoothed; pale behind a line are the single steps" if longest >= 40 else ""
    return f"Against epochs. Lines with dots are evaluations, thin ones training{smooth}."


def _curves(runs: Sequence[Named]) -> str:
    def steps(name: str, style: Any = "smooth", what: str = "") -> list[Curve]:
        return [
            Curve(
                f"{run.name}{what}",
                run.at,
                run.record.steps["epoch"],
                run.record.steps[name],
                style,
            )
            for run in runs
        ]

    def evaluations(name: str, what: str) -> list[Curve]:
        return [
            Curve(
                f"{run.name}{what}",
                run.at,
                [number(e.get("epoch")) for e in run.record.evaluations],
                [number(e.get(name)) for e in run.record.evaluations],
                "dots",
            )
            for run in runs
        ]

    def steady(name: str) -> bool:
        values = {v for run in runs for v in run.record.steps[name] if math.isfinite(v)}
        return len(values) == 1

    drawn = [
        chart(
            "Accuracy",
            [*steps("top1", "thin", ", training"), *evaluations("top1", ", evaluation")],
            "top-1",
            percent=True,
        ),
        chart(
            "Loss",
            [*steps("loss", "thin", ", training"), *evaluations("loss", ", evaluation")],
            log=True,
        ),
        chart("Learning rate", steps("lr", "plain"), zero=True),
        chart("Batch", steps("batch", "stairs"), "images a step", zero=True),
        chart("Gradient noise scale", steps("noise_scale"), "images", log=True),
        chart("Gradient norm", steps("gradient_norm"), log=True),
    ]
    constant = []
    for title, name in (("Momentum", "momentum"), ("Loss scale", "loss_scale")):
        if steady(name):
            value = next(v for run in runs for v in run.record.steps[name] if math.isfinite(v))
            constant.append(f"{title.lower()} {short(value)}")
        else:
            drawn.append(chart(title, steps(name, "stairs"), log=name == "loss_scale"))
    key = "".join(
        f'<button type="button" data-run="{run.at}" aria-pressed="true">'
        f"{dot(run.at)}{text(run.name)}</button>"
        for run in runs
    )
    key = f'<div class="key">{key}</div>' if len(runs) > 1 else ""
    charts = "".join(drawn)
    note = f'<p class="note after">Constant: {text(", ".join(constant))}.</p>' if constant else ""
    return f'{key}<div class="charts">{charts}</div>{note}' if charts else ""


# --- speed -------------------------------------------------------------------------------------


def _speed(runs: Sequence[Named]) -> str:
    lines = [Curve(run.name, run.at, *speeds(run.record)) for run in runs]
    drawn = chart("Throughput", lines, "images/s", zero=True, wide=len(runs) % 2 == 0)
    sentences = ""
    for run in runs:
        bars, sentence = _waits(run)
        drawn += bars
        sentences += sentence
    key = "".join(
        f'<span><i class="dot box" style="--c:var(--{fill})"></i>{text(name)}</span>'
        for name, fill in zip(_WAITS, _WAIT_COLOURS, strict=True)
    )
    key = f'<div class="key">{key}</div>' if sentences else ""
    return f'{sentences}{key}<div class="charts">{drawn}</div>' if drawn else ""


def _waits(run: Named) -> tuple[str, str]:
    images = run.record.images
    epochs, rows, totals = [], [], [0.0, 0.0, 0.0]
    for waits in run.record.waits:
        seconds, seen = number(waits.get("seconds")), number(waits.get("seen"))
        parts = [max(0.0, number(waits.get(name))) for name in ("input", "communication")]
        if not (seconds > 0 and images and seen > 0 and all(map(math.isfinite, parts))):
            continue
        known = [max(0.0, seconds - sum(parts)), *parts]
        counted = sum(known)
        epochs.append(seen / images)
        rows.append([part / counted for part in known])
        totals = [total + part for total, part in zip(totals, known, strict=True)]
    if not rows:
        return "", ""
    if len(rows) > _MOST_COLUMNS:
        every = -(-len(rows) // _MOST_COLUMNS)
        epochs, rows = epochs[every - 1 :: every], rows[every - 1 :: every]
    bars = stacked_bars(run.name, _WAITS, _WAIT_COLOURS, epochs, rows, "share of training time")
    all_counted = sum(totals)
    words = ", ".join(
        f"{total / all_counted:.0%} {name}".replace("%", " %")
        for total, name in zip(totals, _WAITS, strict=True)
        if total / all_counted >= 0.005
    )
    return bars, f"<p>{dot(run.at)} {text(run.name)}: {text(words)}.</p>"


# --- trust ratios ------------------------------------------------------------------------------


def _trust(runs: Sequence[Named]) -> str:
    found = [(run, *_ratios(run.record)) for run in runs]
    # One scale for all, so that the same colour is the same ratio.
    axis = axis_of([v for *_, cells in found for row in cells for v in row], log=True)
    if axis is None:
        return ""
    drawn = "".join(
        heat_map(run.name, layers, epochs, cells, axis)
        for run, layers, epochs, cells in found
        if epochs
    )
    return f'<div class="charts">{drawn}</div>'


def _ratios(record: Record) -> tuple[list[str], list[float], list[list[float]]]:
    """Layers, epochs, and the ratio of each at each."""
    images = record.images
    by_layer: dict[str, dict[float, float]] = {}
    for layer in record.layers:
        seen, name = number(layer.get("seen")), str(layer.get("name"))[:200]
        if images and seen >= 0 and (name in by_layer or len(by_layer) < _MOST_LAYERS):
            by_layer.setdefault(name, {})[seen / images] = number(layer.get("ratio"))
    epochs = sorted({epoch for ratios in by_layer.values() for epoch in ratios})
    epochs = epochs[:: max(1, -(-len(epochs) // _MOST_COLUMNS))]
    cells = [[ratios.get(epoch, math.nan) for epoch in epochs] for ratios in by_layer.values()]
    return list(by_layer), epochs, cells
