"""The page of one run or several: results, curves over epochs, where the time went, trust ratios,
derived numbers, what differs between them, and what they ran on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megabatch.config import Config
from megabatch.report.charts import SCRIPT, Line, axis_of, chart, heat_map, shares
from megabatch.report.look import Section, colour, dot, page, table, text
from megabatch.report.numbers import UNKNOWN, count, duration, percent, short
from megabatch.runs.record import Record, images_per_second, number, seconds_of, speeds

_MOST_CARDS = 4
_MOST_COLUMNS = 120
_MOST_LAYERS = 400
_MOST_OPEN = 20
"""rows of a single run's table that are shown at once"""
_MOST_STEPS = 5_000_000
"""a config that would take more is not walked through"""
_WAITS = ("computing", "waiting for images", "waiting for other workers")
_WAIT_COLOURS = ("compute", "input", "wire")


@dataclass
class Named:
    """A run with the name and colour it has on this page."""

    name: str
    at: int
    record: Record

    @property
    def heading(self) -> str:
        return f"<h3>{dot(self.at)}{text(self.name)}</h3>"


def report(records: Sequence[Record], now: float | None = None) -> str:
    """HTML of some runs; one file that needs nothing else."""
    now = time.time() if now is None else now
    named = zip(names(records), records, strict=True)
    runs = [Named(name, at, record) for at, (name, record) in enumerate(named)]
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].name
    said = [
        Section("Result", _result(runs, now)),
        Section("Curves", _curves(runs), _curves_note(runs)),
        Section("Speed", _speed(runs), "Where the first worker's time went, epoch by epoch."),
        Section(
            "Trust ratios",
            _trust(runs),
            "The ratio of each adapted layer at each evaluation: "
            "how far LARS lets its weights move, by their norm over their gradient's.",
        ),
        Section("Derived numbers", _derived(runs)),
        Section("Settings", _settings(runs)),
        Section("Environment", _environment(runs)),
    ]
    lead = f'<p class="soft">{text(_lead(runs, now))}</p>'
    return page(f"megabatch: {title}", [s for s in said if s.body], lead + _faults(runs), [SCRIPT])


def names(records: Sequence[Record]) -> list[str]:
    """The folders' names, with as many of their parents' as tell them apart."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        found = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(found)) == len(set(paths)):
            return found
    return [str(path) for path in paths]


# --- results -----------------------------------------------------------------------------------


def _lead(runs: Sequence[Named], now: float) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    recipes = {str(run.record.config.get("name", "")) for run in runs} - {""}
    what = f"recipe {', '.join(sorted(recipes)[:5])}; " if recipes else ""
    return f"{what}report made {made}"


def _faults(runs: Sequence[Named]) -> str:
    said = []
    for run in runs:
        words = list(run.record.faults)
        if run.record.bad_lines:
            lines = "line" if run.record.bad_lines == 1 else "lines"
            words.append(f"{run.record.bad_lines:,} {lines} of metrics.jsonl could not be read")
        if words:
            said.append(f"{run.name}: {'; '.join(words)}")
    return f'<p class="faults soft">{"<br>".join(map(text, said))}</p>' if said else ""


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
                f"{dot(run.at)}{text(run.name)}",
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
    said = {"target": "target reached", "silent": "silent: killed?"}.get(state, state)
    kind = state if state.isalpha() else "other"
    return f'<span class="chip {text(kind)}">{text(said)}</span>'


# --- curves ------------------------------------------------------------------------------------


def _curves_note(runs: Sequence[Named]) -> str:
    longest = max(len(run.record.steps) for run in runs)
    smooth = ", smoothed; pale behind a line are the single steps" if longest >= 40 else ""
    return f"Against epochs. Lines with dots are evaluations, thin ones training{smooth}."


def _curves(runs: Sequence[Named]) -> str:
    def steps(name: str, style: Any = "smooth", what: str = "") -> list[Line]:
        return [
            Line(
                f"{run.name}{what}",
                run.at,
                run.record.steps["epoch"],
                run.record.steps[name],
                style,
            )
            for run in runs
        ]

    def evaluations(name: str, what: str) -> list[Line]:
        return [
            Line(
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
    said = f'<p class="note after">Constant: {text(", ".join(constant))}.</p>' if constant else ""
    return f'{key}<div class="charts">{charts}</div>{said}' if charts else ""


# --- speed -------------------------------------------------------------------------------------


def _speed(runs: Sequence[Named]) -> str:
    lines = [Line(run.name, run.at, *speeds(run.record)) for run in runs]
    drawn = chart("Throughput", lines, "images/s", zero=True, wide=len(runs) % 2 == 0)
    said = ""
    for run in runs:
        bars, sentence = _waits(run)
        drawn += bars
        said += sentence
    key = "".join(
        f'<span><i class="dot box" style="--c:var(--{fill})"></i>{text(name)}</span>'
        for name, fill in zip(_WAITS, _WAIT_COLOURS, strict=True)
    )
    key = f'<div class="key">{key}</div>' if said else ""
    return f'{said}{key}<div class="charts">{drawn}</div>' if drawn else ""


def _waits(run: Named) -> tuple[str, str]:
    images = run.record.images
    epochs, rows, totals = [], [], [0.0, 0.0, 0.0]
    for waits in run.record.waits:
        seconds, seen = number(waits.get("seconds")), number(waits.get("seen"))
        parts = [max(0.0, number(waits.get(name))) for name in ("input", "communication")]
        if not (seconds > 0 and images and seen > 0 and all(map(math.isfinite, parts))):
            continue
        known = [max(0.0, seconds - sum(parts)), *parts]
        whole = sum(known)
        epochs.append(seen / images)
        rows.append([part / whole for part in known])
        totals = [total + part for total, part in zip(totals, known, strict=True)]
    if not rows:
        return "", ""
    if len(rows) > _MOST_COLUMNS:
        every = -(-len(rows) // _MOST_COLUMNS)
        epochs, rows = epochs[every - 1 :: every], rows[every - 1 :: every]
    bars = shares(run.name, _WAITS, _WAIT_COLOURS, epochs, rows, "share of training time")
    whole = sum(totals)
    words = ", ".join(
        f"{total / whole:.0%} {name}".replace("%", " %")
        for total, name in zip(totals, _WAITS, strict=True)
        if total / whole >= 0.005
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


# --- numbers and settings ----------------------------------------------------------------------


def _derived(runs: Sequence[Named]) -> str:
    """The table that a run began with: with its formulas, or what differs between several."""
    if len(runs) == 1:
        rows = [
            (text(name), f"<b>{text(value)}</b>", f'<span class="soft">{text(how)}</span>')
            for name, value, how in derived(runs[0].record)
        ]
        return table(("", "", ""), rows, words=3) if rows else ""
    tables = {run.at: {name: value for name, value, _ in derived(run.record)} for run in runs}
    return _compared(runs, lambda run: tables[run.at], "", "Numbers that are the same")


def derived(record: Record) -> list[tuple[str, str, str]]:
    """What follows from a run's config; nothing where it is not a config of this version."""
    images = record.images
    world = number(record.summary.get("world", record.environment.get("world")))
    if not images or not record.config:
        return []
    try:
        config = Config.from_json(json.dumps(record.config)).check()
        least = min(stage.batch for stage in config.all_stages)
        if config.epochs * images / least > _MOST_STEPS:
            raise ValueError("too many steps to count")
        rows = config.derived(round(images), int(world) if 1 <= world <= 1e6 else 1)
    except Exception as error:  # what another version wrote, or nobody, raises nearly anything
        reason = (str(error) or repr(error)).splitlines()[0][:200]
        record.faults.append(f"no derived numbers: {reason}")
        return []
    unknown = () if world >= 1 else ("world", "micro-batches a worker")
    return [row for row in rows if row[0] not in unknown]


