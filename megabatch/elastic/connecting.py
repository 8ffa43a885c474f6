"""Process groups are made while workers may be lost: nobody waits for a connection with the dead.

gloo cannot be called back while it connects the members of a group. Each member listens for some of
the others, and who calls says first which of its calls this is; where a worker is lost, whoever
still waits calls itself in place of the dead, and hangs up.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from megabatch.elastic.link import LostWorker, supervised
from megabatch.elastic.severing import listening

_AGAIN_SECONDS = 0.05
_CALL = struct.Struct("=q")
"""the first that gloo reads of a connection: a number below that of the members"""


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Process groups are made in here; every worker of this world makes them."""
    link = supervised()
    if link is None or link.world is None:
        yield
        return
    before, size, over = {*listening()}, link.world.size, threading.Event()

    def answer() -> None:
        answered = set(before)
        while not over.wait(_AGAIN_SECONDS):
            for port in {*listening()} - answered:
                answered.add(port)
                _call(port, size)

    link.say("meets")
    try:
        with link.telling(threading.Thread(target=answer, name="answering", daemon=True).start):
            if link.lost:
                raise LostWorker("a worker was lost before this group was made")
            yield
    finally:
        over.set()
    link.say("met")


def _call(port: int, size: int) -> None:
    for number in range(size):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
        ):
            connection.send(_CALL.pack(number))
