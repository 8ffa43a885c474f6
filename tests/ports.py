"""Ports for what a test starts: below those that the system gives out by itself, or somebody's
connection might have one before its owner listens."""

import contextlib
import random
import socket

CHOICE = random.SystemRandom()


def free_ports(count):
    with contextlib.ExitStack() as ending:
        servers = []
        while len(servers) < count:
            with contextlib.suppress(OSError):
                place = ("127.0.0.1", CHOICE.randrange(10_000, 20_000))
                servers.append(ending.enter_context(socket.create_server(place)))
        return [server.getsockname()[1] for server in servers]
