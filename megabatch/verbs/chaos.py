"""megabatch chaos RECIPE: kill, stop, starve and damage a real job; it must end as undisturbed."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from megabatch import recipes
from megabatch.chaos.faults import KINDS, schedule
from megabatch.chaos.job import TrainingJob, small_disk
from megabatch.chaos.rounds import Asked, Outcome, disturbed, undisturbed
from megabatch.config import Config
from megabatch.errors import DONE, FAILED, UserError, nearest
from megabatch.host.scratch import DISK, scratch
from megabatch.host.stopping import answering
from megabatch.verbs.before import check_not_own
from megabatch.verbs.help import show_help
from megabatch.verbs.parsing import parse
from megabatch.verbs.sizing import sized
from megabatch.verbs.workers import check_workers
from megabatch.verbs.writing import say

_PATIENCE_SECONDS = 5.0
_DISK_BYTES = 64 << 20


@dataclass(frozen=True)
class Chaos:
    """What is to happen; a recipe's own flags may follow, as for megabatch train. --seed is of the
    schedule and of the run."""

    rounds: int = 3
    """runs that something happens to"""
    round: int | None = None
    """of these rounds only this one, counted from 1"""
    faults: int = 3
    """in each round"""
    kinds: tuple[str, ...] = tuple(KINDS)
    """of faults"""
    workers: int = 3
    """local workers"""
    keep_runs: str | None = None
    """leave the runs' folders here (none: nothing is left)"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


@dataclass(frozen=True)
class ChaosFlags:
    chaos: Annotated[Chaos, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


def run(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments} or arguments == ["--help-all"]:
        show_help(Chaos, "chaos RECIPE")
        return DONE
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"chaos needs a recipe: one of {', '.join(recipes.RECIPES)}")
    chaos, config = _read_flags(arguments[0], arguments[1:])
    began = time.monotonic()
    place = Path(chaos.keep_runs) if chaos.keep_runs else scratch() / "chaos"
    if place.exists():
        raise UserError(f"{place} is there already: name a folder that is not")
    place.mkdir(parents=True)
    asked: list[int] = []
    # Whoever started a job and mounted a disk ends the one and lets go of the other.
    with answering(asked.append):
        try:
            with small_disk(scratch() / DISK, _DISK_BYTES) as disk:
                if disk is None:
                    say("no disk of its own (that needs root): a limit on files stands for one")
                outcomes = _rounds(chaos, config, place, disk, lambda: bool(asked))
        finally:
            if chaos.keep_runs is None:
                shutil.rmtree(place, ignore_errors=True)
    struck = sum((outcome.struck for outcome in outcomes), Counter[str]())
    equal = sum(outcome.equal for outcome in outcomes)
    result = {
        "rounds": len(outcomes),
        "faults": struck.total(),
        "equal": equal,
        "seconds": round(time.monotonic() - began, 1),
        "kinds": dict(sorted(struck.items())),
        "begun": sum(outcome.begun for outcome in outcomes),
        "workers": chaos.workers,
        "seed": config.seed,
    }
    say(
        f"{equal} of {len(outcomes)} rounds with {struck.total()} faults ended as if nothing had "
        f"happened, in {result['seconds']} s"
    )
    if chaos.json:
        print(json.dumps(result), flush=True)
    return DONE if equal == len(outcomes) else FAILED


def _read_flags(name: str, arguments: list[str]) -> tuple[Chaos, Config]:
    words = f"chaos {name}"
    # The same bits whatever happens, and workers that are not waited for too long.
    recipe = replace(sized(name, words, arguments), deterministic=True, patience=_PATIENCE_SECONDS)
    flags = parse(ChaosFlags, words, arguments, ChaosFlags(Chaos(), recipe))
    chaos, config = flags.chaos, flags.config.check()
    check_not_own(config)
    if not config.deterministic:
        raise UserError("weights are compared bit for bit: drop --no-deterministic")
    if not chaos.kinds:
        raise UserError(f"--kinds names none: give some of {', '.join(KINDS)}")
    if config.patience == 0 and "stop" in chaos.kinds:
        raise UserError("a stopped worker would be waited for for ever: give a --patience above 0")
    for kind in chaos.kinds:
        if kind not in KINDS:
            raise UserError(f"there is no kind of fault {kind!r}: {nearest(kind, KINDS)}")
    for what, value in (("rounds", chaos.rounds), ("faults", chaos.faults)):
        if not 1 <= value <= 10_000:
            raise UserError(f"--{what} is {value}; give 1 to 10,000")
    if chaos.round is not None and not 1 <= chaos.round <= chaos.rounds:
        raise UserError(f"--round is {chaos.round}; give 1 to {chaos.rounds}")
    check_workers(chaos.workers)
    return chaos, config


def _rounds(
    chaos: Chaos, config: Config, place: Path, disk: Path | None, stop: Asked
) -> list[Outcome]:
    written = place / "config.json"
    written.write_text(config.to_json())
    # Lost workers are replaced, as often as it takes and as soon as they are silent.
    flags = ["--workers", str(chaos.workers), "--device", "cpu", "--json"]
    flags += ["--max-restarts", "1000"]
    command = [sys.executable, "-m", "megabatch.cli", "train", str(written), *flags]
    workers = "1 worker" if chaos.workers == 1 else f"{chaos.workers} workers"
    say(f"the undisturbed run, on {workers}")
    runs = disk or place
    wanted = undisturbed(TrainingJob(command, runs / "whole"), stop)
    put_away(runs / "whole", place if chaos.keep_runs else None)
    outcomes = []
    for number in [chaos.round] if chaos.round else range(1, chaos.rounds + 1):
        faults = schedule(config.seed, number, chaos.faults, chaos.workers, chaos.kinds)
        planned = ", ".join(f"at {fault.at:.0%} {fault}" for _, fault in faults)
        say(f"round {number}: {planned}")
        out = runs / f"round-{number}"
        outcomes.append(disturbed(TrainingJob(command, out, disk), faults, wanted, say, stop))
        how = "equal" if outcomes[-1].equal else "NOT EQUAL"
        say(f"round {number}: {how}, begun {outcomes[-1].begun} times")
        put_away(out, place if chaos.keep_runs else None)
    return outcomes


def put_away(out: Path, kept: Path | None) -> None:
    """Make room for the next run; those that are kept leave the small disk, which goes."""
    if kept is not None and out.parent != kept:
        shutil.copytree(out, kept / out.name)
    if kept is None or out.parent != kept:
        shutil.rmtree(out, ignore_errors=True)
