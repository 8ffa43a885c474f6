"""The plan as a page: scaling curves, and the step's two timelines, for each number of GPUs.

plotly's script is put into the page, so that it is one file and works offline.
"""

from __future__ import annotations

import html
from typing import Any

from megabatch.errors import UserError
from megabatch.planner.run import Forecast

COMPUTE, BACKWARD, WIRE, EXPOSED, SLOWEST = "#4c78a8", "#72b7b2", "#f58518", "#e45756", "#b0b0b0"


def page(title: str, found: list[Forecast]) -> str:
    """HTML of the forecasts of one recipe on one machine."""
    try:
        import plotly.graph_objects as go
        import plotly.io as pio
    except ImportError:
        raise UserError("--html needs plotly: pip install megabatch[report]") from None
    machine = found[0].machine
    figures = [_scaling(go, found), *(_timeline(go, forecast) for forecast in _fastest(found))]
    parts = [
        pio.to_html(figure, full_html=False, include_plotlyjs=index == 0)
        for index, figure in enumerate(figures)
    ]
    heading = html.escape(f"{title} on {machine}")
    notes = "".join(
        f"<p>{html.escape(note)}</p>"
        for note in dict.fromkeys(note for forecast in found for note in forecast.notes)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;"
        "padding:0 1em}table{border-collapse:collapse}"
        "td,th{padding:.2em .7em;text-align:right;white-space:nowrap}</style></head>"
        f"<body><h1>{heading}</h1>{_table(found)}{notes}{''.join(parts)}</body></html>\n"
    )


def _fastest(found: list[Forecast]) -> list[Forecast]:
    best: dict[int, Forecast] = {}
    for forecast in found:
        other = best.setdefault(forecast.gpus, forecast)
        if forecast.seconds_to_target < other.seconds_to_target:
            best[forecast.gpus] = forecast
    return list(best.values())


def _table(found: list[Forecast]) -> str:
    heads = ("GPUs", "plan", "grid", "bucket MB", "step ms", "exposed ms", "efficiency",
             "images/s", "seconds", "limit")  # fmt: skip
    rows = [
        (
            f"{f.gpus:,}",
            f.setting.plan,
            f"{f.setting.grid[0]} x {f.setting.grid[1]}",
            f"{f.setting.bucket_mb:g}",
            f"{1e3 * f.step_seconds:.2f}",
            f"{1e3 * f.exposed_seconds:.2f}",
            f"{f.efficiency:.1%}",
            f"{f.images_per_second:,.0f}",
            f"{f.seconds_to_target:,.1f}",
            f.limit,
        )
        for f in _fastest(found)
    ]
    head = "".join(f"<th>{word}</th>" for word in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _scaling(go: Any, found: list[Forecast]) -> Any:
    figure = go.Figure()
    for plan in dict.fromkeys(forecast.setting.plan for forecast in found):
        line = [forecast for forecast in found if forecast.setting.plan == plan]
        figure.add_scatter(
            x=[forecast.gpus for forecast in line],
            y=[forecast.efficiency for forecast in line],
            name=plan,
            mode="lines+markers",
            text=[
                f"{f.setting.grid[0]} x {f.setting.grid[1]}, {f.setting.bucket_mb:g} MB, "
                f"{f.seconds_to_target:,.1f} s"
                for f in line
            ],
        )
    sizes = sorted({forecast.gpus for forecast in found})
    figure.update_xaxes(
        title="GPUs", type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes]
    )
    figure.update_yaxes(title="efficiency", tickformat=".0%", rangemode="tozero")
    figure.update_layout(title="Efficiency by number of GPUs and plan", template="plotly_white")
    return figure


def _timeline(go: Any, forecast: Forecast) -> Any:
    """Backward above, the wire below; the slowest worker's lateness after the last bucket."""
    step = forecast.step
    backward_end = step.forward_seconds + step.backward_seconds
    arrived = backward_end + step.exposed_seconds
    bars = [
        ("worker", "until backward", 0.0, step.forward_seconds, COMPUTE),
        ("worker", "backward", step.forward_seconds, backward_end, BACKWARD),
        ("worker", "exposed communication", backward_end, arrived, EXPOSED),
        ("worker", "slowest worker", arrived, arrived + step.jitter_seconds, SLOWEST),
        ("worker", "input", arrived + step.jitter_seconds, step.seconds, "#54a24b"),
    ]
    bars += [
        ("wire", f"bucket {number}, {sent.nbytes / 1e6:.2f} MB", sent.start, sent.end, WIRE)
        for number, sent in enumerate(step.sent)
    ]
    figure = go.Figure()
    for row, name, start, end, color in bars:
        if end <= start:
            continue
        figure.add_bar(
            y=[row],
            x=[1e3 * (end - start)],
            base=[1e3 * start],
            name=name,
            orientation="h",
            marker={"color": color, "line": {"color": "white", "width": 0.5}},
            hovertemplate=f"{name}<br>{1e3 * start:.3f} to {1e3 * end:.3f} ms<extra></extra>",
            showlegend=row == "worker",
        )
    setting = forecast.setting
    figure.update_layout(
        title=f"One step on {forecast.gpus:,} GPUs: {setting.plan}, "
        f"{setting.grid[0]} x {setting.grid[1]}, buckets of {setting.bucket_mb:g} MB",
        barmode="overlay",
        template="plotly_white",
        height=280,
    )
    figure.update_xaxes(title="ms")
    figure.update_yaxes(categoryorder="array", categoryarray=["wire", "worker"])
    return figure
