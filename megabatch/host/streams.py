"""Standard input, output and error, as a command may find them: closed, full, or of few letters.

A result that cannot be written is an error; progress that nobody can hear is not: a run outlives
its terminal, its log's disk and whoever read them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast


class Outlived:
    """A stream whose loss is no error: from the first write that fails on, it leads nowhere."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return self._lose(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lose("")

    def _lose(self, text: str) -> int:
        lead_nowhere(self._stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lead_nowhere(number: int) -> None:
    """What is written to this file from now on is gone, what waits in buffers too."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def prepare() -> None:
    """Once a process, before it opens a file: that would take a closed stream's place, and get what
    was meant for the stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            lead_nowhere(number)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 the process's own, to its end
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    error = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, error):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # of a name's letters that it does not have
    sys.stderr = error if isinstance(error, Outlived) else cast(TextIO, Outlived(error))
