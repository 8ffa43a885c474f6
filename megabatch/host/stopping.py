"""Requests to stop a run: SIGTERM, SIGUSR1 and Ctrl-C only raise a flag, from its first moment on.

One that comes while the run is still being set up is kept until there is a run to stop. Asked
again, a run ends at once, as KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_kept: list[int] = []
_keepers = 0
_TWICE_SECONDS = 0.5


class StopAsked:
    """Whether a run was asked to stop. One Ctrl-C may arrive twice, from the terminal and from who
    started this process, so only what comes well after the first is a second."""

    def __init__(self) -> None:
        self.when: float | None = None

    def ask(self) -> bool:
        """Whether this is the first time; a second ends the run at once."""
        now, first = time.monotonic(), self.when is None
        if self.when is not None and now - self.when >= _TWICE_SECONDS:
            raise KeyboardInterrupt
        self.when = self.when or now
        return first


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
    global _keepers
    with answering(_kept.append):
        _keepers += 1
        try:
            yield
        finally:
            _keepers -= 1
            _kept.clear()


def stop_is_kept() -> bool:
    """Whether a request waits for who takes it."""
    return bool(_kept)


def take_stop_requests() -> list[int]:
    taken = list(_kept)
    _kept.clear()
    return taken


@contextlib.contextmanager
def stop_requests(speaks: bool, stop: StopAsked | None = None) -> Iterator[Callable[[], bool]]:
    """Whether a stop was asked for; the control vector tells the other workers. `stop` may know of
    one already, and stays its caller's. A run that ends leaves what it was asked to whoever keeps
    requests: it may have come too late for this run, but not for the next."""
    remembered, stop, ended = stop is not None, stop or StopAsked(), False

    def ask(_: int) -> None:
        if stop.ask() and speaks:
            # Not print(): the signal may have come while something was being printed. At a terminal
            # it may have come behind a bar, whose line is taken back.
            bar = b"\r\x1b[2K" if os.isatty(2) else b""
            words = b"stopping after this step, with a checkpoint; again ends it at once\n"
            os.write(2, bar + words)

    try:
        with answering(ask):
            if take_stop_requests():
                ask(0)
            yield lambda: stop.when is not None
        ended = True
    finally:
        if stop.when is not None and _keepers and (ended or not remembered):
            _kept.append(signal.SIGTERM)
