"""How long a call takes: medians, and on a GPU by tens, since the host runs ahead of the device; on
a CPU several calls by turns, since others may use it too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from megabatch.errors import UserError


def check_seconds(seconds: float) -> None:
    """Refuse, before anything is measured, a time in which nothing can be."""
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds:g}; give more than 0")


def time_of(work: Callable[[], object], seconds: float, device: str) -> float:
    """Median time of a call; the first ones are not counted."""
    calls = 10 if device == "cuda" else 1

    def timed() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    for _ in range(3):
        timed()
    taken = [timed()]
    while sum(taken) * calls < seconds or len(taken) < 5:
        taken.append(timed())
    return statistics.median(taken)


def busy_time_of(work: Callable[[], object], calls: int = 20) -> float:
    """Time of a GPU's own work in a call, without what it waits for the host: in training the host
    is ahead of it."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    busy: float = sum(event.self_device_time_total for event in seen.key_averages())
    return busy / calls / 1e6


def by_turns(
    works: Mapping[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times of calls on the host that take turns for so long each, so that whatever else the
    machine does meets all of them; the first ones are not counted."""
    for work in works.values():
        for _ in range(3):
            work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    ends, rounds = time.perf_counter() + seconds * len(works), 0
    while time.perf_counter() < ends or rounds < 5:
        for name, work in works.items():
            began = clock()
            work()
            taken[name].append(clock() - began)
        rounds += 1
    return taken


def times_faster(ours: list[float], theirs: list[float]) -> float:
    """The median over turns of their time over ours."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def bandwidth(device: str, seconds: float = 0.5, nbytes: int = 1 << 28) -> float:
    """Bytes a second that a plain copy reads and writes."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: target.copy_(source), seconds, device)
