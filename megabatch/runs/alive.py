"""Whether the process that writes a run is still there: a mark it leaves, and the question.

The mark names a boot of a machine, a namespace of process numbers, a number and when the process
began, so that a number used again, another machine or a container is never mistaken for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megabatch.elastic.processes import look_at

_PROC = Path("/proc")


def mark(pid: int | None = None) -> dict[str, Any]:
    """Of this process, or another; empty where the system does not tell."""
    pid = os.getpid() if pid is None else pid
    began = _began(pid)
    return {**_where(), "pid": pid, "began": began} if began is not None else {}


def gone(mark: object) -> bool:
    """Whether the marked process has ended; False where that cannot be known from here."""
    if not isinstance(mark, dict) or not isinstance(mark.get("pid"), int):
        return False
    here = _where()
    if not here or any(mark.get(name) != value for name, value in here.items()):
        return False
    return _began(mark["pid"]) != mark.get("began")


def _where() -> dict[str, str]:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.readlink(_PROC / "self/ns/pid")}
    except OSError:
        return {}


def _began(pid: int) -> int | None:
    """When a process began, in ticks since boot; None where there is none, or only its remains."""
    process = look_at(pid)
    return None if process is None or process.ended else process.began
