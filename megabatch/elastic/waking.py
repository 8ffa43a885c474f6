"""Processes that were stopped, made to go on: one that stands still cannot see that whom it works
for is gone, nor do what is waited for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker

from megabatch.elastic.processes import look_at

_LOOK_SECONDS = 1.0


def continue_when_closed(pipe: int, process: int) -> None:
    """Have the system continue a process when the other end of its pipe is closed, by whoever's
    death; nothing may be written to that pipe any more."""
    if sys.platform == "linux":  # elsewhere the signal cannot be chosen, and SIGIO would kill
        fcntl.fcntl(pipe, fcntl.F_SETOWN, process)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def wake(processes: Iterable[int]) -> None:
    """Those of them that are stopped."""
    for process in processes:
        found = look_at(process)
        if found is not None and found.stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGCONT)


def attendants() -> tuple[int, ...]:
    """The processes that multiprocessing keeps beside this one: the server that workers are forked
    from, and the tracker of what they share."""
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tracker: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return tuple(process for process in (server, tracker) if process is not None)


@contextlib.contextmanager
def attendants_awake() -> Iterator[None]:
    """Whoever asks the server for a worker, or how one ended, waits for its answer without end."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            wake(attendants())

    thread = threading.Thread(target=look, name="attendants", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        wake(attendants())  # they end with this process, by what they see
