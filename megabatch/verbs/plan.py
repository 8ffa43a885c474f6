"""megabatch plan RECIPE --machine M --gpus N,N: step time, efficiency and time before the run.

`megabatch plan published` replays published results, `megabatch plan today` prints the table of
docs/todays-gpus.md. No torch: it answers in under a second.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megabatch import recipes
from megabatch.config import Config
from megabatch.errors import DONE, UserError
from megabatch.planner import published, today, workload
from megabatch.planner.bundled import MACHINES
from megabatch.planner.machine import load
from megabatch.planner.run import Forecast, Job
from megabatch.planner.search import Comparison, candidates, compare, smallest, wire_of
from megabatch.verbs.parsing import parse


@dataclass(frozen=True)
class PlanFlags:
    machine: str = "dgx-h100"
    """a bundled machine, or the path of a machine.json"""
    gpus: str = "8,64,512"
    """numbers of GPUs, with commas between them"""
    plan: str | None = None
    """only this all-reduce (None: all are tried)"""
    grid: tuple[int, int] | None = None
    """only this grid, rows and columns"""
    bucket_mb: float | None = None
    """only this bucket size, in megabytes of fp32 gradients"""
    wire: str | None = None
    """gradients travel as fp32 or fp16 (None: as the recipe says)"""
    micro: int | None = None
    """at most so many images in one pass (None: as many as fit)"""
    compare: Comparison = "plans"
    """what the rows of the table are"""
    target_seconds: float | None = None
    """find the fewest nodes that end the run within so many seconds"""
    batch: int | None = None
    """another global batch; the stages keep their multiples of it"""
    epochs: float | None = None
    """another length of the run"""
    workload: str | None = None
    """JSON of a model of your own, from megabatch bench step --export"""
    html: str | None = None
    """write timelines and scaling curves to this page"""
    json: bool = False
    """the last line on standard output is the result as one JSON object"""


@dataclass(frozen=True)
class PublishedFlags:
    json: bool = False
    """the last line on standard output is the result as one JSON object"""


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if "-h" in arguments or "--help" in arguments:
            return _help()
        known = ", ".join(recipes.RECIPES)
        raise UserError(f"plan needs a recipe: one of {known}, a config.json, published or today")
    if arguments == ["today"]:
        print(today.table())
        return DONE
    if arguments[0] == "published":
        return _published(parse(PublishedFlags, "plan published", arguments[1:]))
    flags = parse(PlanFlags, f"plan {arguments[0]}", arguments[1:])
    config = recipes.named(arguments[0], flags.epochs, flags.batch)
    model = workload.load(flags.workload) if flags.workload else workload.workload_of(config)
    found = _found(config, model, flags)
    result: dict[str, Any] = {
        "recipe": config.name,
        "machine": flags.machine,
        "rows": [forecast.row() for forecast in found],
        "best": [forecast.row() for forecast in _fastest(found)],
    }
    _show(found, f"megabatch plan {config.name}, {flags.machine}")
    if flags.html:
        from megabatch.report.plan import page

        Path(flags.html).write_text(page(config.name, found))
        result["html"] = flags.html
    if flags.json:
        print(json.dumps(result), flush=True)
    return DONE


def _found(config: Config, model: workload.Workload, flags: PlanFlags) -> list[Forecast]:
    machine = load(flags.machine)
    if flags.micro is not None:
        if flags.micro < 1:
            raise UserError(f"--micro is {flags.micro}; a pass has at least 1 image")
        machine = replace(machine, largest_micro=flags.micro)
    wire = flags.wire or wire_of(config)
    if flags.target_seconds is not None:
        return [smallest(config, machine, flags.target_seconds, wire=wire, workload=model)]
    found = []
    for gpus in _numbers(flags.gpus):
        job = Job.of(config, machine, gpus, model)
        settings = list(
            candidates(gpus, plan=flags.plan, grid=flags.grid, bucket_mb=flags.bucket_mb, wire=wire)
        )
        found += compare(job, flags.compare, settings)
    return found


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--gpus is {text!r}: give numbers with commas, 64,256 say") from None


def _fastest(found: list[Forecast]) -> list[Forecast]:
    sizes = dict.fromkeys(forecast.gpus for forecast in found)
    return [
        min((f for f in found if f.gpus == size), key=lambda f: f.seconds_to_target)
        for size in sizes
    ]


def _show(found: list[Forecast], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    heads = ("GPUs", "plan", "grid", "bucket MB", "wire", "micro", "step ms", "exposed ms",
             "efficiency", "images/s", "time", "from", "to", "GPU hours", "limit")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head in ("plan", "wire", "limit") else "right")
    best = {id(forecast) for forecast in _fastest(found)}
    for forecast in found:
        setting = forecast.setting
        table.add_row(
            f"{forecast.gpus:,}",
            setting.plan,
            f"{setting.grid[0]} x {setting.grid[1]}",
            f"{setting.bucket_mb:g}",
            setting.wire,
            str(forecast.micro),
            f"{1e3 * forecast.step_seconds:.2f}",
            f"{1e3 * forecast.exposed_seconds:.2f}",
            f"{forecast.efficiency:.1%}",
            f"{forecast.images_per_second:,.0f}",
            duration(forecast.seconds_to_target),
            *(duration(seconds) for seconds in forecast.interval),
            f"{forecast.gpu_hours:,.1f}",
            forecast.limit,
            style="bold" if id(forecast) in best else None,
        )
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    console.print(table)
    for note in dict.fromkeys(note for forecast in found for note in forecast.notes):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _published(flags: PublishedFlags) -> int:
    found = published.rows()
    print(published.table(found), file=sys.stderr)
    if flags.json:
        rows = [asdict(row) | {"error": row.error, "holds": row.holds} for row in found]
        print(json.dumps({"rows": rows}), flush=True)
    return DONE


def _help() -> int:
    print(
        "usage: megabatch plan RECIPE [OPTIONS]\n       megabatch plan published|today\n\nrecipes:"
    )
    print(f"  {', '.join(recipes.RECIPES)}\n\nmachines:\n  {', '.join(MACHINES)}")
    print("\nmegabatch plan RECIPE --help lists the options.")
    return DONE
