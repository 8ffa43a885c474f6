"""Training: train(config) is the loop, read from top to bottom."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from megabatch.batch import step_at
from megabatch.between_steps import Run, Summary
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.source import Source
from megabatch.elastic.worlds import Passage, in_worlds
from megabatch.host.stopping import stop_requests
from megabatch.own import checked, named_folder, whose
from megabatch.parts import assemble, prepared
from megabatch.precision import full_dtype
from megabatch.runs.diagnosis import divergence
from megabatch.runs.folder import RunFolder, State
from megabatch.runs.log import Log
from megabatch.runs.loggers import Logger, Theirs, check_loggers
from megabatch.runs.memory import Memory, compared, copied
from megabatch.runs.progress import say, to_people
from megabatch.runs.verdict import Facts, beforehand, idle_workers
from megabatch.step import train_step
from megabatch.workers.process import compute_settings


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
    run ended: its own layers and modes (batch norm by spans is put in for the run alone), no hooks,
    no gradients. What it draws, dropout say, it draws from torch's generator, which is keyed by the
    images' positions. Changed are its weights and moving averages, and where it lies: on the
    cluster's device, in fp32, or fp64 for precision fp64, channels last (but for deterministic runs
    on a CPU). Buffers that its own forward changes (a spectral norm's, a counter) move once a step,
    by the pass over the first micro-batch, on every worker.
    `data` is a map-style data set of (image, label), of which a share is held out by hash, or a
    pair (train, val). Without `out` nothing is written. `loggers` hear of the run on the first
    worker, and cannot change it. `sources` are the config's images as data.opening.open_sources
    opened them, for one run after another: they stay the caller's.
    """
    config = checked(config, model, data)
    given = check_loggers(loggers)
    place = None if out is None else named_folder(out, "out")
    # Of their failures a quiet run tells too: whoever gave them waits for what they write.
    theirs = [Theirs(one, functools.partial(say, to_people())) for one in given]

    def run(cluster: Cluster, passage: Passage[Memory]) -> Summary:
        return _train(config, model, data, sources, cluster, passage, place, resume, quiet, theirs)

    summary = None
    try:
        summary = in_worlds(Cluster.given(cluster), run)
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
            log.say(f"reading the images: {whose(config)}")
        held = _held(config, cluster, passage, place)
        left_out = None if held is None else held.left_out
        train_set, val_set = sources or open_sources(config, data, cluster, left_out=left_out)
        images = len(train_set)
        if not passage.again:
            log.say(f"building the model: {config.model}")
        net = ending.enter_context(prepared(config, cluster, train_set.classes, model))
        parts = ending.enter_context(
            assemble(config, cluster, net, own=model is not None, classes=train_set.classes)
        )
        folder = ending.enter_context(RunFolder(place, config, cluster))
        begun = passage.resumes and place is not None
        memory = None if held is None else held.put(parts)
        with passage.as_before():
            state = folder.begin(
                resume or begun,
                parts,
                memory,
                passage.begun,
                images=images,
                classes=train_set.class_names,
            )

        if not passage.again:
            log.table(
                config.derived(images, cluster.world, cluster.grid),
                f"megabatch train {config.name}",
            )
        counts = {"held_out": len(val_set), "steps": state.steps, "world": cluster.world}
        recent = () if held is None else held.recent
        log.begin(images, state.seen, folder.for_log, recent, **counts)
        ending.callback(log.close)
        loader = StepLoader(train_set, val_set, config, cluster, full_dtype(config))
        ending.callback(loader.close)
        facts = _facts(config, cluster, train_set, loader)
        notes = (*train_set.notes, *filter(None, [parts.run.how]))
        if passage.again:
            workers = f"{cluster.world} worker{'s' * (cluster.world > 1)}"
            # Its plan may have given way before, or gives way now.
            how = "".join(
                f"; plan {name}: {why}"
                for _, name, why in config.summed(cluster.world, cluster.grid)
            )
            log.say(f"goes on at step {state.steps} on {workers}{how}")
        else:
            _say_first(log, config, cluster, notes, state, images)
        run = Run(config, cluster, parts, loader, folder, log, state, facts, images)
        if held is not None:
            run.go_on()
        ending.enter_context(passage.keeping(lambda: run.memory(train_set.left_out)))
        while True:
            run.settle()
            if run.over:
                break
            step = step_at(config.all_stages, images, state.steps, state.seen, state.batch)
            passage.enter(step.stage)
            result = train_step(
                parts,
                passage.heed(loader.micro_batches(step)),
                step.batch,
                lr=config.lr_at(step.epoch, step.batch),
                momentum=config.momentum_at(step.stage),
                stop=stop_asked,
                propose=state.proposed,
            )
            run.took(step, result)
        return run.finished(train_set.classes)


def _held(
    config: Config, cluster: Cluster, passage: Passage[Memory], place: Path | None
) -> Memory | None:
    """What this world's workers hold of the run: that of the first, once those that are as far as
    it are known to hold the same."""
    if not passage.copies:
        return None
    if config.compare_every > 0:
        comparison = compared(passage.memory, cluster)
        if comparison.differing():
            raise divergence(comparison, place)
    return copied(passage.memory, cluster)


def _facts(config: Config, cluster: Cluster, source: Source, loader: StepLoader) -> Facts:
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
    for words in beforehand(config, images):
        log.say(words)
    if state.seen:
        log.say(f"resumed at step {state.steps}, epoch {state.seen / images:.2f}")
    if cluster.device.type == "cuda":
        log.say("first step: kernels are chosen and compiled, which may take a minute")
