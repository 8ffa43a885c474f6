"""Waiting for the thing itself. A deadline only bounds a failure, so it is long: what takes a
second on a quiet machine may take many beside others."""

import time
from contextlib import suppress
from pathlib import Path

PATIENCE_SECONDS = 240
"""below pytest's own timeout, which would tell less of what was waited for"""


def until(holds, what="what is waited for", process=None):
    """What `holds` returns once that is true; a `process` that should bring it about must live."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := holds()):
        assert process is None or process.poll() is None, f"the process ended before {what}"
        assert time.monotonic() < deadline, f"{what} did not come in {PATIENCE_SECONDS} s"
        time.sleep(0.005)
    return found


def state(pid):
    """The letter by which the system says what a process does; X where there is none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def running(pid):
    """Whether a process does something still; one whose end nobody has taken note of does not."""
    return state(pid) not in "ZX"


def gone(processes):
    until(lambda: not any(map(running, processes)), "the end of all processes")
    return True
