"""Training: train(config) is the loop, read from top to bottom; evaluate scores what it left."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megabatch.batch import step_at
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import Loader
from megabatch.data.opening import open_sources
from megabatch.data.source import Source
from megabatch.elastic.worlds import Passage, in_worlds
from megabatch.ema import put_averages
from megabatch.errors import UserError
from megabatch.parts import assemble, prepared
from megabatch.planner.peak import share_of_peak
from megabatch.precision import full_dtype, halved
from megabatch.process import compute_settings
from megabatch.recompute import recompute_statistics
from megabatch.runs import checkpoint
from megabatch.runs.diagnosis import diagnosis, divergence
from megabatch.runs.folder import RunFolder, State
from megabatch.runs.listening import Logger, Theirs, check_loggers
from megabatch.runs.loggers import Log
from megabatch.runs.memory import Memory, copied
from megabatch.runs.progress import counted, counting, say, to_people
from megabatch.runs.verdict import Clock, Effort, Facts, idle_workers
from megabatch.step import DelayedNumbers, score, train_step
from megabatch.stopping import stop_requests
from megabatch.sync.control import StepNumbers
from megabatch.sync.replicas import Replicas

_MOST_SKIPPED = 20


@dataclass(frozen=True)
class Summary:
    """How a run ended. Accuracies and loss are of the last evaluation, but where it is said."""

    top1: float
    top5: float
    loss: float
    best_top1: float
    """of all evaluations, as You reports"""
    median_top1: float
    """of the last five evaluations, as Goyal reports (the median of their errors)"""
    steps: int
    seen: int
    epochs: float
    seconds: float
    images_per_second: float
    peak_share: float | None
    """of the chips' peak FLOP/s, that the net's multiplications and additions were; None where the
    chip or the net is not known"""
    world: int
    weights_sha256: str
    out: str | None
    ended: str
    """finished, target (accuracy reached) or stopped (on request, with a checkpoint)"""


def train(
    config: Config,
    model: nn.Module | None = None,
    data: Any = None,
    *,
    cluster: Cluster | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    quiet: bool = False,
    loggers: Sequence[Logger] = (),
    sources: tuple[Source, Source] | None = None,
) -> Summary:
    """Train as the config says; every worker of the cluster calls it.

    `model` is a module of your own. It is trained in place, and yours again afterwards, however the
    run ended: its own layers and modes (batch norm by spans and keyed dropout are put in for the
    run alone), no hooks, no gradients. Changed are its weights and moving averages, and where it
    lies: on the cluster's device, in fp32, or fp64 for precision fp64, channels last on a GPU.
    `data` is a map-style data set of (image, label), of which a share is held out by hash, or a
    pair (train, val). Without `out` nothing is written. `loggers` hear of the run on the first
    worker, and cannot change it. `sources` are the config's images as data.opening.open_sources
    opened them, for one run after another: they stay the caller's.
    """
    config = _checked(config, model, data)
    check_loggers(loggers)
    place = None if out is None else Path(out)
    # Of their failures a quiet run tells too: whoever gave them waits for what they write.
    theirs = [Theirs(one, functools.partial(say, to_people())) for one in loggers]

    def run(cluster: Cluster, passage: Passage[Memory]) -> Summary:
        return _train(config, model, data, sources, cluster, passage, place, resume, quiet, theirs)

    summary = None
    try:
        summary = in_worlds(cluster or Cluster.from_env(), run)
    finally:
        for one in theirs:
            one.end(None if summary is None else asdict(summary))
    return summary


def _train(
    config: Config,
    model: nn.Module | None,
    data: Any,
    sources: tuple[Source, Source] | None,
    cluster: Cluster,
    passage: Passage[Memory],
    place: Path | None,
    resume: bool,
    quiet: bool,
    theirs: Sequence[Theirs],
) -> Summary:
    """From wherever the run stands to its end, or until a worker of this world is lost."""
    log = Log(config, quiet or not cluster.first, theirs if cluster.first else ())
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, cluster))
        speaks = cluster.first and not quiet
        stop_asked = ending.enter_context(stop_requests(speaks, passage.stop))
        if sources is None and not passage.again:
            log.say(f"reading the images: {_whose(config)}")
        held = copied(passage.memory, cluster) if passage.copies else None
        left_out = None if held is None else held.left_out
        train_set, val_set = sources or open_sources(config, data, cluster, left_out=left_out)
        images, total = len(train_set), config.epochs * len(train_set)
        if not passage.again:
            log.say(f"building the model: {config.model}")
        net = ending.enter_context(prepared(config, cluster, train_set.classes, model))
        parts = ending.enter_context(assemble(config, cluster, net, own=model is not None))
        folder = ending.enter_context(RunFolder(place, config, cluster))
        begun = passage.resumes and place is not None
        state = folder.begin(resume or begun, parts, None if held is None else held.put(parts))
        passage.begun()
        if train_set.class_names:
            folder.write("classes.json", list(train_set.class_names))

        if not passage.again:
            log.table(config.derived(images, cluster.world), f"megabatch train {config.name}")
        counts = {"held_out": len(val_set), "steps": state.steps, "world": cluster.world}
        recent = () if held is None else held.recent
        log.begin(images, state.seen, folder.for_log, recent, **counts)
        ending.callback(log.close)
        loader = Loader(train_set, val_set, config, cluster, full_dtype(config))
        ending.callback(loader.close)
        facts = _facts(config, cluster, train_set, loader)
        notes = (*train_set.notes, *filter(None, [parts.run.how]))
        if passage.again:
            workers = f"{cluster.world} worker{'s' * (cluster.world > 1)}"
            log.say(f"goes on at step {state.steps} on {workers}")
        else:
            _say_first(log, config, cluster, notes, state, images)
        delayed, clock = DelayedNumbers(state.pending), Clock(state.seconds)
        replicas = Replicas(cluster, config.compare_every, parts.engine.blocked)
        first_seen, ended = state.seen, "finished"
        if held is not None and _reached(state, config):
            ended = "target"

        def memory() -> Memory:
            state.pending, state.seconds = delayed.state(), clock.seconds
            return Memory.of(state, log.recent, train_set.left_out, parts)

        ending.enter_context(passage.keeping(memory))
        while True:
            # Now and then, after a step: evaluate, save, say what was waited for.
            epoch, last = state.seen / images, state.seen >= total
            if state.settled < state.steps:
                step, paused, best = delayed.last, time.perf_counter(), False
                if ended == "finished" and (last or _due(step.epoch, epoch, config.eval_every)):
                    folder.wait()
                    recompute_statistics(parts, loader, config.bn_recompute, cluster)
                    with parts.average.in_place():
                        held_out = loader.validation_images
                        watched = log.evaluating(
                            loader.validation(), held_out, cluster.world, state.steps, state.seen
                        )
                        waiting = parts.engine.blocked("the end of an evaluation")
                        found = score(net, watched, held_out, config, cluster, waiting)
                        best = state.evaluated(found) and config.keep_best
                    log.evaluation(state.steps, state.seen, epoch, state.evaluation)
                    log.layers(step.index, state.seen, parts.layers(), config.ratio_band)
                    if _reached(state, config):
                        ended = "target"
                saves = not last and ended == "finished"
                saves = saves and _due(step.epoch, epoch, config.save_every)
                compared = None
                if saves or best:
                    compared = replicas.compare(state.steps, parts.replicated())
                state.settled = state.steps
                if saves or best:
                    pending = delayed.state_later()
                    folder.save(
                        state, parts, clock.seconds, pending, compared, last=saves, best=best
                    )
                clock.passed_over(time.perf_counter() - paused)
                if _due(step.epoch, epoch, 1.0):
                    clock.waited_for_others(parts.engine.exposed_seconds())
                    reading = loader.waited_seconds, loader.busy_seconds, loader.core_seconds
                    waits = clock.lap(*reading)
                    own = waits.seconds - waits.communication
                    effort = Effort(platform.node(), own, parts.engine.micro_batches())
                    with parts.engine.blocked("the others' effort"):
                        efforts = cluster.gather(effort)
                    log.verdict(state.steps, state.seen, waits, facts, efforts)
            if last or ended != "finished":
                break

            step = step_at(config.all_stages, images, state.steps, state.seen, state.batch)
            passage.enter(step.stage)
            result = train_step(
                parts,
                passage.heed(loader.share(step)),
                step.batch,
                lr=config.lr_at(step.epoch, step.batch),
                momentum=config.momentum_at(step.stage),
                stop=stop_asked,
                propose=state.proposed,
            )
            state.steps, state.seen = step.index + 1, step.seen + step.batch

            # What the host learns, a step later.
            with parts.engine.blocked("waiting for the device"):
                numbers = delayed.put(step, result)
            if numbers is not None:
                state.learn(numbers, config)
                log.step(numbers, state.noise.scale)
                if _hopeless(numbers, state, config):
                    raise diagnosis(numbers, delayed.losses, net, folder, cluster)
                if numbers.stop:
                    ended = "stopped"
            if (differing := replicas.read()) is not None:
                raise divergence(differing, folder, cluster)
            if replicas.due(state.steps):
                replicas.compare(state.steps, parts.replicated())
            folder.check()

        log.whole()
        seconds, training_seconds = clock.seconds, clock.training_seconds
        compared = replicas.compare(state.steps, parts.replicated())
        folder.save(state, parts, seconds, delayed.state_later(), compared)
        if (differing := replicas.read()) is not None:
            raise divergence(differing, folder, cluster)
        numbers = delayed.take()
        if numbers is not None:
            state.learn(numbers, config)
            log.step(numbers, state.noise.scale)
            if _hopeless(numbers, state, config):
                raise diagnosis(numbers, delayed.losses, net, folder, cluster)
        folder.wait()
        with parts.engine.blocked("the end of the run"):
            cluster.barrier()
        images_per_second = (state.seen - first_seen) / max(training_seconds, 1e-9)
        summary = Summary(
            **state.evaluation,
            best_top1=state.best_top1,
            median_top1=statistics.median(state.last_top1s or [0.0]),
            steps=state.steps,
            seen=state.seen,
            epochs=state.seen / images,
            seconds=seconds,
            images_per_second=images_per_second,
            peak_share=_peak_share(config, cluster, train_set.classes, images_per_second),
            world=cluster.world,
            weights_sha256=checkpoint.weights_sha256(net),
            out=None if folder.path is None else str(folder.path),
            ended=ended,
        )
        folder.write("summary.json", asdict(summary))
        return summary


def evaluate(
    run: str | os.PathLike[str],
    model: nn.Module | None = None,
    data: Any = None,
    *,
    cluster: Cluster | None = None,
    quiet: bool = True,
    best: bool = False,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's newest checkpoint; every worker of the cluster calls it.
    `best`: of its best one, where it kept that.

    A run of your own module or data needs them again; the module then holds what was evaluated, the
    average of the weights where the run kept one. Unless `quiet`, the first worker says on standard
    error how far it is.
    """
    written = Path(run) / "config.json"
    if not written.exists():
        raise UserError(f"{run} is not the folder of a run: it has no config.json")
    config = Config.read(written)
    # What was written there may be anyone's: an evaluation copies nothing and needs no first
    # weights.
    config = replace(config, init="", data=replace(config.data, local_copy=""))
    for own, given, word in ((config.model, model, "model"), (config.data.source, data, "data")):
        if own.startswith("own") and given is None:
            raise UserError(
                f"{run} was trained with {word} of its caller's: evaluate it from Python, "
                f"megabatch.evaluate(run, {word}=...)"
            )
    _check_model(model)
    found = checkpoint.of_run(Path(run), best)
    cluster = cluster or Cluster.from_env()
    console = to_people(quiet or not cluster.first)
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, cluster))
        say(console, f"reading the images: {_whose(config)}")
        _, val_set = open_sources(config, data, cluster, training=False)
        net = ending.enter_context(prepared(config, cluster, val_set.classes, model))
        ending.enter_context(halved(net, config))
        checkpoint.load_weights(found, net)
        with checkpoint.fitting(found):
            put_averages(net, checkpoint.load_extra(found))
        loader = Loader(None, val_set, config, cluster, full_dtype(config))
        ending.callback(loader.close)
        held_out = loader.validation_images
        if (idle := idle_workers(held_out, config.micro, cluster.world)) is not None:
            say(console, idle)
        told = ending.enter_context(counting("evaluating", console))
        watched = counted(loader.validation(), held_out, cluster.world, told)
        result = score(net, watched, held_out, config, cluster)
    seen = checkpoint.seen(found)
    return {**result, "seen": seen, "checkpoint": str(found), "world": cluster.world}


