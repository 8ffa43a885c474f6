"""How long a call takes that all workers make together: until the last of them is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megabatch.cluster import Cluster


def slowest(call: Callable[[], object], cluster: Cluster) -> float:
    """Seconds of the slowest worker, on all of them; they begin together."""
    _wait(cluster)
    cluster.barrier()
    _wait(cluster)
    began = time.perf_counter()
    call()
    _wait(cluster)
    taken = torch.tensor(time.perf_counter() - began, device=cluster.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _wait(cluster: Cluster) -> None:
    if cluster.device.type == "cuda":
        torch.cuda.synchronize(cluster.device)
