"""A bare ring of TCP streams between hosts: the limit that no all-reduce over them can pass.

Each host sends its right neighbour as many bytes as a ring all-reduce would, with no sums, no steps
and no messages in between.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist

from megabatch.cluster import Cluster

_CHUNK = 1 << 20


def tcp_ring(cluster: Cluster) -> Callable[[int], None]:
    """A function that moves the bytes of an all-reduce of so many bytes.

    The first worker of each host takes part, or every worker where there is one host; for the
    others the function does nothing. Every worker calls both this and
    the function.
    """
    alone = cluster.world == cluster.local_world
    stride = 1 if alone else cluster.local_world
    members = list(range(0, cluster.world, stride))
    part = cluster.rank in members
    listener = socket.create_server((_own_address(), 0)) if part else None
    addresses: list[tuple[str, int] | None] = [None] * cluster.world
    dist.all_gather_object(addresses, listener and listener.getsockname())
    if listener is None:
        return lambda nbytes: None
    right_rank = members[(members.index(cluster.rank) + 1) % len(members)]
    right = socket.create_connection(addresses[right_rank] or ("", 0))
    left, _ = listener.accept()
    listener.close()
    outgoing, incoming = bytes(_CHUNK), bytearray(_CHUNK)

    def send(nbytes: int) -> None:
        for first in range(0, nbytes, _CHUNK):
            right.sendall(memoryview(outgoing)[: min(_CHUNK, nbytes - first)])

    def move(nbytes: int) -> None:
        nbytes = 2 * nbytes * (len(members) - 1) // len(members)
        sender = threading.Thread(target=send, args=(nbytes,))
        sender.start()
        left_over = nbytes
        while left_over:
            left_over -= left.recv_into(incoming, min(_CHUNK, left_over))
        sender.join()

    return move


def _own_address() -> str:
    """The address that the other workers reach this one by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        address: str = probe.getsockname()[0]
        return address
