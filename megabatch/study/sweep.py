"""A study's runs, one after another in one process: they share the opened images and whatever was
compiled for the first of them.

What is finished stays and is not run again; what was stopped goes on; what fails is written down,
and the others run all the same. A worker that is lost is no failure of the run it was in, which
goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megabatch.between_steps import Summary
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.opening import open_sources
from megabatch.data.resident import on_device
from megabatch.data.source import Source, for_tuning
from megabatch.elastic.link import supervised
from megabatch.elastic.worlds import Regroup
from megabatch.errors import RunFailed, UserError
from megabatch.host.durable import lock, remove
from megabatch.host.stopping import stop_is_kept
from megabatch.runs.alive import mark
from megabatch.runs.progress import Due, clock
from megabatch.runs.verdict import beforehand
from megabatch.study.results import read
from megabatch.study.trials import (
    StudyPlan,
    Trial,
    check_beside,
    has_ended,
    mend_label,
    state,
    write_label,
)
from megabatch.sync.heartbeat import Stalled
from megabatch.training import train

Say = Callable[[str], None]


class OpenedImages:
    """The images that runs were last opened for; another data set takes their place."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._opened: tuple[object, tuple[Source, Source]] | None = None

    def of(self, config: Config) -> tuple[Source, Source]:
        seed = config.seed if config.data.kind == "synthetic" else 0
        untuned = replace(config.data, tuning_share=0.0)
        key = (untuned, seed)
        if self._opened is None or self._opened[0] != key:
            self._opened = None  # before the next are brought to the device
            train_set, val_set = open_sources(replace(config, data=untuned), None, self._cluster)
            placed = (
                on_device(train_set, config, self._cluster),
                on_device(val_set, config, self._cluster),
            )
            self._opened = key, placed
        return for_tuning(self._opened[1], config.data.tuning_share)


class TimeLeft:
    """How long the rest will take: by the pace of the runs of the same batch, or of any."""

    def __init__(self) -> None:
        self._paces: dict[int, list[float]] = {}

    def ran(self, trial: Trial, seconds: float) -> None:
        """A whole run took so long: one that failed tells nothing of the others."""
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


class StudyProgress:
    """What a worker has spoken of, and the paces of the runs it saw: both last as long as it does,
    over all worlds that it meets in."""

    def __init__(self) -> None:
        self.left = TimeLeft()
        self._subjects = set[str]()

    def once(self, say: Say, words: str, about: str | None = None) -> None:
        """Say it, unless that was said before, or something else `about` the same."""
        about = words if about is None else about
        if about not in self._subjects:
            self._subjects.add(about)
            say(words)


