"""Training: train(config) is the loop, read from top to bottom."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megabatch.batch import Step, count_steps, step_at
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.source import Source
from megabatch.elastic.worlds import Passage, in_worlds
from megabatch.own import checked, whose
from megabatch.parts import Parts, assemble, prepared
from megabatch.planner.peak import share_of_peak
from megabatch.precision import full_dtype
from megabatch.process import compute_settings
from megabatch.recompute import recompute_statistics
from megabatch.runs import checkpoint
from megabatch.runs.diagnosis import diagnosis, divergence
from megabatch.runs.folder import RunFolder, State
from megabatch.runs.listening import Logger, Theirs, check_loggers
from megabatch.runs.loggers import Log
from megabatch.runs.memory import Memory, compared, copied
from megabatch.runs.progress import say, to_people
from megabatch.runs.verdict import Clock, Effort, Facts, bold_rate, few_steps, idle_workers
from megabatch.step import DelayedNumbers, StepResult, score, train_step
from megabatch.stopping import stop_requests
from megabatch.sync.control import StepNumbers
from megabatch.sync.replicas import Comparison, Replicas, checksum

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
    lies: on the cluster's device, in fp32, or fp64 for precision fp64, channels last (but for
    deterministic runs on a CPU).
    `data` is a map-style data set of (image, label), of which a share is held out by hash, or a
    pair (train, val). Without `out` nothing is written. `loggers` hear of the run on the first
    worker, and cannot change it. `sources` are the config's images as data.opening.open_sources
    opened them, for one run after another: they stay the caller's.
    """
    config = checked(config, model, data)
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
            log.say(f"reading the images: {whose(config)}")
        held = _held(config, cluster, passage, place)
        left_out = None if held is None else held.left_out
        train_set, val_set = sources or open_sources(config, data, cluster, left_out=left_out)
        images = len(train_set)
        if not passage.again:
            log.say(f"building the model: {config.model}")
        net = ending.enter_context(prepared(config, cluster, train_set.classes, model))
        parts = ending.enter_context(assemble(config, cluster, net, own=model is not None))
        folder = ending.enter_context(RunFolder(place, config, cluster))
        begun = passage.resumes and place is not None
        memory = None if held is None else held.put(parts)
        state = folder.begin(resume or begun, parts, memory, passage.begun)
        if train_set.class_names:
            folder.write("classes.json", list(train_set.class_names))

        if not passage.again:
            log.table(config.derived(images, cluster.world), f"megabatch train {config.name}")
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
            log.say(f"goes on at step {state.steps} on {workers}")
        else:
            _say_first(log, config, cluster, notes, state, images)
        run = _Run(config, cluster, parts, loader, folder, log, state, facts, images)
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
                passage.heed(loader.share(step)),
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


