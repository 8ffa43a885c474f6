"""megabatch study RECIPE --batches N,N,N: accuracy against batch size, over seeds and arms."""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.elastic.supervisor import Losses
from megabatch.elastic.worlds import Passage, in_worlds, join_others
from megabatch.errors import DONE, FAILED, STOPPED, UserError, nearest
from megabatch.recipes.by_batch import fitted
from megabatch.study.arms import ARMS
from megabatch.study.trials import RECIPE, StudyPlan
from megabatch.verbs.before import (
    check_beginnings,
    check_not_own,
    check_study,
    check_workers_here,
)
from megabatch.verbs.examples import show_examples
from megabatch.verbs.help import WIDE, show_help
from megabatch.verbs.parsing import flags_of, parse, parse_some
from megabatch.verbs.sizing import doubts, recipe_named, sized
from megabatch.verbs.sums import check_sums
from megabatch.verbs.workers import how_many, on_workers, started_here
from megabatch.verbs.writing import say, say_result, write_out
from megabatch.workers.place import under_launcher

_WITHOUT_GPU = 2
"""workers of a machine that has none"""
_LONGEST_NAME = 100
"""of an arm, whose runs' folders are called by it"""


@dataclass(frozen=True)
class SweepFlags:
    # Which runs a study has, and where they go.

    batches: Annotated[str, tyro.conf.arg(metavar="N,N,N")] = ""
    """global batches, with commas between them; the smallest is the baseline"""
    seeds: int = 1
    """runs of each, from seeds that follow each other"""
    arms: tuple[str, ...] = ()
    """what to switch, one thing at a time: names, or NAME='FLAGS'"""
    arm_batches: Annotated[str, tyro.conf.arg(metavar="N,N")] = ""
    """batches that the arms run at (none: all)"""
    rates: Annotated[str, tyro.conf.arg(metavar="X,X")] = ""
    """multiples of the rate to choose among at each batch: by held-out training images, never the
    validation images"""
    probe: bool = False
    """first a short run, which forecasts where scaling ends: by its gradient noise scale"""
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """the study's folder (none: runs/study-NAME); run again, it grows and nothing is run twice"""
    workers: int | None = None
    """local workers (none: one a GPU, or two without a GPU)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the workers compute"""
    keep_epochs: bool = False
    """keep the length, where it follows the batch"""
    retry: bool = False
    """run again what failed before"""
    max_restarts: int = 3
    """losses of local workers that the study survives (killed, stopped): new ones take their place,
    and the run that was under way goes on from its checkpoint"""
    keep_checkpoints: bool = False
    """keep the weights of finished runs"""
    verbose: bool = False
    """show what each run says"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


@dataclass(frozen=True)
class StudyFlags:
    sweep: Annotated[SweepFlags, tyro.conf.arg(name="")]
    config: Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Given:
    """What is looked at before the recipe is known."""

    epochs: float | None = None
    micro: int | None = None
    save_every: float | None = None


def run(arguments: list[str]) -> int:
    recipe = recipe_named("study", arguments, "or the config.json of a run")
    if recipe is None:
        return _help("--help-all" in arguments)
    if {"-h", "--help"} & {*arguments}:
        also = "and those of megabatch train RECIPE --help; --help-all has them all"
        show_help(SweepFlags, f"study {recipe}", usage="--batches N,N,N", also=also)
        return DONE
    plan, flags = read_flags(recipe, arguments[1:])
    if not under_launcher():
        own = [config for (arm, _), config in plan.configs.items() if arm == RECIPE]
        for sentence in dict.fromkeys(each for config in own for each in doubts(recipe, config)):
            say(sentence, progress=True)
    name = next(iter(plan.configs.values())).name
    out = flags.out or f"runs/study-{name}"
    if (Path(out) / "config.json").exists():
        raise UserError(f"{out} is the folder of a run: name another --out for the study")
    if started_here(flags.workers):
        config = next(iter(plan.configs.values()))
        count = how_many(flags.workers, flags.device, _WITHOUT_GPU)
        check_workers_here(config, (count,), flags.device)
        check_beginnings(config)
        check_study(plan, Path(out))
        _check_other_batches(recipe, arguments[1:], plan, Path(out))
    how, call = (flags.workers, flags.device, _WITHOUT_GPU), (plan, out, flags)
    patience = min(config.patience or math.inf for config in plan.configs.values())
    losses = Losses(flags.max_restarts, silent_seconds=patience)
    first, ended = on_workers(*how, study_here, *call, stops=True, losses=losses)
    if not first:
        return STOPPED if ended == "stopped" else DONE
    return _tell(Path(out), ended, flags)


def study_here(plan: StudyPlan, out: str, flags: SweepFlags) -> tuple[bool, str]:
    """The work of one worker: whether it is the first, and how the study ended."""
    from megabatch.runs.progress import say, to_people
    from megabatch.study.sweep import StudyProgress, study

    progress = StudyProgress()

    def run(cluster: Cluster, passage: Passage[Any]) -> tuple[bool, str]:
        console = to_people(not cluster.first)
        return cluster.first, study(
            plan,
            Path(out),
            cluster,
            lambda words: say(console, words),
            retry=flags.retry and not passage.again,
            keep_checkpoints=flags.keep_checkpoints,
            verbose=flags.verbose,
            progress=progress,
        )

    cluster = join_others(None, flags.device)
    try:
        return in_worlds(cluster, run)
    finally:
        cluster.leave()


# --- what is asked for -------------------------------------------------------------------------


# Flags of train that would be ignored, or would make runs that cannot be compared.
_FIXED = "a study compares fixed batches: leave {} away, or take the arm {}"
_NOT_HERE = {
    "--batch": "a study has several batches: give --batches 256,1024, say",
    "--stages": _FIXED.format("--stages", "grow, or one of your own, NAME='--stages 8:512'"),
    "--noise.follow": _FIXED.format("--noise.follow", "follow_noise"),
    "--keep": "a study has no use for --keep: --keep-checkpoints keeps the weights of its runs",
    "--keep-best": "a study compares last accuracies: leave --keep-best away; --keep-checkpoints "
    "keeps the last weights",
    "--resume": "a study goes on by itself: give the same command again, without --resume",
    "--grid": "a study's workers stand in a row a host: leave --grid away",
}


_JUDGED = "arms are judged by the images that the recipe is judged by: give {} to the study"
_NOT_IN_ARMS = {
    **{
        flag: f"{flag} is for a whole study: give it outside its arms"
        for flag in flags_of(SweepFlags)
    },
    "--batch": "arms run at the study's batches: give --batches and --arm-batches",
    "--seed": "every arm is run from the study's seeds: give --seed to the study",
    "--data.tuning-share": _JUDGED.format("--data.tuning-share"),
    "--data.val-share": _JUDGED.format("--data.val-share"),
    "--keep": _NOT_HERE["--keep"],
    "--keep-best": _NOT_HERE["--keep-best"],
}


def read_flags(name: str, arguments: list[str]) -> tuple[StudyPlan, SweepFlags]:
    """The runs that `megabatch study NAME ...` asks for."""
    words = f"study {name}"
    _refuse(arguments, _NOT_HERE)
    given = parse_some(Given, words, arguments)
    default = StudyFlags(SweepFlags(), sized(name, words, arguments))
    flags = parse(StudyFlags, words, arguments, default, usage="--batches N,N,N").sweep
    batches = _batches(flags.batches, "batches")
    if not batches:
        raise UserError("study needs batches: --batches 256,1024,4096, say")
    arm_batches = _batches(flags.arm_batches, "arm-batches") or batches
    if flags.arm_batches and not flags.arms:
        raise UserError("--arm-batches is for arms: name some with --arms")
    if alone := [batch for batch in arm_batches if batch not in batches]:
        raise UserError(
            f"--arm-batches has {alone[0]}, which --batches has not: nothing to compare"
        )
    if flags.max_restarts < 0:
        raise UserError(f"--max-restarts is {flags.max_restarts}; give 0 or more")
    if not 1 <= flags.seeds <= 1000:
        raise UserError(f"--seeds is {flags.seeds}; give 1 to 1000")
    at_batch = {
        batch: _at_batch(name, batch, words, arguments, given)
        for batch in sorted({*batches, *arm_batches})
    }
    configs = {(RECIPE, batch): at_batch[batch].check() for batch in batches}
    for config in configs.values():
        check_not_own(config)
        check_sums(config, words, arguments)
    rates = tuple(_rates(flags.rates))
    if rates and configs[RECIPE, batches[0]].data.tuning_share:
        raise UserError(
            "--rates holds training images out by itself, and the runs train on all of them: leave "
            "--data.tuning-share away"
        )
    names = [arm.partition("=")[0] for arm in flags.arms]
    if twice := [arm for arm in names if names.count(arm) > 1]:
        raise UserError(f"--arms has {twice[0]} twice: name each arm once")
    given_rates = set[str]()
    for arm in flags.arms:
        changed, by_hand = _arm(arm, {batch: at_batch[batch] for batch in arm_batches}, words)
        configs |= changed
        given_rates |= {name for name, _ in changed if by_hand}
    seed = configs[RECIPE, batches[0]].seed
    plan = StudyPlan(
        configs=configs,
        seeds=range(seed, seed + flags.seeds),
        rates=rates,
        own_rates=frozenset(name for name, arm in ARMS.items() if arm.own_rate),
        given_rates=frozenset(given_rates),
        probe=flags.probe,
        flags={name: own for name, made, own in (a.partition("=") for a in flags.arms) if made},
    )
    return plan, flags


def _at_batch(name: str, batch: int, words: str, arguments: list[str], given: Given) -> Config:
    """The recipe at a batch, with what the command line changes."""
    recipe = sized(name, words, arguments, batch)
    # A study holds fixed batches against each other by their last accuracies; batch-size control is
    # an arm, and runs that end at a target would all end alike.
    recipe = replace(recipe, stages=(), target_accuracy=None)
    if given.micro is not None and given.micro > batch:  # of the larger ones, at most
        arguments = [*arguments, "--micro", str(batch)]
    config = _changed(recipe, words, arguments)
    if given.micro is None:
        config = fitted(config)
    if given.save_every is None:  # weights are large, and a study has many runs
        config = replace(config, save_every=config.epochs / 3)
    return replace(config, keep=1)


def _check_other_batches(name: str, arguments: list[str], plan: StudyPlan, out: Path) -> None:
    """What lies there at batches that are not asked for now must be of the same recipe too, but for
    rate and optimizer, which may go with the batch, and the passes it was made of."""
    from megabatch.study.results import read

    words, given = f"study {name}", parse_some(Given, f"study {name}", arguments)
    for cell in read(out).cells:
        if cell.arm != RECIPE or (RECIPE, cell.batch) in plan.configs:
            continue
        asked = _at_batch(name, cell.batch, words, arguments, given)
        for run in cell.runs:
            if (lies := run.config) is None:
                continue
            free = {
                part: getattr(lies, part) for part in ("seed", "lr", "optimizer", "micro", "span")
            }
            if difference := lies.resume_difference(replace(asked, **free)):
                raise UserError(
                    f"{out / run.run.name} was begun with {difference}, and a study compares runs "
                    f"of one recipe: give the same settings, or name another --out"
                )


def _changed(config: Config, words: str, arguments: list[str]) -> Config:
    """A config with what the flags of `megabatch WORDS ...` say otherwise."""
    return parse(StudyFlags, words, arguments, StudyFlags(SweepFlags(), config)).config


def _arm(
    arm: str, at_batch: dict[int, Config], words: str
) -> tuple[dict[tuple[str, int], Config], bool]:
    """The configs of an arm by its name and batch, and whether its rate is given by hand."""
    name, made, _ = arm.partition("=")
    changes = _own_changes(arm) if made else []
    if not made and name not in ARMS:
        raise UserError(f"there is no arm {name!r}: {nearest(name, ARMS)}")
    epochs = parse_some(Given, words, changes).epochs
    found = {}
    for batch, config in at_batch.items():
        try:
            resized = config.resized(epochs=epochs)
            arms = _changed(resized, words, changes) if made else ARMS[name].change(config)
            if made:
                check_sums(arms, words, changes)
            if (arms := fitted(arms)) != config:
                found[name, batch] = arms.check()
        except UserError as error:
            elsewhere = " (--arm-batches names those that arms run at)" * (len(at_batch) > 1)
            raise UserError(f"the arm {name} at {batch:,}: {error}{elsewhere}") from None
    if not found:
        raise UserError(f"the arm {name} changes nothing of this recipe: leave it away")
    return found, any(word.startswith(("--lr.reference", "--lr.per")) for word in changes)


def _own_changes(arm: str) -> list[str]:
    """The flags of NAME=FLAGS."""
    name, _, flags = arm.partition("=")
    if not _is_name(name) or len(name) > _LONGEST_NAME or name in (RECIPE, *ARMS):
        raise UserError(
            f"an arm of your own is NAME=FLAGS, its name of letters, digits and _, at most "
            f"{_LONGEST_NAME} of them, and no other arm's: not {arm!r}"
        )
    try:
        changes = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"the flags of the arm {arm!r} cannot be read: {error}") from None
    _refuse(changes, _NOT_IN_ARMS)
    return changes


def _refuse(arguments: list[str], why: dict[str, str]) -> None:
    for word in arguments:
        if (flag := word.partition("=")[0].replace("_", "-")) in why:
            raise UserError(why[flag])


def _is_name(arm: str) -> bool:
    return arm.replace("_", "").replace(".", "").isalnum()


def _batches(words: str, flag: str) -> list[int]:
    try:
        found = sorted({int(word) for word in words.split(",") if word.strip()})
    except ValueError:
        raise UserError(f"--{flag} is {words!r}: give whole numbers with commas between") from None
    if found and found[0] < 1:
        raise UserError(f"--{flag} has {found[0]}: a batch has at least one image")
    return found


def _rates(words: str) -> list[float]:
    try:
        found = sorted({float(word) for word in words.split(",") if word.strip()})
    except ValueError:
        raise UserError(f"--rates is {words!r}: give multiples of the rate, 0.5,1,2 say") from None
    if found and not 0 < found[0] <= found[-1] < 1e6:
        raise UserError(f"--rates is {words!r}: give multiples above 0")
    return found


# --- what came of it ---------------------------------------------------------------------------


def _tell(out: Path, ended: str, flags: SweepFlags) -> int:
    from megabatch.report.figure import arm_figure, error_figure
    from megabatch.report.study import study_page
    from megabatch.report.study_rows import table_lines
    from megabatch.study.reading import reading
    from megabatch.study.results import known, read

    study = read(out)
    rows = list(study.rows())
    for line in table_lines(rows):
        say(line)
    page, conclusion = out / "report.html", reading(study)
    failed = sum(len(row["failed"]) for row in rows)
    result = {
        "out": str(out),
        "ended": ended,
        "report": str(page),
        "reading": conclusion,
        "rows": rows,
        "rates": [
            {"arm": run.arm, "batch": run.batch, "rate": known(run.rate), "times": run.factor}
            for run in study.chosen()
        ],
        "forecast": known(study.noise_scale),
    }
    try:
        write_out(page, study_page(study).encode(errors="replace"))
        recipe = next((r.run.config.get("name") for c in study.cells for r in c.runs), None)
        title = f"{recipe or 'study'}: top-1 error against batch size"
        if figure := error_figure(study, title):
            write_out(out / "error.svg", figure.encode(errors="replace"))
        for cell in study.cells:
            title = f"{recipe or 'study'} at {cell.batch:,}: top-1 with the arm {cell.arm}"
            drawn = arm_figure(study, cell.arm, cell.batch, title)
            if drawn and _is_name(cell.arm):
                write_out(out / f"{cell.batch}-{cell.arm}.svg", drawn.encode(errors="replace"))
        say_result(conclusion)
        say_result(f"{page}")
        written = {"command": sys.argv, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **result}
        write_out(out / "study.json", (json.dumps(written, indent=2) + "\n").encode())
    finally:  # what was found, where a page of it cannot be written too
        if flags.json:
            print(json.dumps(result), flush=True)
    if ended == "stopped":
        say("stopped on request: the same command goes on", progress=True)
        return STOPPED
    return FAILED if failed else DONE


def _help(full: bool) -> int:
    show_examples("study")
    print("usage: megabatch study RECIPE|RUN/config.json --batches N,N,N [OPTIONS]\n")
    print("arms (--arms NAME ..., or NAME='--flag value' for any flags of train):")
    if full:
        for name, arm in ARMS.items():
            print(textwrap.fill(f"  {name:15} {arm.says}", WIDE, subsequent_indent=" " * 18))
    else:
        print(textwrap.indent(textwrap.fill(", ".join(ARMS), WIDE - 2), "  "))
        print("\nmegabatch study --help-all says what each of them switches.")
    print("megabatch study RECIPE --help lists the options.")
    return DONE
