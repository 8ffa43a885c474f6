"""Runs with the names and colours that they have on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.runs.record import Record


@dataclass
class Named:
    """A run with the name and colour it has on this page."""

    name: str
    at: int
    record: Record


def named(records: Sequence[Record]) -> list[Named]:
    pairs = zip(names(records), records, strict=True)
    return [Named(name, at, record) for at, (name, record) in enumerate(pairs)]


def names(records: Sequence[Record]) -> list[str]:
    """The folders' names, with as many of their parents' as tell them apart."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        found = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(found)) == len(set(paths)):
            return found
    return [str(path) for path in paths]
