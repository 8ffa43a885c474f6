"""Silent divergence: the workers compare a checksum of what all of them hold alike, bit by bit.

A bit that flips in one worker's memory, or a chip that computes wrongly, spoils a run that goes on
as if nothing were. The checksum is a sum of the bits as integers, exact in any order; it is made
and gathered on the device, and the host reads it when it is there.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.sync.arriving import Arriving
from megabatch.sync.segment import all_gather

Waiting = Callable[[str], AbstractContextManager[Any]]

_WORD = 8
"""bytes summed at once: on a CPU forty times as fast as four"""


class Comparison:
    """Checksums of workers, by rank, after a step, on their way to the host."""

    def __init__(self, step: int, gathered: Tensor, hosts: list[str]) -> None:
        self.step, self.hosts, self._checksums = step, hosts, Arriving(gathered)

    def differing(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; all of them where there is no majority."""
        found: list[int] = self._checksums.read()
        (most, count), *others = Counter(found).most_common()
        majority = None if others and others[0][1] == count else most
        return tuple(rank for rank, checksum in enumerate(found) if checksum != majority)


class Replicas:
    """Comparisons of the workers' state: each is read by read() when the next step is under way."""

    def __init__(self, cluster: Cluster, every: int, waiting: Waiting = nullcontext) -> None:
        """`every` so many steps; 0: never. It waits for the others inside waiting(what for)."""
        self._waiting = waiting
        self._cluster, self._every = cluster, every if cluster.world > 1 else 0
        self._asked: list[Comparison] = []
        # Once: when a difference is found, a worker may be lost that would have to tell.
        with waiting("the others' hosts"):
            self._hosts = cluster.gather(platform.node()) if self._every else []

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def compare(self, step: int, tensors: Iterable[Tensor]) -> Comparison | None:
        """Begin to compare; every worker calls it after the same step, with the same tensors."""
        if self._every == 0:
            return None
        mine = checksum(tensors, self._cluster.device)[None]
        gathered = mine.new_empty(self._cluster.world)
        with self._waiting("the others' checksums"):
            all_gather(gathered, mine, group=self._cluster.group)
        self._asked.append(Comparison(step, gathered, self._hosts))
        return self._asked[-1]

    def read(self) -> Comparison | None:
        """The first of the comparisons asked for that found a difference, on every worker alike."""
        asked, self._asked = self._asked, []
        return next((comparison for comparison in asked if comparison.differing()), None)


@torch.no_grad()
def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """An integer on the device that any flipped bit changes.

    Sums wrap around; each tensor's counts an odd number of times of its own, so that what one loses
    another does not make up for.
    """
    sums = torch.stack([_sum_of_bits(tensor).to(device) for tensor in tensors])
    times = 2 * torch.arange(len(sums), device=device) + 1
    return (sums * times).sum()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # as it lies in memory: no copy
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    in_words = len(flat) // _WORD * _WORD
    if in_words == 0 or flat.data_ptr() % _WORD:
        return flat.sum(dtype=torch.int64)
    words = flat[:in_words].view(torch.int64).sum()
    return words if in_words == len(flat) else words + flat[in_words:].sum(dtype=torch.int64)