def flat(value: Any, name: str = "", depth: int = 0) -> dict[str, str]:
    """A config as names with dots and words."""
    if isinstance(value, dict) and depth < 4 and (value or not name):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= flat(item, f"{name}.{key}" if name else str(key), depth + 1)
        return found
    return {name: _words(value)[:300]}


def _words(value: Any) -> str:
    """A value of a config: words as they are, lists of records as a person would say them."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "; ".join(
            ", ".join(f"{name} {_words(part)}" for name, part in item.items() if part is not None)
            for item in value
        )
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    # 6.0 and 6 are one setting, and 1.4000000000000001 is 1.4 to a reader.
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def _settings(runs: Sequence[Named]) -> str:
    return _compared(runs, lambda run: flat(run.record.config), "", "Settings that are the same")


def _environment(runs: Sequence[Named]) -> str:
    def words(run: Named) -> dict[str, str]:
        found = dict(run.record.environment)
        command = found.get("command")
        if isinstance(command, list):
            found["command"] = " ".join(str(word) for word in command)
        found.pop("process", None)  # for machines
        return {"folder": str(run.record.path), **flat(found)}

    return _compared(runs, words, "", "What is the same")


def _compared(
    runs: Sequence[Named], said: Callable[[Named], dict[str, str]], head: str, rest: str
) -> str:
    """What differs between runs in a table, the rest behind a word to click."""
    tables = [said(run) for run in runs]
    if not any(tables):
        return ""
    every = list(dict.fromkeys(name for found in tables for name in found))
    differs = [name for name in every if len({found.get(name) for found in tables}) > 1]
    heads = (head, *(f"{dot(run.at)}{text(run.name)}" for run in runs))

    def rows(chosen: Sequence[str]) -> list[tuple[str, ...]]:
        return [(text(name), *(_code(found.get(name, "")) for found in tables)) for name in chosen]

    if len(runs) == 1:
        shown = table(("", ""), rows(every), words=2)
        few = len(every) <= _MOST_OPEN
        return shown if few else f"<details><summary>All of them</summary>{shown}</details>"
    shown = '<p class="note">No differences.</p>'
    if differs:
        shown = table(heads, rows(differs), words=len(heads))
    same = [name for name in every if name not in set(differs)]
    if not same:
        return shown
    hidden = table(("", "all runs"), [row[:2] for row in rows(same)], words=2)
    return f"{shown}<details><summary>{rest}</summary>{hidden}</details>"


def _code(words: str) -> str:
    """Words that are broken between each other, not inside."""
    parts = "".join(f"<span>{text(word)} </span>" for word in words.split())
    return f"<code>{parts or UNKNOWN}</code>"
