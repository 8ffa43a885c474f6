"""Training: train(config) is the loop, read from top to bottom; score counts every image once."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch.batch import Step, step_at
from megabatch.batchnorm import move_averages, statistics
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import Loader, MicroBatch
from megabatch.data.opening import open_sources
from megabatch.data.source import Source
from megabatch.errors import RunFailed, UserError
from megabatch.keyed import Purpose, keyed, set_positions
from megabatch.noise import following_batch
from megabatch.parts import COUNTS, Parts, assemble
from megabatch.precision import autocast, full_dtype
from megabatch.process import compute_settings, stop_requests
from megabatch.runs import checkpoint
from megabatch.runs.folder import RunFolder
from megabatch.runs.loggers import Log, Pending, Told, show_table
from megabatch.runs.verdict import Clock, Facts
from megabatch.sync.summation import TreeSum
from megabatch.tree import deal

_MOST_SKIPPED = 20


@dataclass(frozen=True)
class Summary:
    """How a run ended. Accuracies and loss are of the last evaluation."""

    top1: float
    top5: float
    loss: float
    steps: int
    seen: int
    epochs: float
    seconds: float
    images_per_second: float
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
) -> Summary:
    """Train as the config says; every worker of the cluster calls it.

    `model` is a module of your own (changed in place: batch norm by spans, keyed dropout, moved to
    the device). `data` is a map-style data set of (image, label), of which a share is held out by
    hash, or a pair (train, val). Without `out` nothing is written.
    """
    config = _with_own_parts(config, model, data).check()
    cluster = cluster or Cluster.from_env()
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, cluster))
        stop_asked = ending.enter_context(stop_requests())
        train_set, val_set = open_sources(config, data, cluster)
        images, total = len(train_set), config.epochs * len(train_set)
        parts = assemble(config, cluster, train_set.classes, model)
        folder = RunFolder(None if out is None else Path(out), config, cluster)
        state = folder.begin(resume, parts)

        if cluster.first and not quiet:
            show_table(config.derived(images, cluster.world), f"megabatch train {config.name}")
        log = Log(config, images, folder.for_log, quiet or not cluster.first)
        loader = Loader(train_set, val_set, config, cluster, full_dtype(config))
        facts = _facts(config, cluster, train_set, loader)
        ending.callback(log.close)
        ending.callback(loader.close)
        for note in train_set.notes:
            log.say(note)
        if state.seen:
            log.say(f"resumed at step {state.steps}, epoch {state.seen / images:.2f}")

        net, optimizer, engine, scale = parts.net, parts.optimizer, parts.engine, parts.scale
        pending, ended, skipped = Pending(), "finished", 0
        pending.restore(state.pending)
        recent: deque[tuple[Step, list[tuple[int, Tensor]]]] = deque(maxlen=2)
        began, first_seen, idle = time.monotonic() - state.seconds, state.seen, state.seconds
        clock = Clock()

        while state.seen < total and ended == "finished":
            step = step_at(config.all_stages, images, state.steps, state.seen, state.batch)
            lr, momentum = config.lr_at(step.epoch, step.batch), config.momentum_at(step.stage)
            for group in optimizer.param_groups:
                group["lr"] = lr
                if "momentum" in group:
                    group["momentum"] = momentum

            # Forward and backward over the micro-batches dealt here; buckets leave meanwhile.
            count = step.batch // config.micro
            engine.begin(count)
            net.train()
            losses: list[tuple[int, Tensor]] = []
            for micro in loader.share(step):
                loss, control = _forward(net, micro, step.batch, config, cluster.device)
                losses.append((micro.first, loss.detach()))
                engine.backward(loss * scale.value if scale.on else loss, control)
            control = engine.finish(stop_asked(), state.proposed)
            recent.append((step, losses))

            # The update. Whether it counts is decided on the device, alike on every worker.
            good = torch.isfinite(control[0])
            engine.scale(1 / scale.value if scale.on else None, good)
            optimizer.step(good=good)
            parts.masters.write_back()
            head = engine.RESERVED + COUNTS
            move_averages(net, control[head:] / count, config.bn_momentum, good)
            parts.average.update(good)
            rest = [n.to(control) for n in (engine.squared_norm(), scale.value, good)]
            numbers = torch.cat([control[:head], torch.stack(rest)])
            scale.update(good)
            state.steps, state.seen = step.index + 1, step.seen + step.batch

            # What the host learns, a step later.
            told = pending.put(step, numbers)
            if told is not None:
                skipped = skipped + 1 if told.skipped else 0
                _take_in(told, config, state, log)
                if skipped == _MOST_SKIPPED or _diverged(told, config):
                    raise _diagnosis(told, parts, recent, folder, cluster)
                if told.stop:
                    ended = "stopped"

            # Now and then: evaluate, save.
            paused, last = time.monotonic(), state.seen >= total
            epoch = state.seen / images
            if ended == "finished" and (last or _due(step.epoch, epoch, config.eval_every)):
                with parts.average.in_place():
                    state.evaluation = score(net, loader, config, cluster)
                log.evaluation(state.steps, state.seen, epoch, state.evaluation)
                log.layers(step.index, state.seen, parts.layers(), config.ratio_band)
                target = config.target_accuracy
                if target is not None and state.evaluation["top1"] >= target:
                    ended = "target"
            if not last and ended == "finished" and _due(step.epoch, epoch, config.save_every):
                state.pending = pending.state()
                folder.save(state, parts, began)
            idle += time.monotonic() - paused
            clock.passed_over(time.monotonic() - paused)
            if _due(step.epoch, epoch, 1.0):
                clock.waited_for_others(engine.exposed_seconds())
                waits = clock.lap(loader.waited_seconds, loader.busy_seconds, loader.core_seconds)
                log.verdict(state.steps, state.seen, waits, facts)

        seconds = time.monotonic() - began
        state.pending = pending.state()
        folder.save(state, parts, began)
        told = pending.take()
        if told is not None:
            _take_in(told, config, state, log)
            if _diverged(told, config):
                raise _diagnosis(told, parts, recent, folder, cluster)
        cluster.barrier()
        summary = Summary(
            **state.evaluation,
            steps=state.steps,
            seen=state.seen,
            epochs=state.seen / images,
            seconds=seconds,
            images_per_second=(state.seen - first_seen) / max(seconds - idle, 1e-9),
            world=cluster.world,
            weights_sha256=checkpoint.weights_sha256(net),
            out=None if folder.path is None else str(folder.path),
            ended=ended,
        )
        folder.write("summary.json", asdict(summary))
        return summary


def _facts(config: Config, cluster: Cluster, source: Source, loader: Loader) -> Facts:
    """What the verdict's advice depends on."""
    return Facts(
        threads=loader.threads,
        cores=max(1, len(os.sched_getaffinity(0)) // cluster.local_world),
        size=config.data.size,
        packed=config.data.kind == "pack",
        stored_size=source.stored_size,
        world=cluster.world,
        micros_a_worker=config.batch / config.micro / cluster.world,
        wire=config.wire,
        deterministic=config.deterministic,
        readers=loader.readers,
    )


def _take_in(told: Told, config: Config, state: Any, log: Log) -> None:
    """A step's numbers: the noise scale, the batch the first worker proposes, the log's line."""
    step = told.step
    state.noise.update(
        told.squares,
        told.mean_square,
        step.batch // config.micro,
        config.micro,
        config.noise.memory,
    )
    if config.noise.follow:
        state.batch = told.number or step.batch
        state.proposed = following_batch(config, state.batch, state.noise.scale)
    lr, momentum = config.lr_at(step.epoch, step.batch), config.momentum_at(step.stage)
    log.step(told, lr, momentum, state.noise.scale)


def evaluate(
    run: str | os.PathLike[str],
    model: nn.Module | None = None,
    data: Any = None,
    *,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's newest checkpoint; every worker of the cluster calls it.

    A run of your own module or data needs them again.
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
    found = checkpoint.newest(Path(run) / "checkpoints")
    if found is None:
        raise UserError(f"{run} has no good checkpoint to evaluate")
    cluster = cluster or Cluster.from_env()
    with compute_settings(config, cluster):
        _, val_set = open_sources(config, data, cluster, training=False)
        parts = assemble(config, cluster, val_set.classes, model)
        checkpoint.load_weights(found, parts.net)
        parts.load(checkpoint.load_extra(found))
        loader = Loader(None, val_set, config, cluster, full_dtype(config))
        with parts.average.in_place(), contextlib.closing(loader):
            result = score(parts.net, loader, config, cluster)
    seen = checkpoint.seen(found)
    return {**result, "seen": seen, "checkpoint": str(found), "world": cluster.world}


@torch.no_grad()
def score(net: nn.Module, loader: Loader, config: Config, cluster: Cluster) -> dict[str, float]:
    """Top-1, top-5 and loss over all validation images, each counted once on whichever worker has
    it."""
    net.eval()
    # Each micro-batch is a leaf of the tree: the loss too is the same on any number of workers.
    images_in_all = loader.validation_images
    count = -(-images_in_all // config.micro)
    like = torch.empty(0, dtype=full_dtype(config), device=cluster.device)
    total = TreeSum(COUNTS, like)
    total.begin(count, deal(count, cluster.world)[cluster.rank])
    for images, labels in loader.validation():
        with autocast(config, cluster.device):
            logits = net(images).to(like)
        total.push(_counts(logits, labels, cross_entropy(logits, labels, reduction="sum")))
    loss, top1, top5 = total.all_reduce(cluster, by_tree=True).tolist()
    found = {"top1": top1, "top5": top5, "loss": loss}
    return {name: value / images_in_all for name, value in found.items()}


def _forward(
    net: nn.Module, micro: MicroBatch, batch: int, config: Config, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A micro-batch's loss, as its part of the mean over the global batch, and its control
    numbers."""
    set_positions(net, micro.positions)
    # For randomness of a caller's own module: torch's generator is keyed by position too.
    torch.manual_seed(keyed(config.seed, Purpose.GENERATOR, micro.first))
    with autocast(config, device):
        logits = net(micro.images).to(full_dtype(config))
    loss = cross_entropy(
        logits, micro.labels, reduction="sum", label_smoothing=config.label_smoothing
    )
    counts = _counts(logits.detach(), micro.labels, loss.detach())
    return loss / batch, torch.cat([counts, statistics(net, counts)])


def _counts(logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([loss, best[:, 0].sum().to(loss), best.sum().to(loss)])


def _due(before: float, after: float, every: float) -> bool:
    """Whether a multiple of `every` epochs was passed."""
    return every > 0 and int(after / every) > int(before / every)


def _with_own_parts(config: Config, model: nn.Module | None, data: Any) -> Config:
    """The config as it is saved: a module or data of the caller's own are named as such."""
    if model is not None:
        config = replace(config, model=f"own {type(model).__name__}")
    if data is not None:
        config = replace(config, data=replace(config.data, source="own"))
    return config


def _diverged(told: Told, config: Config) -> bool:
    """A loss that is no number ends the run; in fp16 it may be an overflow that a skip mends."""
    return not math.isfinite(told.loss) and config.precision != "fp16"


def _diagnosis(
    told: Told,
    parts: Parts,
    recent: deque[tuple[Step, list[tuple[int, Tensor]]]],
    folder: RunFolder,
    cluster: Cluster,
) -> RunFailed:
    """What is known of a step whose loss or gradient is not a finite number.

    Its update was left out, so the weights are still those before it.
    """
    losses = next(losses for step, losses in recent if step == told.step)
    bad = [first for first, loss in losses if not math.isfinite(float(loss))]
    found: list[Any] = [bad]
    if cluster.world > 1:
        found = [None] * cluster.world
        torch.distributed.all_gather_object(found, bad)
    positions = sorted(first for part in found for first in part)
    norms = {name: float(p.detach().norm()) for name, p in parts.net.named_parameters()}
    step = told.step
    record = {
        "step": step.index,
        "epoch": step.epoch,
        "loss": str(told.loss),
        "loss_scale": told.loss_scale,
        "positions": [step.seen, step.seen + step.batch],
        "micro_batches_with_bad_loss": positions,
        "weight_norms": norms,
    }
    folder.write("diagnosis.json", record)
    largest = sorted(norms, key=lambda name: -norms[name])[:3]
    where = f"at positions {positions[:5]}" if positions else "in the gradient, not in the loss"
    saved = checkpoint.newest(folder.path / "checkpoints") if folder.path else None
    return RunFailed(
        f"step {step.index} (epoch {step.epoch:.2f}) has no finite "
        f"{'loss' if positions else 'gradient'}: loss {told.loss}, "
        f"images at positions {step.seen} to {step.seen + step.batch - 1}, found {where}; "
        f"largest weights: "
        + ", ".join(f"{name} |w| {norms[name]:.3g}" for name in largest)
        + "; "
        + (f"last good checkpoint: {saved}; " if saved else "")
        + "lower the rate, lengthen the warm-up or check those images"
    )
