"""The plan as a page: what each number of GPUs takes and costs, and one step's two timelines.

The timelines are of the steps that the cards tell of, stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from megabatch.planner.run import Forecast
from megabatch.planner.step import StepForecast
from megabatch.report.bars import BarPiece, bar, key
from megabatch.report.look import Section, colour, page, text
from megabatch.report.numbers import duration
from megabatch.report.plain import best_by_gpus, folded

COLOURS = {
    "until backward": "compute",
    "backward": "c2",
    "exposed communication": "bad",
    "slowest worker": "c7",
    "input": "input",
    "bucket on the wire": "wire",
}


def plan_page(title: str, found: list[Forecast], remarks: list[str]) -> str:
    """HTML of the forecasts of one recipe on one machine."""
    best = best_by_gpus(found)
    advice = "".join(f'<p class="faults">{text(one)}</p>' for one in dict.fromkeys(remarks))
    sections = [
        Section("Time and cost", _cards(best) + advice),
        Section("Where nine of ten runs should end", "".join(_times(best))),
        Section(
            "Efficiency",
            "".join(_efficiencies(found)),
            "Of the images/s that as many single nodes would have: the fastest setting, and others "
            "where they are slower by more than a per cent.",
        ),
        Section("One step", key(COLOURS) + "".join(_steps(best))),
    ]
    notes = dict.fromkeys(note for forecast in found for note in forecast.notes)
    if notes:
        body = "".join(f'<p class="soft">{text(note)}</p>' for note in notes)
        sections.append(Section("What was not measured", body))
    return page(f"{title} on {found[0].machine}", sections)


def _cards(best: list[Forecast]) -> str:
    return f'<div class="cards">{"".join(map(_card, range(len(best)), best))}</div>'


def _card(number: int, f: Forecast) -> str:
    low, high = f.interval
    steps = " and ".join(f"{1e3 * step.seconds:,.2f}" for _, _, step in f.stages)
    facts = [
        f"{duration(low)} to {duration(high)}",
        f"{f.images_per_second:,.0f} images/s",
        f"efficiency {f.efficiency:.1%}",
        f"steps of {steps} ms",
        f"{f.gpu_hours:,.1f} GPU hours",
        *([] if f.dollars is None else [f"${f.dollars:,.2f}"]),
        *([] if f.kwh is None else [f"{f.kwh:,.1f} kWh"]),
        f"{f.setting.plan}, {f.setting.grid[0]} x {f.setting.grid[1]}",
        f"limit: {f.limit}",
    ]
    body = "<br>".join(text(fact) for fact in facts)
    return (
        f'<div class="card" style="--c:{colour(number)}"><div class="name">{f.gpus:,} GPUs</div>'
        f'<b>{text(duration(f.seconds_to_target))}</b><div class="soft">{body}</div></div>'
    )


def _times(best: list[Forecast]) -> Iterator[str]:
    longest = max(forecast.interval[1] for forecast in best)
    for forecast in best:
        low, high = forecast.interval
        words = f"{duration(low)} to {duration(high)}"
        took = forecast.seconds_to_target
        yield bar(
            f"{forecast.gpus:,} GPUs",
            f"{duration(took)} ({words})",
            [BarPiece(0.0, took / longest, "compute", duration(took))],
            [BarPiece(low / longest, high / longest, "ink", words)],
        )


def _efficiencies(found: list[Forecast]) -> Iterator[str]:
    for group in folded(found):
        first = group[0]
        others = f" and {len(group) - 1} alike" if len(group) > 1 else ""
        yield bar(
            f"{first.gpus:,} GPUs, {first.setting.plan}{others}",
            f"{first.efficiency:.1%}",
            [BarPiece(0.0, min(1.0, first.efficiency), "c2")],
        )


def _steps(best: list[Forecast]) -> Iterator[str]:
    for forecast in best:
        for number, (batch, steps, step) in enumerate(forecast.stages, 1):
            stage = f", stage {number} of {len(forecast.stages)}" * (len(forecast.stages) > 1)
            setting = forecast.setting
            words = (
                f"{forecast.gpus:,} GPUs, batch {batch:,}{stage}: {steps:,} steps of "
                f"{1e3 * step.seconds:,.2f} ms; {setting.plan}, {setting.grid[0]} x "
                f"{setting.grid[1]}, buckets of {setting.bucket_mb:g} MB in {setting.wire}"
            )
            yield f"<h3>{text(words)}</h3>{''.join(_timeline(step))}"


def _timeline(step: StepForecast) -> Iterator[str]:
    """Backward above, the wire below; the slowest worker's lateness after the last bucket."""
    backward_end = step.forward_seconds + step.backward_seconds
    arrived = backward_end + step.exposed_seconds
    late = arrived + step.jitter_seconds
    spans = (
        ("until backward", 0.0, step.forward_seconds),
        ("backward", step.forward_seconds, backward_end),
        ("exposed communication", backward_end, arrived),
        ("slowest worker", arrived, late),
        ("input", late, step.seconds),
    )
    total = step.seconds

    def piece(name: str, start: float, end: float, words: str) -> BarPiece:
        times = f"{words}: {1e3 * start:.3f} to {1e3 * end:.3f} ms"
        return BarPiece(start / total, end / total, COLOURS[name], times)

    computed = [piece(name, start, end, name) for name, start, end in spans]
    yield bar("worker", f"{1e3 * total:,.2f} ms", computed)
    if step.sent:
        sent = [
            piece(
                "bucket on the wire",
                one.start,
                min(one.end, total),
                f"bucket {number}, {one.nbytes / 1e6:.2f} MB",
            )
            for number, one in enumerate(step.sent, 1)
        ]
        total = sum(one.nbytes for one in step.sent) / 1e6
        yield bar("wire", f"{len(sent)} buckets, {total:.1f} MB", sent)
