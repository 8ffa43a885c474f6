"""What the system says of the processes on this machine: their state, parents and beginnings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    state: str
    """a letter: R, S, D live, T is stopped, Z and X have ended"""
    parent: int
    began: int
    """in ticks since boot: a number that is used again does not look the same"""

    @property
    def ended(self) -> bool:
        """Whether nothing is left but that nobody took note of its end."""
        return self.state in ("Z", "X")

    @property
    def stopped(self) -> bool:
        return self.state == "T"


def look_at(number: int) -> Process | None:
    """A process by its number; None where there is none, or none to be seen."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # After the name, which is in brackets and may hold anything: the state, then numbers.
    state, parent, *numbers = text.rpartition(")")[2].split()
    return Process(state, int(parent), int(numbers[17]))


def all_processes() -> dict[int, Process]:
    """By number; those that have ended are among them until somebody has taken note of it."""
    numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return {number: found for number in numbers if (found := look_at(number)) is not None}


def children(parent: int) -> list[int]:
    """The numbers of those that a process has started and that have not ended."""
    return [
        number
        for number, process in all_processes().items()
        if process.parent == parent and not process.ended
    ]
