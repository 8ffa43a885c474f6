"""megabatch study RECIPE --batches N,N,N: accuracy against batch size, over seeds and arms."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megabatch import recipes
from megabatch.cluster import Cluster, under_launcher
from megabatch.config import Config
from megabatch.errors import DONE, FAILED, STOPPED, UserError, nearest
from megabatch.stopping import keep_stop_requests
from megabatch.study.arms import ARMS
from megabatch.study.trials import RECIPE, Trial, fitted, trials
from megabatch.verbs.examples import show_examples
from megabatch.verbs.parsing import parse, parse_some
from megabatch.verbs.workers import on_workers


@dataclass(frozen=True)
class Sweep:
    """Which runs a study has, and where they go."""

    batches: str = ""
    """global batches, with commas between them; the smallest is the baseline"""
    seeds: int = 1
    """runs of each, from seeds that follow each other"""
    arms: tuple[str, ...] = ()
    """what to switch, one thing at a time, beside the recipe itself: names, or NAME=FLAGS"""
    arm_batches: str = ""
    """batches that the arms run at (none: all)"""
    out: str | None = None
    """the study's folder (None: runs/study-NAME); run again, it grows and nothing is run twice"""
    workers: int | None = None
    """local workers (None: one a GPU, or one without a GPU)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the workers compute"""
    retry: bool = False
    """run again what failed before"""
    keep_checkpoints: bool = False
    """keep the weights of finished runs"""
    verbose: bool = False
    """show what each run says"""
    json: bool = False
    """the last line on standard output is the result as one JSON object"""


