"""Requests to stop a run: SIGTERM and Ctrl-C only raise a flag, from the moment a run is started.

One that comes while the run is still being set up is kept until there is a run to stop.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_kept: list[int] = []


@contextlib.contextmanager
def answering(answer: Callable[[int], object]) -> Iterator[None]:
    """Call `answer` with each signal's number; elsewhere than in the main thread there are none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda n, _: answer(n)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def keep_stop_requests() -> Iterator[None]:
    """Keep requests for whoever takes them."""
    with answering(_kept.append):
        try:
            yield
        finally:
            _kept.clear()


def take_stop_requests() -> list[int]:
    taken = list(_kept)
    _kept.clear()
    return taken


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether a stop was asked for; the control vector tells the other workers."""
    asked: list[int] = []
    with answering(asked.append):
        asked += take_stop_requests()
        yield lambda: bool(asked)
