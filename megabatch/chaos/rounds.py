"""Rounds of chaos: the undisturbed run once, then runs with faults, each held against it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megabatch.chaos.faults import Fault
from megabatch.chaos.job import TrainingJob
from megabatch.errors import DONE, FAILED, MISTAKE, STOPPED, RunFailed

_LOOK_SECONDS = 0.01
_STUCK_SECONDS = 300.0
"""a job that neither goes on nor ends for so long hangs"""
# How a job may end that something happened to: in words, on request, or killed with everyone.
_EXPECTED = (FAILED, STOPPED, -9)

Say = Callable[[str], None]
Asked = Callable[[], bool]
"""whether this chaos was asked to end"""


@dataclass
class Outcome:
    """What became of one round."""

    equal: bool
    struck: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    """times that the job was started"""
    seconds: float = 0.0


def _never() -> bool:
    return False


def undisturbed(job: TrainingJob, stop: Asked = _never) -> dict[str, Any]:
    """The summary of a run that nothing happens to."""
    with job:
        job.start(resume=False)
        while job.status is None:
            _look_again(stop)
        if job.status != DONE:
            raise RunFailed(f"the undisturbed run failed: {job.last_words()}")
        return job.result


def disturbed(
    job: TrainingJob,
    faults: Sequence[tuple[str, Fault]],
    wanted: dict[str, Any],
    say: Say,
    stop: Asked = _never,
) -> Outcome:
    """One round: the faults, in order, and the end held against that of the whole run."""
    began, outcome, waiting = time.monotonic(), Outcome(False, begun=1), list(faults)
    looked, moved, unexplained = began, -1, 0
    with job:
        job.start(resume=False)
        while (status := job.status) != DONE:
            now = time.monotonic()
            if status is not None:
                # A disk that is full when workers regroup is full before they begin.
                expected = status in _EXPECTED or (status == MISTAKE and job.full)
                if not expected or not unexplained:
                    raise RunFailed(f"the job ended with status {status}: {job.last_words()}")
                unexplained, looked = 0, now
                outcome.begun += 1
                job.start(resume=True)
            job.tend()
            seen = job.seen()
            if seen != moved:
                looked, moved = now, seen
            # Lost workers are not there at once again, and a launcher is no worker.
            if waiting and seen >= waiting[0][1].at * wanted["seen"] and job.workers():
                kind, fault = waiting.pop(0)
                say(f"  at {seen:,} images: {fault}")
                fault.strike(job)
                outcome.struck[kind] += 1
                unexplained += 1
            if now - looked > _STUCK_SECONDS:
                raise RunFailed(f"the job hangs at {seen} images: {job.last_words()}")
            _look_again(stop)
        covered = job.steps() == list(range(wanted["steps"]))
        outcome.equal = covered and job.result["weights_sha256"] == wanted["weights_sha256"]
        if not covered:
            say(f"  its metrics tell of steps {job.steps()}, not of each of {wanted['steps']} once")
    outcome.seconds = time.monotonic() - began
    return outcome


def _look_again(stop: Asked) -> None:
    """A moment later; who was asked to end does so here, where the job is known and ends too."""
    if stop():
        raise KeyboardInterrupt
    time.sleep(_LOOK_SECONDS)
