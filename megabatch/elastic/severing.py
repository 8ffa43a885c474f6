"""Connections of this process with given others, shut: whoever waits for one of them, here or
there, waits no longer.

gloo offers no way to end a sum that waits for a worker which will never come. Its sockets can be
shut from beside it: it takes that for the other's end. They are known by who holds the other end,
so that connections to anything else stay. Where this process waits for connections, the system says
too.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"


def sever(processes: Iterable[int]) -> None:
    """Shut all TCP connections between this process and those; where the system does not tell them
    apart, none."""
    ends = _ends()
    others = [process for process in processes if process != os.getpid()]
    theirs = {ends[key][0] for other in others for _, key in _sockets(other) if key in ends}
    for descriptor, key in _sockets(os.getpid()):
        if key in ends and ends[key][1] in theirs:
            # On a duplicate: whose it is may close its own at the same time.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                connection.shutdown(socket.SHUT_RDWR)


def listening() -> Iterator[int]:
    """Ports at which this process waits for connections."""
    ports = _ends(_LISTENS)
    for _, key in _sockets(os.getpid()):
        if key in ports:
            yield int(ports[key][0].rpartition(":")[2], 16)


def _sockets(process: int) -> Iterator[tuple[int, str]]:
    """Descriptors of a process that are sockets, and their numbers in the system."""
    with contextlib.suppress(OSError):
        for entry in (_PROC / str(process) / "fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(entry).partition(":")
                if kind == "socket":
                    yield int(entry.name), number.strip("[]")


def _ends(state: str = "") -> dict[str, tuple[str, str]]:
    """A socket's number -> its own address and the other's, as the system writes them; of those in
    any state, or in one."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "self/net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if state in ("", words[3]):
                    found[words[9]] = (words[1], words[2])
    return found