class _Run:
    """A run in one world of workers: how far it is, and what is due between two steps."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        parts: Parts,
        loader: StepLoader,
        folder: RunFolder,
        log: Log,
        state: State,
        facts: Facts,
        images: int,
    ) -> None:
        self.config, self.cluster, self.parts, self.loader = config, cluster, parts, loader
        self.folder, self.log, self.state, self.facts = folder, log, state, facts
        self.images, self.ended = images, "finished"
        self.delayed = DelayedNumbers(state.pending)
        self.clock = Clock(state.seconds, state.training_seconds)
        self.replicas = Replicas(cluster, config.compare_every, parts.engine.blocked)

    @property
    def epoch(self) -> float:
        return self.state.seen / self.images

    @property
    def last(self) -> bool:
        """Whether the step before was the last of the run."""
        return self.state.seen >= self.config.epochs * self.images

    @property
    def over(self) -> bool:
        return self.last or self.ended != "finished"

    def _reaches(self, found: dict[str, float]) -> bool:
        """Whether an evaluation has the accuracy that is aimed at."""
        target = self.config.target_accuracy
        return target is not None and found["top1"] >= target

    def go_on(self) -> None:
        """From where another world of workers left the run, perhaps at its target."""
        state = self.state
        if state.evaluated_at == state.seen and self._reaches(state.evaluation):
            self.ended = "target"
        if state.best_at == state.seen:  # who was to write it may be lost
            self._save(None, last=False, best=True)
            self.folder.wait()

    def memory(self, left_out: tuple[int, ...]) -> Memory:
        """What the rest of the run depends on, as it is now; an error where workers are known to
        differ, for one of them would be copied."""
        self._read_comparison()
        self._tell_time()
        self.state.pending = self.delayed.state()
        mine = None
        if self.config.compare_every > 0:
            mine = int(checksum(self.parts.replicated(buffers=False), self.cluster.device))
        return Memory.of(self.state, self.log.recent, left_out, mine, self.parts)

    def _tell_time(self) -> None:
        self.state.seconds = self.clock.seconds
        self.state.training_seconds = self.clock.training_seconds

    # --- after a step

    def took(self, step: Step, result: StepResult) -> None:
        """A step was taken; what the host learns now is of the one before."""
        state = self.state
        state.steps, state.seen = step.index + 1, step.seen + step.batch
        with self.parts.engine.blocked("waiting for the device"):
            numbers = self.delayed.put(step, result)
        self._learn(numbers)
        if numbers is not None and numbers.stop:
            self.ended = "stopped"
        self._read_comparison()
        if self.replicas.due(state.steps):
            self.replicas.compare(state.steps, self.parts.replicated())
        self.folder.check()

    def _learn(self, numbers: StepNumbers | None) -> None:
        if numbers is None:
            return
        self.state.learn(numbers, self.config)
        self.log.step(numbers, self.state.noise.scale)
        if _hopeless(numbers, self.state, self.config):
            net, losses = self.parts.net, self.delayed.losses
            with self.parts.engine.blocked("the diagnosis"):
                raise diagnosis(numbers, losses, net, self.folder, self.cluster)

    def _read_comparison(self) -> None:
        if (differing := self.replicas.read()) is not None:
            self.folder.wait()
            raise divergence(differing, self.folder.path)

    # --- now and then

    def settle(self) -> None:
        """What is due after the last step, once: evaluate, save, say what was waited for."""
        state, config = self.state, self.config
        # A run that is told to stop leaves what is due to who goes on with it.
        if state.settled == state.steps or self.ended == "stopped":
            return
        before, paused, found = self.delayed.last.epoch, time.perf_counter(), None
        if self.last or self._due(before, config.eval_every):
            found = self._evaluate()
        best = found is not None and config.keep_best and found["top1"] > state.best_top1
        over = self.last or (found is not None and self._reaches(found))
        saves = not over and self._due(before, config.save_every)
        compared = None
        if saves or best:
            compared = self.replicas.compare(state.steps, self.parts.replicated())
        # From here on nothing waits for other workers: it is done as a whole, or not at all.
        if found is not None:
            self._take_in(found)
        state.settled = state.steps
        state.best_at = state.seen if best else state.best_at
        if saves or best:
            self._save(compared, last=saves, best=best)
        if best and self.cluster.world > 1:  # others can write it, should this one be lost now
            self.folder.wait()
        self.clock.passed_over(time.perf_counter() - paused)
        if self._due(before, 1.0):
            self._judge()

    def _save(self, compared: Comparison | None, last: bool = True, best: bool = False) -> None:
        self._tell_time()
        pending = self.delayed.state_later()
        self.folder.save(self.state, self.parts, pending, compared, last=last, best=best)

    def _due(self, before: float, every: float) -> bool:
        """Whether a multiple of `every` epochs was passed since an epoch."""
        return every > 0 and int(self.epoch / every) > int(before / every)

    def _evaluate(self) -> dict[str, float]:
        state, parts, loader, cluster = self.state, self.parts, self.loader, self.cluster
        self.folder.wait()
        recompute_statistics(parts, loader, self.config.bn_recompute, cluster)
        with parts.average.in_place():
            held_out = loader.validation_images
            watched = self.log.evaluating(
                loader.validation(), held_out, cluster.world, state.steps, state.seen
            )
            waiting = parts.engine.blocked("the end of an evaluation")
            return score(parts.net, watched, held_out, self.config, cluster, waiting)

    def _take_in(self, found: dict[str, float]) -> None:
        """An evaluation, into the state and the log."""
        state = self.state
        state.evaluated(found)
        if self._reaches(found):
            self.ended = "target"
        self.log.evaluation(state.steps, state.seen, self.epoch, found, self.clock.seconds)
        self.log.layers(state.steps - 1, state.seen, self.parts.layers(), self.config.ratio_band)

    def _judge(self) -> None:
        """Where the time of an epoch went, here and on the other workers."""
        engine, loader = self.parts.engine, self.loader
        self.clock.waited_for_others(engine.exposed_seconds())
        waits = self.clock.lap(loader.waited_seconds, loader.busy_seconds, loader.core_seconds)
        own = waits.seconds - waits.communication
        effort = Effort(platform.node(), own, engine.micro_batches())
        with engine.blocked("the others' effort"):
            efforts = self.cluster.gather(effort)
        self.log.verdict(self.state.steps, self.state.seen, waits, self.facts, efforts)

    # --- at the end

    def finished(self, classes: int) -> Summary:
        """The last checkpoint, and the run in numbers."""
        state, parts, folder, cluster = self.state, self.parts, self.folder, self.cluster
        self.log.last_verdict()
        self._save(self.replicas.compare(state.steps, parts.replicated()))
        self._read_comparison()
        folder.wait()
        with parts.engine.blocked("the end of the run"):
            cluster.barrier()
        self._learn(self.delayed.take())
        rate = state.seen / max(state.training_seconds, 1e-9)
        summary = Summary(
            **state.evaluation,
            best_top1=state.best_top1,
            median_top1=statistics.median(state.last_top1s or [0.0]),
            steps=state.steps,
            seen=state.seen,
            epochs=self.epoch,
            seconds=state.seconds,
            images_per_second=rate,
            peak_share=_peak_share(self.config, cluster, classes, rate),
            world=cluster.world,
            weights_sha256=checkpoint.weights_sha256(parts.net),
            out=None if folder.path is None else str(folder.path),
            ended=self.ended,
        )
        folder.write("summary.json", asdict(summary))
        return summary


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
    stages = config.all_stages
    steps, _ = count_steps(stages, images, config.epochs)
    if (few := few_steps([stage.batch for stage in stages], images, steps)) is not None:
        log.say(few)
    if (bold := bold_rate(config.lr.peak(config.batch), config.optimizer)) is not None:
        log.say(bold)
    if state.seen:
        log.say(f"resumed at step {state.steps}, epoch {state.seen / images:.2f}")
    if cluster.device.type == "cuda":
        log.say("first step: kernels are chosen and compiled, which may take a minute")


def _peak_share(config: Config, cluster: Cluster, classes: int, rate: float) -> float | None:
    """Of one chip; of a CPU nobody knows the peak."""
    if cluster.device.type != "cuda":
        return None
    chip, data = torch.cuda.get_device_name(cluster.device), config.data
    return share_of_peak(
        chip, config.model, data.size, data.channels, classes, rate / cluster.world
    )


def _hopeless(numbers: StepNumbers, state: State, config: Config) -> bool:
    """A loss that is no number ends the run; in fp16 it may be an overflow that a skip mends, but
    not time after time."""
    diverged = not math.isfinite(numbers.loss) and config.precision != "fp16"
    return diverged or state.skipped >= _MOST_SKIPPED
