"""A study's runs, one after another in one process: they share the opened images and whatever was
compiled for the first of them.

What is finished stays and is not run again; what was stopped goes on; what fails is written down,
and the others run all the same.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.opening import open_sources
from megabatch.data.resident import on_device
from megabatch.data.source import Source
from megabatch.durable import lock, remove
from megabatch.errors import RunFailed, UserError
from megabatch.runs.alive import mark
from megabatch.runs.progress import clock
from megabatch.study.trials import Trial, state, write_label
from megabatch.training import Summary, train

Say = Callable[[str], None]


class SharedImages:
    """The images that runs were last opened for; another data set takes their place."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._opened: tuple[object, tuple[Source, Source]] | None = None

    def of(self, config: Config) -> tuple[Source, Source]:
        seed = config.seed if config.data.kind == "synthetic" else 0
        key = (config.data, seed)
        if self._opened is None or self._opened[0] != key:
            self._opened = None  # before the next are brought to the device
            train_set, val_set = open_sources(config, None, self._cluster)
            placed = (
                on_device(train_set, config, self._cluster),
                on_device(val_set, config, self._cluster),
            )
            self._opened = key, placed
        return self._opened[1]


class TimeLeft:
    """How long the rest will take: by the pace of the runs of the same batch, or of any."""

    def __init__(self) -> None:
        self._paces: dict[int, list[float]] = {}

    def ran(self, trial: Trial, seconds: float) -> None:
        self._paces.setdefault(trial.batch, []).append(seconds / trial.config.epochs)

    def of(self, rest: list[Trial]) -> float | None:
        every = [pace for paces in self._paces.values() for pace in paces]
        if not every:
            return None
        found = 0.0
        for trial in rest:
            paces = self._paces.get(trial.batch, every)
            found += trial.config.epochs * sum(paces) / len(paces)
        return found


def sweep(
    trials: list[Trial],
    out: Path,
    cluster: Cluster,
    say: Say,
    *,
    retry: bool = False,
    keep_checkpoints: bool = False,
    verbose: bool = False,
) -> str:
    """Run what is not finished yet; every worker of the cluster calls it. Returns how it ended:
    finished or stopped (on request, between two runs or inside one, which then has a
    checkpoint)."""
    with _held(out, cluster):
        states = cluster.agree(lambda: [state(out / trial.name, trial) for trial in trials])
        over = ("finished",) if retry else ("finished", "failed")
        waiting = [trial for trial, now in zip(trials, states, strict=True) if now not in over]
        say(_plan_in_words(trials, states, retry))
        images, left = SharedImages(cluster), TimeLeft()
        for number, trial in enumerate(waiting):
            place, began = out / trial.name, time.monotonic()
            if cluster.first:
                if retry and state(place, trial) == "failed":
                    remove(place)
                write_label(place, trial)
            cluster.barrier()
            to_go = left.of(waiting[number:])
            say(
                f"run {number + 1} of {len(waiting)}: {trial.name}"
                + (f"; left {clock(to_go)}" if to_go is not None else "")
            )
            summary, failure = _run(trial, place, cluster, images, verbose)
            if summary is not None and summary.ended == "stopped":
                return "stopped"
            left.ran(trial, time.monotonic() - began)
            if failure is not None and cluster.first:
                write_label(place, trial, failure)
            elif cluster.first and not keep_checkpoints:
                with contextlib.suppress(OSError):
                    remove(place / "checkpoints")
            say(f"{trial.name}: {_in_words(summary, failure)}")
            gc.collect()  # a net that is gone leaves its memory to the next
            if cluster.device.type == "cuda":
                torch.cuda.empty_cache()
        return "finished"


def _run(
    trial: Trial, place: Path, cluster: Cluster, images: SharedImages, verbose: bool
) -> tuple[Summary | None, str | None]:
    """How one run ended, or why it failed."""
    try:
        config = trial.config
        return train(
            config,
            cluster=cluster,
            out=place,
            resume=True,
            quiet=not verbose,
            sources=images.of(config),
        ), None
    except (RunFailed, UserError) as error:
        return None, str(error)
    except Exception as error:
        if cluster.world > 1:  # the others are in the middle of a step
            raise
        return None, f"{type(error).__name__}: {error}"


def _in_words(summary: Summary | None, failure: str | None) -> str:
    if summary is None:
        return f"failed: {failure}"
    return (
        f"top-1 {summary.top1:.2%} after {summary.steps:,} steps in {summary.seconds:.1f} s, "
        f"{summary.images_per_second:,.0f} images/s"
    )


def _plan_in_words(trials: list[Trial], states: list[str], retry: bool) -> str:
    finished, failed = states.count("finished"), states.count("failed")
    words = [f"{len(trials)} runs"]
    if finished:
        words.append(f"{finished} are finished already")
    if failed:
        words.append(f"{failed} failed before" + ("" if retry else " (--retry runs them again)"))
    return ", ".join(words)


@contextlib.contextmanager
def _held(out: Path, cluster: Cluster) -> Iterator[None]:
    """The study's folder, for this process alone."""

    def take() -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            held = lock(out / "lock", lambda: json.dumps(mark()) + "\n")
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
        if held is None:
            raise UserError(f"another process runs the study in {out}: wait for its end")
        ending.callback(held.close)

    with contextlib.ExitStack() as ending:
        cluster.agree(take)
        yield


def for_study(config: Config) -> Config:
    """A run that keeps little: checkpoints only where a long one may be interrupted."""
    return replace(config, save_every=max(config.save_every, config.epochs / 3), keep=1)