@dataclass(frozen=True)
class StudyFlags:
    sweep: Annotated[Sweep, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Length:
    epochs: float | None = None


@dataclass(frozen=True)
class Given:
    """What the command line must not say, or must say for it to be kept."""

    batch: int | None = None
    micro: int | None = None
    save_every: float | None = None


def run(arguments: list[str]) -> int:
    with contextlib.nullcontext() if under_launcher() else keep_stop_requests():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if "-h" in arguments or "--help" in arguments:
            return _help()
        known = ", ".join(recipes.RECIPES)
        raise UserError(f"study needs a recipe: one of {known}, or the config.json of a run")
    planned, sweep = read_flags(arguments[0], arguments[1:])
    out = sweep.out or f"runs/study-{planned[0].config.name}"
    call = (planned, out, sweep)
    first, ended = on_workers(sweep.workers, sweep.device, 1, study_here, *call, stops=True)
    if not first:
        return DONE
    from megabatch.study.results import read

    study = read(Path(out))
    rows = list(study.rows())
    _show(rows)
    failed = sum(len(row["failed"]) for row in rows)
    if sweep.json:
        print(json.dumps({"out": out, "ended": ended, "rows": rows}), flush=True)
    if ended == "stopped":
        return STOPPED
    return FAILED if failed else DONE


def study_here(planned: list[Trial], out: str, flags: Sweep) -> tuple[bool, str]:
    """The work of one worker: whether it is the first, and how the study ended."""
    from megabatch.runs.progress import say, to_people
    from megabatch.study.sweep import sweep

    cluster = Cluster.from_env(None, flags.device)
    console = to_people(not cluster.first)
    try:
        return cluster.first, sweep(
            planned,
            Path(out),
            cluster,
            lambda words: say(console, words),
            retry=flags.retry,
            keep_checkpoints=flags.keep_checkpoints,
            verbose=flags.verbose,
        )
    finally:
        cluster.leave()


def read_flags(name: str, arguments: list[str]) -> tuple[list[Trial], Sweep]:
    """The runs that `megabatch study NAME ...` asks for."""
    words = f"study {name}"
    given = parse_some(Given, words, arguments)
    if given.batch is not None:
        raise UserError("a study has several batches: give --batches 256,1024, say")
    epochs = parse_some(Length, words, arguments).epochs
    first = recipes.named(name, epochs)
    sweep = parse(StudyFlags, words, arguments, StudyFlags(Sweep(), first)).sweep
    batches = _numbers(sweep.batches, "batches")
    if not batches:
        raise UserError("study needs batches: --batches 256,1024,4096, say")
    arm_batches = _numbers(sweep.arm_batches, "arm-batches") or batches
    if not 1 <= sweep.seeds <= 1000:
        raise UserError(f"--seeds is {sweep.seeds}; give 1 to 1000")
    configs: dict[tuple[str, int], Config] = {}
    for batch in sorted({*batches, *arm_batches}):
        config = _at_batch(name, epochs, batch, words, arguments, given)
        if batch in batches:
            configs[RECIPE, batch] = config.check()
        for arm in sweep.arms if batch in arm_batches else ():
            configs[_arm_name(arm), batch] = _changed(arm, config, words).check()
    seed = next(iter(configs.values())).seed
    return trials(configs, range(seed, seed + sweep.seeds)), sweep


def _at_batch(
    name: str, epochs: float | None, batch: int, words: str, arguments: list[str], given: Given
) -> Config:
    """The recipe at a batch, with what the command line changes."""
    recipe = recipes.named(name, epochs, batch)
    # A study holds fixed batches against each other; batch-size control is an arm.
    recipe = replace(recipe, stages=())
    config = parse(StudyFlags, words, arguments, StudyFlags(Sweep(), recipe)).config
    if given.micro is None:
        config = fitted(config)
    if given.save_every is None:  # weights are large, and a study has many runs
        config = replace(config, save_every=config.epochs / 3)
    return replace(config, keep=1)


def _arm_name(arm: str) -> str:
    return arm.partition("=")[0]


def _changed(arm: str, config: Config, words: str) -> Config:
    name, made, flags = arm.partition("=")
    if made:
        if not name or not all(c.isalnum() or c in "_." for c in name) or name == RECIPE:
            raise UserError(f"an arm of your own is NAME=FLAGS, its name of letters: not {arm!r}")
        changed = parse(StudyFlags, words, flags.split(), StudyFlags(Sweep(), config)).config
    elif name not in ARMS:
        raise UserError(f"there is no arm {name!r}: {nearest(name, ARMS)}")
    else:
        changed = fitted(ARMS[name].change(config))
    if changed == config:
        raise UserError(
            f"the arm {name} changes nothing at a batch of {config.batch}: leave it away"
        )
    return changed


def _numbers(words: str, flag: str) -> list[int]:
    try:
        found = sorted({int(word) for word in words.split(",") if word.strip()})
    except ValueError:
        raise UserError(f"--{flag} is {words!r}: give whole numbers with commas between") from None
    if found and found[0] < 1:
        raise UserError(f"--{flag} has {found[0]}: a batch has at least one image")
    return found


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("arm", no_wrap=True)
    for head in ("batch", "seeds", "top-1", "less baseline", "less recipe", "epochs to it"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("steps", "images/s", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        seeds = f"{len(row['seeds'])}" + (f" ({len(row['failed'])} failed)" * bool(row["failed"]))
        table.add_row(
            row["arm"],
            f"{row['batch']:,}",
            seeds,
            _spread(row["top1"], row["top1_half"], ".2f"),
            _spread(row["less_baseline"], row["less_baseline_half"], "+.2f"),
            ""
            if row["arm"] == RECIPE
            else _spread(row["less_recipe"], row["less_recipe_half"], "+.2f"),
            _spread(row["epochs_to_baseline"], None, ".1f"),
            _spread(row["steps"], None, ",.0f"),
            _spread(row["images_per_second"], None, ",.0f"),
            _spread(row["seconds"], None, ",.1f"),
        )
    console = Console()
    console.print(table) if console.is_terminal else Console(width=400).print(table)


def _spread(value: float | None, half: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:{form}}" + (f" ± {half:.2f}" if half is not None else "")


def _help() -> int:
    show_examples("study")
    print("usage: megabatch study RECIPE|RUN/config.json --batches N,N,N [OPTIONS]\n")
    print("arms (--arms NAME ..., or NAME='--flag value' for any flags of train):")
    for name, arm in ARMS.items():
        print(f"  {name:18} {arm.says}")
    print("\nmegabatch study RECIPE --help lists the options with the recipe's values.")
    return DONE