class Voice:
    """A logger that says now and then how far a long run is."""

    def __init__(self, trial: Trial, say: Say, due: Callable[[], bool] | None = None) -> None:
        self._trial, self._say, self._due = trial, say, due or Due()

    def begin(self, about: Mapping[str, Any]) -> None:
        """The study has said that it begins."""

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind == "evaluation" and self._due():
            of = f"{record['epoch']:.1f} of {self._trial.config.epochs:g} epochs"
            self._say(f"{self._trial.name}: {of}, top-1 {record['top1']:.2%}")

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The study says how it ended."""


def study(
    plan: StudyPlan,
    out: Path,
    cluster: Cluster,
    say: Say,
    *,
    retry: bool = False,
    keep_checkpoints: bool = False,
    verbose: bool = False,
    progress: StudyProgress | None = None,
) -> str:
    """Run what is not finished yet: the probe, the search for rates, then the runs themselves.

    Every worker of the cluster calls it, again where it raised Regroup or a worker was lost, then
    without `retry` and with the `progress` of the time before. Returns how it ended: finished or
    stopped (on request; the run that was under way then has a checkpoint).
    """
    progress = progress or StudyProgress()
    with _held(out, cluster):
        if retry:
            cluster.agree(partial(_forget_failures, plan, out))
        for config in plan.configs.values():
            for name, value, why in config.summed(cluster.world, None):
                if value == "none":  # it gives way, which the runs would say if they spoke
                    progress.once(say, f"{name} {value}: {why}")
        sweep = Sweep(out, cluster, say, keep_checkpoints, verbose, progress)
        searching, running = plan.search(), plan.runs({})
        if plan.probe:
            then = [*searching, *running]
            if sweep.run_all(plan.probes(), "a probe of the noise", then) == "stopped":
                return "stopped"
            progress.once(say, cluster.agree(lambda: read(out).forecast_in_words()))
        if plan.rates and sweep.run_all(searching, "the search for rates", running) == "stopped":
            return "stopped"
        # Those of an earlier search too: a study that grows keeps its rates.
        factors, lines = cluster.agree(lambda: _chosen_rates(out, plan))
        for line in lines:
            progress.once(say, line)
        chosen = plan.runs(factors)
        cluster.agree(lambda: check_beside(out, chosen))
        return sweep.run_all(chosen, "the runs")


def _chosen_rates(out: Path, plan: StudyPlan) -> tuple[dict[tuple[str, int], float], list[str]]:
    found = read(out)
    found.check_searched(plan.configs, {trial.name for trial in plan.search()})
    return found.chosen_factors(), list(found.search_in_words())


def _forget_failures(plan: StudyPlan, out: Path) -> None:
    for trial in (*plan.probes(), *plan.search(), *plan.runs(read(out).chosen_factors())):
        if state(out / trial.name, trial) == "failed":
            remove(out / trial.name)


class Sweep:
    """Runs one after another into a folder, over the same images."""

    def __init__(
        self,
        out: Path,
        cluster: Cluster,
        say: Say,
        keep_checkpoints: bool,
        verbose: bool,
        progress: StudyProgress,
    ) -> None:
        self._out, self._cluster, self._say = out, cluster, say
        self._keep, self._verbose = keep_checkpoints, verbose
        self._images, self._progress = OpenedImages(cluster), progress

    def run_all(self, trials: list[Trial], what: str, then: Sequence[Trial] = ()) -> str:
        """Run those that have not ended yet; returns how that went: finished or stopped. What is to
        be run `then` counts for the time that is left."""
        out, cluster, say = self._out, self._cluster, self._say
        states = cluster.agree(lambda: [self._state(trial) for trial in trials])
        over = "finished", "failed"
        waiting = [trial for trial, now in zip(trials, states, strict=True) if now not in over]
        ended = len(trials) - len(waiting)
        later = cluster.agree(lambda: [trial for trial in then if not has_ended(out / trial.name)])
        self._progress.once(say, f"{what}: {_plan_in_words(states)}", about=what)
        for number, trial in enumerate(waiting):
            place, began = out / trial.name, time.monotonic()
            cluster.agree(partial(write_label, place, trial))
            # One that came in the last moments of a run, on any worker, stops the next.
            if any(cluster.gather(stop_is_kept())):
                return "stopped"
            left = self._progress.left.of([*waiting[number:], *later])
            say(
                f"run {ended + number + 1} of {len(trials)}: {trial.name}"
                + (f"; left {clock(left)}" if left is not None else "")
            )
            summary, failure = self._run(trial)
            if summary is not None and summary.ended == "stopped":
                return "stopped"
            if summary is not None:  # its own seconds count those before it was resumed too
                self._progress.left.ran(trial, max(summary.seconds, time.monotonic() - began))
            self._ended(trial, failure)
            say(f"{trial.name}: {_in_words(trial, summary, failure)}")
            if failure is not None and supervised() is not None:
                raise Regroup  # if it was here alone (a disk, say), the others wait in a step
        return "finished"

    def _state(self, trial: Trial) -> str:
        found = state(self._out / trial.name, trial)
        if found == "finished":
            mend_label(self._out / trial.name, trial)
        return found

    def _run(self, trial: Trial) -> tuple[Summary | None, str | None]:
        """How one run ended, or why it failed."""
        try:
            sources = self._images.of(trial.config)
            if not self._verbose:  # else the run says it
                for words in beforehand(trial.config, len(sources[0])):
                    self._progress.once(self._say, f"{trial.name}: {words}", about=words)
            summary = train(
                trial.config,
                cluster=self._cluster,
                out=self._out / trial.name,
                resume=True,
                quiet=not self._verbose,
                loggers=() if self._verbose else [Voice(trial, self._say)],
                sources=sources,
            )
        except Stalled:  # a worker's failure, and no fault of the run's
            raise
        except (RunFailed, UserError) as error:
            return None, str(error)
        except Exception as error:
            link = supervised()
            lost = link.explains(error) if link is not None else self._cluster.world > 1
            if lost:  # or, with no supervisor to tell, others in the middle of a step
                raise
            return None, f"{type(error).__name__}: {error}"
        return summary, None

    def _ended(self, trial: Trial, failure: str | None) -> None:
        place = self._out / trial.name
        if failure is not None:
            # Perhaps this worker alone failed, perhaps all at once: then one of them tells.
            with contextlib.suppress(OSError, UserError):
                held = lock(place / ".failing")
                if held is not None:
                    with held:
                        write_label(place, trial, failure)
        elif self._cluster.first and not self._keep:
            with contextlib.suppress(OSError):
                remove(place / "checkpoints")
        gc.collect()  # a net that is gone leaves its memory to the next
        if self._cluster.device.type == "cuda":
            torch.cuda.empty_cache()


def _in_words(trial: Trial, summary: Summary | None, failure: str | None) -> str:
    if summary is None:
        return f"failed: {failure}"
    judged = " of held-out training images" if trial.kind == "rate" else ""
    top1 = "" if trial.kind == "probe" else f"top-1 {summary.top1:.2%}{judged} after "
    return (
        f"{top1}{summary.steps:,} steps in {summary.seconds:.1f} s, "
        f"{summary.images_per_second:,.0f} images/s"
    )


def _plan_in_words(states: list[str]) -> str:
    finished, failed = states.count("finished"), states.count("failed")
    words = [str(len(states))]
    if finished:
        words.append(f"{finished} finished already")
    if failed:
        words.append(f"{failed} failed before (--retry runs them again)")
    return ", ".join(words)


@contextlib.contextmanager
def _held(out: Path, cluster: Cluster) -> Iterator[None]:
    """The study's folder, for this process alone."""

    def take() -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            held = lock(out / "lock", lambda: json.dumps(mark()) + "\n")
        except OSError as error:
            where = error.filename or out
            raise UserError(
                f"{where} cannot be written: {error.strerror or error}; make it writable, or name "
                f"another --out"
            ) from None
        if held is None:
            raise UserError(f"another process runs the study in {out}: wait for its end")
        ending.callback(held.close)

    with contextlib.ExitStack() as ending:
        cluster.agree(take)
        yield
