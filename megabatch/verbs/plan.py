"""megabatch plan RECIPE --machine M --gpus N,N: step time, efficiency, time and money beforehand.

`megabatch plan published` replays published results, `megabatch plan today` prints the table of
docs/todays-gpus.md. No torch: it answers in under a second.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from megabatch import recipes
from megabatch.config import Config
from megabatch.errors import DONE, UserError
from megabatch.planner import published, workload
from megabatch.planner.bundled import MACHINES
from megabatch.planner.machine import Machine
from megabatch.planner.machine_file import load
from megabatch.planner.nets import BUILDERS
from megabatch.planner.run import Forecast, Job
from megabatch.planner.search import (
    Alternatives,
    advice,
    as_configured,
    candidates,
    compare,
    enough,
    hybrid_of,
    wire_of,
)
from megabatch.planner.settings import HYBRID_PLAN
from megabatch.report import tables
from megabatch.report.plain import best_by_gpus, text
from megabatch.verbs.examples import show_examples
from megabatch.verbs.parsing import parse
from megabatch.verbs.sizing import check_keeping, recipe_named


def _optional(metavar: str) -> Any:
    """A flag whose help says what it is left out for."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class HybridFlags:
    small: Annotated[str | None, _optional("NAME")] = None
    """how plan hybrid sums small buckets (none: as the recipe says)"""
    large: Annotated[str | None, _optional("NAME")] = None
    """how plan hybrid sums those above the threshold"""
    threshold_mb: Annotated[float | None, _optional("MB")] = None
    """the largest small one, in megabytes on the wire"""


