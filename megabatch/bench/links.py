"""Latency and bandwidth inside a host and between hosts, by single steps of rings.

Each worker sends to the next while it receives from the one before, which is what the links carry
in an all-reduce. A message there and back alone on the wire meets neither its neighbours nor the
traffic in the other direction. What sending costs the cores is the processor time of rings of the
engine that trains.
"""

from __future__ import annotations

import os
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megabatch.bench.slowest import slowest
from megabatch.cluster import Cluster
from megabatch.plans.names import named
from megabatch.sync.execute import Pipeline

_SMALL, _FIRST, _LARGEST = 4, 64 << 10, 64 << 20  # bytes of a message
_LONG_ENOUGH = 0.05  # seconds of a step that measures bandwidth: a slow link need not carry more
_ROWS = 8
_PIECES = (64, 64 << 10)  # bytes of the messages whose work is measured
_SUMS = (40, 8)  # of tensors cut into such pieces

# Whom a worker sends to and whom it receives from; None if it only looks on.
Neighbours = tuple[int, int] | None


def links(cluster: Cluster) -> dict[str, dict[str, float]]:
    """By level, as machine.json has them; every worker calls it and gets the same."""
    each, world, rank = cluster.local_world, cluster.world, cluster.rank
    found: dict[str, dict[str, float]] = {}
    if each > 1:
        host, place = divmod(rank, each)
        row = host * each
        around = (row + (place + 1) % each, row + (place - 1) % each)
        latency, rate = _line(around, cluster)
        found["node"] = {"latency_seconds": latency, "bytes_per_second": rate}
    if world > each:
        around = ((rank + each) % world, (rank - each) % world)
        # One flow from each host, then one from each worker: they share the host's link.
        latency, flow = _line(around if rank % each == 0 else None, cluster)
        together = flow if each == 1 else _line(around, cluster)[1]
        found["network"] = {
            "latency_seconds": latency,
            "bytes_per_second": max(flow, each * together),
            "flow_bytes_per_second": flow,
        }
    return found


def sending(cluster: Cluster, pipeline: Pipeline) -> dict[str, float] | None:
    """What a message and a byte cost the cores, as machine.json has it; None where GPUs compute.

    Processor time of all threads, in the mean over the workers: one that waits for a message
    sleeps, and sleep does not count.
    """
    if cluster.device.type != "cpu" or cluster.world == 1:
        return None
    small, large = (
        _core_seconds(nbytes, sums, cluster, pipeline)
        for nbytes, sums in zip(_PIECES, _SUMS, strict=True)
    )
    return {
        "message_core_seconds": small,
        "byte_core_seconds": max(0.0, large - small) / (_PIECES[1] - _PIECES[0]),
        "cores": len(os.sched_getaffinity(0)),
    }


def _core_seconds(nbytes: int, sums: int, cluster: Cluster, pipeline: Pipeline) -> float:
    """Of a worker, for sending one message of so many bytes and receiving another."""
    plan, tensor = named("ring", "gloo"), torch.zeros(cluster.world * nbytes // 4)
    pipeline.sum(plan, tensor)  # connects
    cluster.barrier()
    before = time.process_time()
    for _ in range(sums):
        pipeline.sum(plan, tensor)
    taken = torch.tensor(time.process_time() - before, dtype=torch.float64)
    dist.all_reduce(taken)
    return taken.item() / cluster.world / sums / (2 * (cluster.world - 1))


def _line(neighbours: Neighbours, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a small message, and bytes/s of a large one beyond them."""
    latency = _step(neighbours, _SMALL, 50, cluster)
    nbytes = _FIRST
    while (seconds := _step(neighbours, nbytes, 4, cluster)) < _LONG_ENOUGH and nbytes < _LARGEST:
        nbytes *= 4
    return latency, nbytes / max(seconds - latency, 1e-9)


def _step(neighbours: Neighbours, nbytes: int, rounds: int, cluster: Cluster) -> float:
    """Median seconds of one of so many steps in a row; the first row connects and does not count.

    In a row, because workers that begin late must not have the wire alone.
    """
    message, received = torch.zeros(2, nbytes // 4, device=cluster.device)
    walk = partial(_walk, neighbours, message, received, rounds)
    taken = [slowest(walk, cluster) / rounds for _ in range(_ROWS)]
    return median(taken[1:])


def _walk(
    neighbours: Neighbours, message: torch.Tensor, received: torch.Tensor, rounds: int
) -> None:
    if neighbours is None:
        return
    right, left = neighbours
    if message.is_cuda:
        for _ in range(rounds):
            step = [dist.P2POp(dist.isend, message, right), dist.P2POp(dist.irecv, received, left)]
            for work in dist.batch_isend_irecv(step):
                work.wait()
        return
    # As lanes.py does: gloo sends when the receiver has said that it is ready.
    coming: list[Any] = [dist.irecv(received, left) for _ in range(rounds)]
    sent: list[Any] = []
    for arrival in coming:
        sent.append(dist.isend(message, right))
        arrival.wait()
    for departure in sent:
        departure.wait()
