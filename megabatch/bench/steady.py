"""Whether a measurement can be trusted: how far apart the turns of one and the same work lie."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_FIRST = 3
"""turns that warm up"""
_STEADY = 1.25
"""the slower quarter of turns over the faster one, of a machine that does nothing else"""


def noted(work: Callable[[], None]) -> tuple[list[float], Callable[[], None]]:
    """The same work on the host, and a list of the seconds that each turn takes."""
    taken: list[float] = []

    def timed() -> None:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)

    return taken, timed


def unsteady(taken: list[float]) -> str | None:
    """One sentence where turns lie too far apart; None where they do not, or are too few."""
    turns = taken[_FIRST:]
    if len(turns) < 4:
        return None
    fast, middle, slow = statistics.quantiles(turns)
    if slow <= _STEADY * fast:
        return None
    return (
        f"the machine is unsteady: a quarter of the steps took over {slow / middle:.2f} times the "
        f"median, a quarter under {fast / middle:.2f}; end what else runs, or give more --seconds"
    )
