"""The tables of the docs as text: published results, the jitter's effect, constants and their
sources, today's GPUs.

`megabatch plan published` and `megabatch plan today` print them; a test holds the docs to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megabatch.planner.bundled import MACHINES
from megabatch.planner.chips import CHIPS
from megabatch.planner.machine import Machine
from megabatch.planner.machine_file import load
from megabatch.planner.published import Claim, imagenet, rows
from megabatch.planner.run import Forecast
from megabatch.planner.search import forecast


def published(found: list[Claim]) -> str:
    """Each published number, the planner's, and the error."""
    lines = [
        "| paper | row | published | planner | from, to | error | allowed | remark |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        unit = "points" if row.unit == "%" else "%"
        allowed = "shown only" if row.tolerance is None else f"{row.tolerance:g} {unit}"
        if row.given:
            allowed = "given"
        lines.append(
            f"| {row.paper} | {row.what} | {_number(row.published)} {row.unit} "
            f"| {_number(row.predicted)} {row.unit} | {_range(row)} "
            f"| {row.error:+.1f} {unit} | {allowed} "
            f"| {row.remark} |"
        )
    return "\n".join(lines)


def jitter(values: tuple[float, ...] = (0, 0.01, 0.02, 0.025, 0.03, 0.04, 0.06)) -> str:
    """Each published efficiency with another jitter on every machine, fitted ones too."""
    found = [[row for row in rows(_with_jitter(value)) if row.unit == "%"] for value in values]
    lines = [
        f"| row | published | {' | '.join(f'{100 * value:g}%' for value in values)} |",
        "|" + "---|" * (2 + len(values)),
    ]
    for same in zip(*found, strict=True):
        cells = " | ".join(f"{row.predicted:.1f}" for row in same)
        lines.append(f"| {same[0].paper}: {same[0].what} | {same[0].published:.1f} | {cells} |")
    return "\n".join(lines)


def _with_jitter(value: float) -> dict[str, Machine]:
    return {name: replace(machine, jitter=value) for name, machine in MACHINES.items()}


def sources() -> str:
    """Where each constant of each bundled machine is from."""
    lines = ["| machine | constant | source |", "|---|---|---|"]
    for machine in MACHINES.values():
        for name, source in machine.sources.items():
            mark = " **(fitted)**" if machine.fitted.split(".")[0] == name else ""
            lines.append(f"| {machine.name} | {name}{mark} | {source} |")
    return "\n".join(lines)


def chips() -> str:
    """What each generation's curve is, and from where."""
    lines = ["| chip | the fixed cost of a pass | range | source |", "|---|---|---|---|"]
    for chip in CHIPS.values():
        cost, unit = chip.half, "images"
        if chip.fixed_seconds is not None:
            cost, unit = 1e3 * chip.fixed_seconds, "ms"
        low, high = cost / chip.spread, cost * chip.spread
        lines.append(
            f"| {chip.name} | {cost:.3g} {unit} | {low:.2g} to {high:.2g} | {chip.source} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _range(row: Claim) -> str:
    if row.interval is None:
        return ""
    low, high = row.interval
    unit = "min" if row.unit == "min" else "s"
    return f"{_number(low)} to {_number(high)} {unit}"


# --- today's GPUs: ResNet-50 at 8k, 32k and 64k on 8 to 100,000 of them -------------------------

TODAY = "hgx-h200"
BATCHES = (8192, 32768, 65536)
SIZES = (8, 512, 100_000)


def today_rows() -> Iterator[tuple[int, int, Forecast]]:
    """Batch, GPUs that there are, and the forecast on those that can be used.

    Epochs to 75.9 % are MLPerf's reference convergence points; a batch cannot use more GPUs than it
    has images.
    """
    machine = load(TODAY)
    each = machine.workers_per_node
    for batch in BATCHES:
        config = replace(imagenet("resnet50", batch), target_accuracy=0.759, eval_every=4.0)
        for gpus in SIZES:
            used = min(gpus, batch // each * each)
            yield batch, gpus, forecast(config, machine, used, wire="fp16")


def today() -> str:
    lines = [
        "| batch | GPUs | used | plan | images a GPU | step | efficiency | images/s "
        "| epochs | time to 75.9 % | from, to | GPU hours | kWh | what limits it |",
        "|" + "---|" * 14,
    ]
    for batch, gpus, found in today_rows():
        low, high = found.interval
        lines.append(
            f"| {batch:,} | {gpus:,} | {found.gpus:,} | {found.setting.plan} "
            f"| {batch / found.gpus:,.0f} | {1e3 * found.step_seconds:.2f} ms "
            f"| {found.efficiency:.0%} | {found.images_per_second:,.0f} | {found.epochs:g} "
            f"| {found.seconds_to_target:,.1f} s | {low:,.1f} to {high:,.1f} s "
            f"| {found.gpu_hours:,.1f} | {found.kwh or 0:,.1f} | {found.limit} |"
        )
    return "\n".join(lines)