def _facts(config: Config, cluster: Cluster, source: Source, loader: Loader) -> Facts:
    """What the verdict's advice depends on."""
    return Facts(
        threads=loader.threads,
        cores=max(1, len(os.sched_getaffinity(0)) // cluster.local_world),
        cores_here=len(os.sched_getaffinity(0)),
        size=config.data.size,
        packed=config.data.kind == "pack",
        stored_size=source.stored_size,
        world=cluster.world,
        over_loopback=cluster.local_world == cluster.world and cluster.device.type == "cpu",
        micros_a_worker=config.batch / config.micro / cluster.world,
        wire=config.wire,
        deterministic=config.deterministic,
        readers=loader.readers,
    )


def _say_first(
    log: Log,
    config: Config,
    cluster: Cluster,
    notes: tuple[str, ...],
    state: State,
    images: int,
) -> None:
    """What a user should know before the first step."""
    for note in notes:
        log.say(note)
    micro = ", or a smaller --micro"
    if (idle := idle_workers(config.batch, config.micro, cluster.world, micro)) is not None:
        log.say(idle)
    if state.seen:
        log.say(f"resumed at step {state.steps}, epoch {state.seen / images:.2f}")
    if cluster.device.type == "cuda":
        log.say("first step: kernels are chosen and compiled, which may take a minute")


def _whose(config: Config) -> str:
    """The images' name, for people."""
    return "your data set" if config.data.kind == "own" else config.data.path or config.data.source


def _peak_share(config: Config, cluster: Cluster, classes: int, rate: float) -> float | None:
    """Of one chip; of a CPU nobody knows the peak."""
    if cluster.device.type != "cuda":
        return None
    chip, data = torch.cuda.get_device_name(cluster.device), config.data
    return share_of_peak(
        chip, config.model, data.size, data.channels, classes, rate / cluster.world
    )


def _due(before: float, after: float, every: float) -> bool:
    """Whether a multiple of `every` epochs was passed."""
    return every > 0 and int(after / every) > int(before / every)


def _reached(state: State, config: Config) -> bool:
    """Whether the last evaluation had the accuracy that was aimed at."""
    target = config.target_accuracy
    return target is not None and state.evaluation["top1"] >= target


def _hopeless(numbers: StepNumbers, state: State, config: Config) -> bool:
    """A loss that is no number ends the run; in fp16 it may be an overflow that a skip mends, but
    not time after time."""
    diverged = not math.isfinite(numbers.loss) and config.precision != "fp16"
    return diverged or state.skipped >= _MOST_SKIPPED


def _checked(config: Config, model: nn.Module | None, data: Any) -> Config:
    """The config as it is saved: a module or data of the caller's own are named as such."""
    if not isinstance(config, Config):
        raise UserError(
            f"config is {config!r}, not a Config: give one, such as megabatch.recipes.digits()"
        )
    _check_model(model)
    if model is not None:
        config = replace(config, model=f"own {type(model).__name__}")
    if data is not None:
        config = replace(config, data=replace(config.data, source="own"))
    return config.check()


def _check_model(model: Any) -> None:
    """Refuse what cannot be a caller's own module, and a module that cannot be trained."""
    if model is None:
        return
    if isinstance(model, type):
        raise UserError(
            f"model is the class {model.__name__}, not a module: give {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is {model!r}, not a torch.nn.Module: give a module, or name a bundled model in "
            f"config.model"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UserError(
            f"model is wrapped in {type(model).__name__}, but training sums gradients over workers "
            f"itself: give the module inside, model.module"
        )
    for name, weight in model.named_parameters():
        if is_lazy(weight) or weight.is_meta:
            raise UserError(f"the model's {name} has no values yet: call the model on images once")
        if weight.is_complex():
            raise UserError(f"the model's {name} is complex: training is in real numbers")
