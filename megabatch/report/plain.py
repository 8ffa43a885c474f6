"""A plan as plain text of at most 80 columns, the same on a terminal and in a pipe.

Rows that differ by less than a per cent are one row; a star marks the fastest of each number of
GPUs, and below the table each of these is told in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.planner.run import Forecast
from megabatch.report.numbers import duration

_LEGEND = (
    "*: the fastest of so many GPUs; +N: so many others are within 1 % of it; grid: rows x columns "
    "of workers; MB: gradients that travel together; effic.: images/s a GPU, of those in one node"
)
SAME = 0.01
WIDTH = 80


def text(
    found: list[Forecast],
    title: str,
    compared: str,
    remarks: list[str],
    own: Sequence[Forecast] = (),
    settings: str = "",
    doubted: Sequence[str] = (),
) -> str:
    """The recipe's settings, table, the best rows in full, what the recipe does as it is, what is
    doubtful in it, advice, notes."""
    best = best_by_gpus(found)
    lines = [*_wrapped(title), *(_wrapped(settings) if settings else [])]
    lines += ["", *_table(found, best, compared), "", *_wrapped(_LEGEND), ""]
    for forecast in best:
        lines += _wrapped(f"* {in_words(forecast)}")
    for forecast in own:
        lines += _wrapped(f"as the recipe sums: {_in_short(forecast)}")
    lines += [line for one in _idle_choice(found, compared) for line in _wrapped(one)]
    lines += [line for one in dict.fromkeys(remarks) for line in _wrapped(f"advice: {one}")]
    lines += [line for one in doubted for line in _wrapped(f"note: {one}")]
    notes = dict.fromkeys(note for forecast in found for note in forecast.notes)
    lines += [line for note in notes for line in _wrapped(f"note: {note}")]
    return "\n".join(line.rstrip() for line in lines)


def best_by_gpus(found: list[Forecast]) -> list[Forecast]:
    """The best of each number of GPUs."""
    sizes = dict.fromkeys(forecast.gpus for forecast in found)
    return [
        min((f for f in found if f.gpus == size), key=lambda f: f.seconds_to_target)
        for size in sizes
    ]


def folded(found: list[Forecast]) -> list[list[Forecast]]:
    """By number of GPUs, the fastest first; those within a per cent of a group's first join it."""
    groups: list[list[Forecast]] = []
    for size in dict.fromkeys(forecast.gpus for forecast in found):
        ordered = sorted(
            (f for f in found if f.gpus == size), key=lambda forecast: forecast.seconds_to_target
        )
        group: list[Forecast] = []
        for forecast in ordered:
            near = group and forecast.seconds_to_target <= (1 + SAME) * group[0].seconds_to_target
            if not near:
                group = []
                groups.append(group)
            group.append(forecast)
    return groups


def in_words(forecast: Forecast) -> str:
    """One forecast in a sentence or two."""
    low, high = forecast.interval
    setting = forecast.setting
    money = "" if forecast.dollars is None else f", ${forecast.dollars:,.2f}"
    energy = "" if forecast.kwh is None else f", {forecast.kwh:,.1f} kWh"
    hours = "GPU hour" if forecast.gpu_hours == 1 else "GPU hours"
    return (
        f"{_counted(forecast.gpus, 'GPU')}: {duration(forecast.seconds_to_target)}, nine of ten "
        f"times {duration(low)} to {duration(high)}; {forecast.gpu_hours:,.2f} {hours}{money}"
        f"{energy}, {forecast.start_seconds:g} s of start-up included. {_plan(forecast)} on "
        f"{setting.grid[0]} x {setting.grid[1]}, buckets of {setting.bucket_mb:g} MB in "
        f"{setting.wire}, {_counted(forecast.micro, 'image')} a pass; a step takes "
        f"{1e3 * forecast.step_seconds:.2f} ms, {1e3 * forecast.exposed_seconds:.2f} of it exposed "
        f"communication. Limit: {forecast.limit}."
    )


def _plan(forecast: Forecast) -> str:
    """Its name; of a hybrid also what goes which way."""
    parts = (f"{count} buckets by {name}" for name, count in forecast.parted)
    return forecast.setting.plan + (f" ({', '.join(parts)})" if forecast.parted else "")


def _in_short(forecast: Forecast) -> str:
    setting = forecast.setting
    return (
        f"{_counted(forecast.gpus, 'GPU')}, {_plan(forecast)} on {setting.grid[0]} x "
        f"{setting.grid[1]}, buckets of {setting.bucket_mb:g} MB in {setting.wire}: "
        f"{duration(forecast.seconds_to_target)}, {forecast.images_per_second:,.0f} images/s"
    )


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _table(found: list[Forecast], best: list[Forecast], compared: str) -> list[str]:
    heads = ("", "GPUs", "plan", "grid", "MB", "images/s", "effic.", "time", "cost")
    rows = []
    for group in folded(found):
        first = group[0]
        setting = first.setting
        others = f" +{len(group) - 1}" if len(group) > 1 else ""
        named = {"wire": f"{setting.plan} {setting.wire}"}.get(compared, setting.plan)
        rows.append(
            (
                "*" if any(first is one for one in best) else "",
                f"{first.gpus:,}",
                f"{named}{others}",
                f"{setting.grid[0]} x {setting.grid[1]}",
                f"{setting.bucket_mb:g}",
                f"{first.images_per_second:,.0f}",
                f"{first.efficiency:.0%}",
                duration(first.seconds_to_target),
                "" if first.dollars is None else f"${first.dollars:,.0f}",
            )
        )
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    kept = [i for i in range(len(heads)) if i < 8 or any(row[8] for row in rows)]
    for spare in (4, 3):  # what a narrow screen can do without: the sentences below have it
        if sum(widths[i] + 1 for i in kept) - 1 > WIDTH:
            kept.remove(spare)
    return [
        " ".join(
            row[i].ljust(widths[i]) if i in (0, 2) else row[i].rjust(widths[i]) for i in kept
        ).rstrip()
        for row in (heads, *rows)
    ]


def _idle_choice(found: list[Forecast], compared: str) -> Iterator[str]:
    """Where the choice that was compared does not matter."""
    things = {"plans": "plan", "grids": "grid", "buckets": "bucket size", "wire": "wire"}
    for size in dict.fromkeys(forecast.gpus for forecast in found):
        here = [forecast for forecast in found if forecast.gpus == size]
        times = [forecast.seconds_to_target for forecast in here]
        if len(here) > 1 and max(times) <= (1 + SAME) * min(times):
            yield f"on {_counted(size, 'GPU')} the choice of {things[compared]} does not matter: " \
                  f"all {len(here)} are within 1 %"  # fmt: skip


def _wrapped(sentence: str) -> Iterator[str]:
    line = ""
    for word in sentence.split():
        if line and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    yield line
