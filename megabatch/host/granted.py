"""What this process may take: the machine's memory and time, or what a container or a scheduler
grants of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Granted(NamedTuple):
    """In bytes."""

    free: int
    total: int


def memory(system: Path = Path("/")) -> Granted | None:
    """Free is what can be had, of the system's caches too; None where the system does not tell."""
    try:
        lines = (line.split() for line in (system / "proc/meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    except (OSError, KeyError):  # no Linux
        return None
    for limit, used in _memory_limits(system):
        free, total = min(free, limit - used), min(total, limit)
    return Granted(max(0, free), total)


def cpu_quotas(system: Path) -> Iterator[float]:
    """How many cores' time each of the groups around this process has."""
    for group in _groups(system):
        match _words(group / "cpu.max"):
            case [quota, period] if quota != "max":
                yield int(quota) / int(period)


def _memory_limits(system: Path) -> Iterator[tuple[int, int]]:
    """Limits, and what is taken of them for good: caches of files give way."""
    for group in _groups(system):
        match _words(group / "memory.max"), _words(group / "memory.current"):
            case [limit], [used] if limit != "max":
                pairs = _words(group / "memory.stat")
                taken = dict(zip(pairs[::2], pairs[1::2], strict=False))
                files = sum(int(taken.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
                yield int(limit), max(0, int(used) - files)


def _groups(system: Path) -> Iterator[Path]:
    """The control groups (version 2) this process is in, from its own up to the root's."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    root = system / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::/"):
            own = Path(line[4:])
            yield from (root / place for place in (own, *own.parents))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
