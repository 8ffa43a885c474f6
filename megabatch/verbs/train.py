"""megabatch train RECIPE|RUN/config.json: on local workers, or as one worker of a launcher's."""

from __future__ import annotations

import json
import math
import os
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megabatch import models, recipes
from megabatch.config import Config
from megabatch.elastic.supervisor import Losses
from megabatch.elastic.worlds import join_others
from megabatch.errors import DONE, STOPPED, UserError
from megabatch.runs.loggers import finite
from megabatch.runs.record import is_run
from megabatch.verbs.before import (
    check_beginnings,
    check_not_own,
    check_run_folder,
    check_workers_here,
)
from megabatch.verbs.brief import show_brief
from megabatch.verbs.examples import show_examples
from megabatch.verbs.help import ASKED, WIDE
from megabatch.verbs.parsing import parse
from megabatch.verbs.sizing import doubts, recipe_named, sized
from megabatch.verbs.sums import check_sums
from megabatch.verbs.workers import (
    MOST_WORKERS,
    check_workers,
    how_many,
    on_workers,
    started_here,
)
from megabatch.verbs.writing import say, say_result
from megabatch.workers.place import place_by, under_launcher

_WITHOUT_GPU = 4
"""workers of a machine that has none"""


@dataclass(frozen=True)
class Launch:
    """How a run is started; what shapes its result is the config's."""

    workers: str | None = None
    """local workers, a number or one a batch stage: 2,4, the last for all later stages (none: one a
    GPU, or four without a GPU; under a launcher: the launcher's)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the workers compute"""
    grid: tuple[int, int] | None = None
    """rows and columns of workers for plans on a grid (none: a row a host)"""
    out: str | None = None
    """the run's folder (none: runs/NAME-DATE)"""
    resume: bool = False
    """go on from the newest checkpoint in --out; from the beginning if there is none yet"""
    keep_epochs: bool = False
    """keep the length, where a recipe's length follows --batch"""
    max_restarts: int = 3
    """losses of local workers (killed, stopped) that the run survives: new ones take their place"""
    min_workers: int | None = None
    """go on with this many when no more are replaced (none: end)"""
    log_mlperf: bool = False
    """also write the run's mlperf.log, which MLPerf's checker reads (open division)"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


@dataclass(frozen=True)
class TrainFlags:
    launch: Annotated[Launch, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


def run(arguments: list[str]) -> int:
    name = recipe_named("train", arguments, "or the config.json of a run")
    if name is None:
        return _help("--help-all" in arguments)
    if {"-h", "--help"} & {*arguments}:
        show_brief(f"train {name}", Launch(), _asked_about(name, arguments[1:]))
        return DONE
    config, launch = read_flags(name, arguments[1:])
    if launch.resume and launch.out is None:
        raise UserError("--resume needs --out: name the folder of the run that is to go on")
    if not under_launcher():
        for sentence in doubts(name, config):
            say(sentence, progress=True)
    out = launch.out or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    call = (config, launch.device, launch.grid, out, launch.resume, launch.log_mlperf)
    workers = _workers_of(launch, config)
    if started_here(launch.workers):
        counts = workers or (how_many(None, launch.device, _WITHOUT_GPU),)
        check_workers_here(config, counts, launch.device, launch.grid)
        check_beginnings(config)
        check_run_folder(config, Path(out), launch.resume)
        if launch.resume and not is_run(Path(out)):  # a slip in its name would begin another
            say(f"there is no run in {out} to go on with: it begins there", progress=True)
    first, summary = on_workers(
        workers[0] if workers else None,
        launch.device,
        _WITHOUT_GPU,
        train_here,
        *call,
        stops=True,
        losses=_losses(launch, workers, config),
        by_stage=workers if len(set(workers)) > 1 else (),
    )
    if first:
        _say(summary)
        if launch.json:
            print(json.dumps(finite(summary)), flush=True)
    return STOPPED if summary["ended"] == "stopped" else DONE


def _asked_about(name: str, arguments: list[str]) -> Config:
    """The recipe at the length and batch that stand beside --help; as it is, where they cannot be
    read: who asks for help may not know them yet."""
    try:
        return sized(name, f"train {name}", [word for word in arguments if word not in ASKED])
    except UserError:
        return recipes.named(name)


def _workers_of(launch: Launch, config: Config) -> tuple[int, ...]:
    """How many workers each batch stage has; the last number stands for those after it."""
    words, stages = launch.workers, len(config.all_stages)
    try:
        asked = () if words is None else tuple(int(word) for word in words.split(","))
    except ValueError:
        raise UserError(
            f"--workers is {words!r}: give a number, or one a batch stage with commas, 2,4 say"
        ) from None
    if len(asked) > stages:
        raise UserError(
            f"--workers is {words}, but the run has {stages} batch stage{'s' * (stages > 1)}: give "
            f"one number, or one a stage"
        )
    for workers in asked:
        check_workers(workers)
    return asked


def _losses(launch: Launch, workers: tuple[int, ...], config: Config) -> Losses:
    if launch.max_restarts < 0:
        raise UserError(f"--max-restarts is {launch.max_restarts}; give 0 or more")
    least, most = launch.min_workers, min(workers, default=MOST_WORKERS)
    if least is not None and not 1 <= least <= most:
        raise UserError(f"--min-workers is {least}; give 1 to {most}, the number of workers")
    return Losses(launch.max_restarts, least, config.patience or math.inf)


def train_here(
    config: Config,
    device: str,
    grid: tuple[int, int] | None,
    out: str,
    resume: bool,
    log_mlperf: bool = False,
) -> tuple[bool, dict[str, Any]]:
    """The work of one worker: whether it is the first, and the summary."""
    from megabatch.runs.mlperf import MLPerf
    from megabatch.training import train

    loggers = [MLPerf(Path(out) / "mlperf.log")] if log_mlperf else []
    cluster = join_others(grid, device)
    try:
        summary = train(config, cluster=cluster, out=out, resume=resume, loggers=loggers)
    finally:
        cluster.leave()
    # Who was first may have been lost.
    return place_by(os.environ).rank == 0, asdict(summary)


def read_flags(name: str, arguments: list[str]) -> tuple[Config, Launch]:
    """The config and the launch that `megabatch train NAME ...` asks for."""
    words = f"train {name}"
    # Another length or batch changes the whole recipe; what is given explicitly still wins.
    recipe = sized(name, words, arguments)
    flags = parse(TrainFlags, words, arguments, TrainFlags(Launch(), recipe))
    config = flags.config.check()
    check_sums(config, words, arguments)
    check_not_own(config)
    return config, flags.launch


def _say(summary: dict[str, Any]) -> None:
    how = {
        "finished": "finished",
        "target": "reached the target",
        "stopped": "stopped on request (--resume goes on)",
    }[summary["ended"]]
    found = "not evaluated yet"
    if not math.isnan(summary["loss"]) or summary["best_top1"] > 0:
        found = (
            f"top-1 {summary['top1']:.2%} (best {summary['best_top1']:.2%}, median of the last "
            f"five {summary['median_top1']:.2%})"
        )
    peak_share = summary["peak_share"]
    of_peak = "" if peak_share is None else f", {peak_share:.1%} of peak FLOP/s"
    say_result(
        f"{how}: {found}, {summary['steps']:,} step{'s' * (summary['steps'] != 1)}, "
        f"{summary['seen']:,} images in {summary['seconds']:.1f} s "
        f"({summary['images_per_second']:,.0f} images/s{of_peak}) "
        f"on {summary['world']} worker{'s' if summary['world'] > 1 else ''}; {summary['out']}"
    )


def _help(full: bool) -> int:
    show_examples("train")
    print("usage: megabatch train RECIPE|RUN/config.json [OPTIONS]\n\nrecipes:")
    for name, recipe in recipes.RECIPES.items():
        says = (recipe.__doc__ or "").strip().splitlines()[0].removesuffix(".")
        if not full:
            says = _clauses(says, WIDE - 22)
        row = f"  {name:19} {says}"
        print(textwrap.fill(row, WIDE, subsequent_indent=" " * 22, break_on_hyphens=False))
    named = ", ".join((*models.names(), "timm:NAME", "torchvision:NAME"))
    print(textwrap.fill(f"models: {named}", WIDE, subsequent_indent="  "))
    print("megabatch train RECIPE --help lists the options with the recipe's values.")
    return DONE


def _clauses(words: str, wide: int) -> str:
    """The first clauses of a sentence, as many as fit."""
    while len(words) > wide:
        words = words[: max(words.rfind(","), words.rfind(":"))]
    return words
