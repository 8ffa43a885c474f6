"""Training: train(config) is the loop, read from top to bottom; evaluate counts every image
once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch import checkpoint, models
from megabatch.batch import deal, steps
from megabatch.batchnorm import move_averages, statistics, statistics_length, use_spans
from megabatch.cluster import Cluster
from megabatch.config import Config, UserError
from megabatch.data.loader import Loader, MicroBatch, validation
from megabatch.data.source import Source, open_sources
from megabatch.keyed import Purpose, key_dropout, keyed, set_positions
from megabatch.metrics import Log, Pending, drop_after, environment, show_table
from megabatch.optim import LARS, parameter_groups
from megabatch.sync import GradientSum, TreeSum

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# The control vector after its reserved entries: loss sum, top-1 count, top-5 count, then batch
# norm's.
_COUNTS = 3


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
    folder = None if out is None else Path(out)
    with (
        _settings(config, cluster),
        _stop_requests() as stop_asked,
        contextlib.ExitStack() as ending,
    ):
        train_set, val_set = open_sources(config, data)
        net = prepare(config, cluster, train_set.classes, model)
        optimizer = LARS(
            parameter_groups(net, config.optimizer.weight_decay, share=config.optimizer.share),
            lr=0.0,
            momentum=config.optimizer.momentum,
            trust=config.optimizer.trust,
            eps=config.optimizer.eps,
            nesterov=config.optimizer.nesterov,
            form=config.optimizer.form,
            momentum_correction=config.optimizer.momentum_correction,
        )
        engine = GradientSum(
            net,
            cluster,
            _COUNTS + statistics_length(net),
            tree=config.deterministic,
            bucket_bytes=config.bucket_mb * 1e6,
        )
        state = _begin(config, cluster, folder, resume, net, optimizer)
        images, total = len(train_set), config.epochs * len(train_set)
        if cluster.first and not quiet:
            show_table(config.derived(images, cluster.world), f"megabatch train {config.name}")
        log = Log(config, images, folder if cluster.first else None, quiet or not cluster.first)
        loader = Loader(train_set, config, cluster, _DTYPES[config.precision])
        ending.callback(log.close)
        ending.callback(loader.close)

        pending, result, ended = Pending(), state["evaluation"], "finished"
        earlier, idle, began = state["seconds"], 0.0, time.monotonic() - state["seconds"]
        first_seen, index, seen = state["seen"], state["steps"], state["seen"]
        if first_seen:
            log.say(f"resumed at step {index}, {seen:,} images seen, epoch {seen / images:.2f}")

        def save() -> None:
            state.update(
                seen=seen, steps=index, evaluation=result, seconds=time.monotonic() - began
            )
            if folder is not None and cluster.first:
                checkpoint.save(folder / "checkpoints", net, optimizer, state, config.keep)

        for step in steps(config.all_stages, images, config.epochs, index, seen):
            lr, momentum = config.lr_at(step.epoch, step.stage), config.momentum_at(step.stage)
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = lr, momentum

            count = step.batch // config.micro
            engine.begin(count)
            net.train()
            for micro in loader.share(step):
                engine.backward(*_forward(net, micro, step.batch, config))
            control = engine.finish(stop=stop_asked())
            optimizer.step()
            head = engine.RESERVED + _COUNTS
            move_averages(net, control[head:] / count, config.bn_momentum)

            index, seen, epoch = (
                step.index + 1,
                step.seen + step.batch,
                (step.seen + step.batch) / images,
            )
            told = pending.put(step, control[:head])
            if told is not None:
                log.step(told, config.lr_at(told.step.epoch, told.step.stage), momentum)
                if told.stop:
                    ended = "stopped"
                    break
            last = seen >= total
            paused = time.monotonic()
            if last or _due(step.epoch, epoch, config.eval_every):
                result = score(net, val_set, config, cluster)
                log.evaluation(index, seen, epoch, result)
                if config.target_accuracy is not None and result["top1"] >= config.target_accuracy:
                    ended = "target"
            if not last and ended == "finished" and _due(step.epoch, epoch, config.save_every):
                save()
            idle += time.monotonic() - paused
            if ended != "finished":
                break

        told = pending.take()
        if told is not None:
            log.step(told, lr, momentum)
        seconds = time.monotonic() - began
        trained = max(seconds - earlier - idle, 1e-9)
        save()
        cluster.barrier()
        summary = Summary(
            **result,
            steps=index,
            seen=seen,
            epochs=seen / images,
            seconds=seconds,
            images_per_second=(seen - first_seen) / trained,
            world=cluster.world,
            weights_sha256=checkpoint.weights_sha256(net),
            out=None if folder is None else str(folder),
            ended=ended,
        )
        if folder is not None and cluster.first:
            (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
        return summary


def prepare(
    config: Config, cluster: Cluster, classes: int, model: nn.Module | None = None
) -> nn.Module:
    """The module of a run: the same weights on every worker, batch norm by spans, dropout keyed."""
    torch.manual_seed(config.seed)
    net = model
    if net is None:
        net = models.build(config.model, classes, config.data.channels, config.data.size)
    use_spans(net, config.span)
    key_dropout(net, config.seed)
    net.to(cluster.device, _DTYPES[config.precision])
    if cluster.world > 1:
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
    return net


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
    config = Config.from_json(written.read_text())
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
    with _settings(config, cluster):
        _, val_set = open_sources(config, data)
        net = prepare(config, cluster, val_set.classes, model)
        checkpoint.load_weights(found, net)
        result = score(net, val_set, config, cluster)
    return {
        **result,
        "seen": checkpoint.seen(found),
        "checkpoint": str(found),
        "world": cluster.world,
    }


@torch.no_grad()
def score(net: nn.Module, source: Source, config: Config, cluster: Cluster) -> dict[str, float]:
    """Top-1, top-5 and loss over all images, each counted once on whichever worker has it."""
    net.eval()
    # Each micro-batch is a leaf of the tree: the loss too is the same on any number of workers.
    count = -(-len(source) // config.micro)
    total = TreeSum(_COUNTS, torch.empty(0, dtype=_DTYPES[config.precision], device=cluster.device))
    total.begin(count, deal(count, cluster.world)[cluster.rank])
    for images, labels in validation(source, config, cluster, _DTYPES[config.precision]):
        logits = net(images)
        total.push(_counts(logits, labels, cross_entropy(logits, labels, reduction="sum")))
    loss, top1, top5 = total.all_reduce(cluster, by_tree=True).tolist()
    return {"top1": top1 / len(source), "top5": top5 / len(source), "loss": loss / len(source)}


def _forward(
    net: nn.Module, micro: MicroBatch, batch: int, config: Config
) -> tuple[Tensor, Tensor]:
    """A micro-batch's loss, as its part of the mean over the global batch, and its control
    numbers."""
    set_positions(net, micro.positions)
    # For randomness of a caller's own module: torch's generator is keyed by position too.
    torch.manual_seed(keyed(config.seed, Purpose.GENERATOR, micro.first))
    logits = net(micro.images)
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


def _begin(
    config: Config,
    cluster: Cluster,
    folder: Path | None,
    resume: bool,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """The state a run begins with: nothing seen, or the newest good checkpoint's."""
    nothing = {"top1": 0.0, "top5": 0.0, "loss": float("nan")}
    state: dict[str, Any] = {"seen": 0, "steps": 0, "seconds": 0.0, "evaluation": nothing}
    if folder is None:
        if resume:
            raise UserError("resume was asked for but no run folder was named: give out")
        return state

    def choose() -> Path | None:
        written = folder / "config.json"
        if written.exists() and not resume:
            raise UserError(
                f"{folder} holds a run already: add --resume to go on with it, or name another "
                f"--out"
            )
        if written.exists():
            _same_run(Config.from_json(written.read_text()), config, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.write_text(config.to_json())
            (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
        except OSError as error:
            raise UserError(
                f"the run folder {folder} cannot be written: {error.strerror}"
            ) from error
        return checkpoint.newest(folder / "checkpoints")

    found = cluster.agree(choose)
    if found is not None:
        state = checkpoint.load(found, net, optimizer)
    if cluster.first:
        drop_after(folder / "metrics.jsonl", state["seen"])
    return state


def _same_run(before: Config, now: Config, folder: Path) -> None:
    """A run goes on as it began: what shapes the result may not change."""
    free = {"eval_every", "save_every", "keep", "target_accuracy", "bucket_mb"}
    old, new = asdict(before), asdict(now)
    for name in sorted(old.keys() - free):
        if old[name] != new[name]:
            raise UserError(
                f"{folder} was begun with {name} {old[name]} but {new[name]} is asked for now: "
                f"resume with the same settings, or name another --out"
            )


@contextlib.contextmanager
def _settings(config: Config, cluster: Cluster) -> Iterator[None]:
    """Threads and kernels: fixed ones for a deterministic run, otherwise a fair share of the
    cores."""
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    if config.deterministic:
        torch.set_num_threads(1)
    elif cluster.device.type == "cpu":
        torch.set_num_threads(max(1, cores // cluster.local_world))
    exact = torch.are_deterministic_algorithms_enabled()
    if config.deterministic and cluster.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact)


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C only raise a flag here; the control vector tells the other workers."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
