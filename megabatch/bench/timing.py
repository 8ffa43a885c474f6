"""How long a call takes: medians, and on a GPU by tens, since the host runs ahead of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


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


def bandwidth(device: str, seconds: float = 0.5, nbytes: int = 1 << 28) -> float:
    """Bytes a second that a plain copy reads and writes."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: target.copy_(source), seconds, device)