@dataclass(frozen=True)
class PlanFlags:
    machine: Annotated[str, _optional("NAME")] = "dgx-h100"
    """a bundled machine, or the path of a machine.json"""
    gpus: Annotated[str | None, _optional("N,N")] = None
    """numbers of GPUs, with commas between them (none: 8,64,512)"""
    plan: Annotated[str | None, _optional("NAME")] = None
    """only this all-reduce, or hybrid (none: all are tried, hybrid if the recipe has it)"""
    grid: Annotated[tuple[int, int] | None, _optional("Y X")] = None
    """only this grid, rows and columns"""
    bucket_mb: Annotated[float | None, _optional("MB")] = None
    """only this bucket size, in megabytes of fp32 gradients"""
    wire: Annotated[str | None, _optional("NAME")] = None
    """gradients travel as fp32 or fp16 (none: as the recipe says)"""
    hybrid: HybridFlags = field(default_factory=HybridFlags)
    micro: Annotated[int | None, _optional("N")] = None
    """at most so many images in one pass (none: as many as fit)"""
    compare: Annotated[Alternatives, _optional("WHAT")] = "plans"
    """plans, grids, buckets or wire, as the rows of the table"""
    target_seconds: Annotated[float | None, _optional("S")] = None
    """find the fewest nodes that end the run within so long; and the cheapest"""
    batch: Annotated[int | None, _optional("N")] = None
    """another global batch; the stages keep their multiples of it"""
    epochs: Annotated[float | None, _optional("N")] = None
    """another length of the run"""
    keep_epochs: bool = False
    """keep the length, where a recipe's length follows --batch"""
    workload: Annotated[str | None, _optional("NAME")] = None
    """another model, vgg16 say; or the JSON that megabatch bench step --export writes"""
    price: Annotated[float | None, _optional("USD")] = None
    """dollars for a GPU and an hour (none: as the machine says)"""
    watts: Annotated[float | None, _optional("W")] = None
    """of a GPU with its share of the node (none: as the machine says)"""
    html: Annotated[str | None, _optional("FILE")] = None
    """write timelines and scaling curves to this page"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


@dataclass(frozen=True)
class PublishedFlags:
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    name = recipe_named("plan", arguments, "a config.json, published or today")
    if name is None:
        return _help()
    if arguments == ["today"]:
        print(tables.today())
        return DONE
    if name == "published":
        return _published(parse(PublishedFlags, "plan published", arguments[1:]))
    flags = parse(PlanFlags, f"plan {name}", arguments[1:])
    config = _parted(_config(name, flags), flags)
    model = (
        workload.load(flags.workload)
        if flags.workload is not None
        else workload.workload_of(config)
    )
    machine = _machine(flags)
    own: list[Forecast] = []
    if flags.target_seconds is not None:
        found, remarks = _in_time(config, machine, model, flags, flags.target_seconds)
    else:
        found, remarks, own = _compared(config, machine, model, flags)
    title = f"{config.name}, {model.name} on {machine.name}"
    settings, doubted = config.in_words(), recipes.doubts(name, config)
    print(text(found, title, flags.compare, remarks, own, settings, doubted))
    result: dict[str, Any] = {
        "recipe": config.name,
        "machine": flags.machine,
        "settings": settings,
        "doubts": doubted,
        "rows": [forecast.row() for forecast in found],
        "best": [forecast.row() for forecast in best_by_gpus(found)],
        "as_configured": [forecast.row() for forecast in own],
        "advice": remarks,
    }
    if flags.html:
        from megabatch.report.plan import plan_page

        try:
            Path(flags.html).write_text(plan_page(config.name, found, remarks))
        except OSError as error:
            raise UserError(f"{flags.html} cannot be written: {error.strerror}") from None
        result["html"] = flags.html
    if flags.json:
        print(json.dumps(result), flush=True)
    return DONE


def _config(name: str, flags: PlanFlags) -> Config:
    epochs, batch = flags.epochs, flags.batch
    if epochs is not None and not 0 < epochs < float("inf"):
        raise UserError(f"--epochs is {epochs:g}; give a length above 0")
    if batch is not None and batch < 1:
        raise UserError(f"--batch is {batch}; give at least 1 image")
    check_keeping(name, flags.keep_epochs)
    return recipes.named(name, epochs, batch, keep_epochs=flags.keep_epochs)


def _parted(config: Config, flags: PlanFlags) -> Config:
    """With the hybrid that the flags ask for."""
    given = {name: value for name, value in vars(flags.hybrid).items() if value is not None}
    if given and hybrid_of(config, flags.plan) is None:
        raise UserError(f"{config.name} has no hybrid plan to change: add --plan hybrid")
    if given and flags.plan not in (None, HYBRID_PLAN):
        raise UserError(f"--plan {flags.plan} is no hybrid: leave the --hybrid flags away")
    return replace(config, hybrid=replace(config.hybrid, **given)) if given else config


def _machine(flags: PlanFlags) -> Machine:
    machine = load(flags.machine)
    if flags.micro is not None:
        if flags.micro < 1:
            raise UserError(f"--micro is {flags.micro}; a pass has at least 1 image")
        machine = replace(machine, largest_micro=flags.micro)
    for flag, value in (("--price", flags.price), ("--watts", flags.watts)):
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{flag} is {value:g}; give a number from 0 on")
    if flags.price is not None:
        machine = replace(machine, price_per_gpu_hour=flags.price)
    if flags.watts is not None:
        machine = replace(machine, watts_per_gpu=flags.watts)
    return machine


def _in_time(
    config: Config, machine: Machine, model: workload.Workload, flags: PlanFlags, seconds: float
) -> tuple[list[Forecast], list[str]]:
    for flag, given in (
        ("--gpus", flags.gpus is not None),
        ("--grid", flags.grid is not None),
        ("--compare", flags.compare != "plans"),
    ):
        if given:
            raise UserError(f"--target-seconds finds the number of GPUs: leave {flag} away")
    found = enough(
        config,
        machine,
        seconds,
        plan=flags.plan,
        bucket_mb=flags.bucket_mb,
        wire=flags.wire,
        workload=model,
    )
    if found.cheapest.gpus == found.fewest.gpus:
        return [found.fewest], [f"{found.fewest.gpus:,} GPUs are the fewest and the cheapest"]
    remarks = [f"{found.fewest.gpus:,} GPUs are the fewest, {found.cheapest.gpus:,} the cheapest"]
    return [found.fewest, found.cheapest], remarks


def _compared(
    config: Config, machine: Machine, model: workload.Workload, flags: PlanFlags
) -> tuple[list[Forecast], list[str], list[Forecast]]:
    """The forecasts, what is to be said about the numbers of GPUs, and what the recipe does as it
    is."""
    wire = flags.wire or wire_of(config)
    found: list[Forecast] = []
    own: list[Forecast] = []
    remarks: list[str] = []
    all_open = flags.plan is None and flags.grid is None and flags.compare == "plans"
    for gpus in _numbers(flags.gpus if flags.gpus is not None else "8,64,512"):
        job = Job.of(config, machine, gpus, model)
        choices = candidates(
            gpus,
            plan=flags.plan,
            grid=flags.grid,
            bucket_mb=flags.bucket_mb,
            wire=wire,
            hybrid=hybrid_of(config, flags.plan),
        )
        here = compare(job, flags.compare, choices)
        found += here
        if all_open:
            remarks += advice(job, best_by_gpus(here)[0], wire)
        if all_open and flags.bucket_mb is None and flags.wire is None and gpus > 1:
            setting = as_configured(job)
            own += [] if setting is None else [job.forecast(setting)]
    return found, remarks, own


def _numbers(words: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(word) for word in words.split(",")))
    except ValueError:
        raise UserError(f"--gpus is {words!r}: give numbers with commas, 64,256 say") from None


def _published(flags: PublishedFlags) -> int:
    found = published.rows()
    print(tables.published(found))
    if flags.json:
        rows = [asdict(row) | {"error": row.error, "holds": row.holds} for row in found]
        print(json.dumps({"rows": rows}), flush=True)
    return DONE


def _help() -> int:
    show_examples("plan")
    print("usage: megabatch plan RECIPE [OPTIONS]\n       megabatch plan published|today\n")
    for title, names in (
        ("recipes", recipes.RECIPES),
        ("machines (--machine)", MACHINES),
        ("models (--workload)", BUILDERS),
    ):
        listed = f"{title}: {', '.join(names)}"
        print(textwrap.fill(listed, 80, subsequent_indent="  ", break_on_hyphens=False) + "\n")
    print("megabatch plan RECIPE --help lists the options.")
    return DONE
