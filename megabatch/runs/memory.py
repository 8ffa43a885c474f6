"""The state of a run in its workers' memory, from which a newcomer starts without the disk.

It is what a checkpoint would hold. All workers hold the same, so one of them gives it to all.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.noise import NoiseScale
from megabatch.runs.checkpoint import Saved
from megabatch.runs.folder import State
from megabatch.runs.log import Entry
from megabatch.sync.replicas import Comparison


@dataclass(frozen=True)
class Memory:
    """Copies of a run's tensors, on the host, and what else the rest of it depends on."""

    state: dict[str, Any]
    recent: list[Entry]
    """of the log"""
    left_out: tuple[int, ...]
    """images that cannot be read"""
    checksum: int | None
    """of what every worker holds alike, where that is compared"""
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    extra: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        state: State,
        recent: list[Entry],
        left_out: tuple[int, ...],
        checksum: int | None,
        saved: Saved,
    ) -> Memory:
        tensors = saved.net.state_dict(), saved.optimizer.state_dict(), saved.tensors()
        return cls(asdict(state), recent, left_out, checksum, *_mapped(tensors, _on_host))

    @property
    def standing(self) -> tuple[int, int]:
        """How far it is: images seen, and the steps after which all that was due is done."""
        return self.state["seen"], self.state["settled"]

    def put(self, saved: Saved) -> State:
        """Into a module and its optimizer; returns the state that goes with them."""
        saved.net.load_state_dict(self.weights)
        saved.optimizer.load_state_dict(self.optimizer)
        saved.load(self.extra)
        return State(**{**self.state, "noise": NoiseScale(**self.state["noise"])})


def compared(memory: Memory | None, cluster: Cluster) -> Comparison:
    """What those hold who are as far as the first worker; every worker calls it, before the others
    copy the first. The furthest have the first ranks."""
    mine = None
    if memory is not None:
        mine = memory.standing, memory.state["steps"], memory.checksum, platform.node()
    held = [one for one in cluster.gather(mine) if one is not None]
    far, steps, *_ = held[0]
    alike = [(checksum, host) for standing, _, checksum, host in held if standing == far]
    checksums, hosts = zip(*alike, strict=True)
    return Comparison(steps, torch.tensor(checksums), list(hosts))


def copied(memory: Memory | None, cluster: Cluster) -> Memory:
    """The first worker's, on every worker; the others may hold one, or none."""
    if cluster.world == 1:
        assert memory is not None
        return memory

    def copy(tensor: Tensor) -> Tensor:
        moved = tensor.to(cluster.device)
        dist.broadcast(moved, group_src=0, group=cluster.group)
        return moved.to("cpu")

    # The rest first, with tensors that have all but values. Only workers of one run tell each other
    # such things: they are pickled.
    mine = () if memory is None else tuple(getattr(memory, one.name) for one in fields(memory))
    empty = cluster.agree(lambda: _mapped(mine, lambda tensor: tensor.to("meta")))
    if not cluster.first:
        mine = _mapped(empty, lambda tensor: torch.empty_like(tensor, device="cpu"))
    return Memory(*_mapped(mine, copy))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _mapped(value: Any, each: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts, lists and tuples with each tensor changed."""
    if isinstance(value, Tensor):
        return each(value)
    if isinstance(value, dict):
        return {name: _mapped(one, each) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, each) for one in value)
    return value
