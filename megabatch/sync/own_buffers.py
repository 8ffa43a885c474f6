"""Buffers that a module of somebody else's changes in its own forward, alike on every worker.

A spectral norm's vectors, an instance norm's averages, a counter: each worker's passes would leave
others there, and evaluations and checkpoints would have another net on each. A step moves them
once, as it does batch norm's averages: each pass begins with what the step began with, and what the
pass over the first micro-batch leaves is everyone's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.optim.layout import overlaps
from megabatch.tree import deal

Waiting = Callable[[str], AbstractContextManager[Any]]


class _Place(NamedTuple):
    """A buffer's: the module that has it, by which name, what lies there, and its values when the
    step began."""

    module: nn.Module
    name: str
    tensor: Tensor
    before: Tensor

    @property
    def present(self) -> Tensor | None:
        """What a pass has left: it may have put another tensor there."""
        return self.module._buffers[self.name]

    @property
    def remade(self) -> bool:
        """Whether that is of another shape or dtype, as a table that is made when it is asked for:
        it stays."""
        now, then = self.present, self.tensor
        return now is None or (now.shape, now.dtype) != (then.shape, then.dtype)

    def now(self) -> Tensor:
        left = self.present
        return self.before if left is None or self.remade else left

    def put(self, values: Tensor) -> None:
        """The tensor that was there, with these values."""
        if not self.remade:
            self.tensor.copy_(values)
            self.module._buffers[self.name] = self.tensor


class OwnBuffers:
    """A step() around its passes, each_pass() before every one of them, end() when it is taken.

    Which buffers change is learnt in the first step, and in those that are told to: what stays
    costs nothing in between.
    """

    def __init__(self, net: nn.Module, cluster: Cluster, others: Iterable[Tensor]) -> None:
        """`others` are those that somebody else looks after: batch norm's."""
        self._cluster = cluster
        looked_after = {id(tensor) for tensor in others}
        self._all = [
            (module, name)
            for module in net.modules()
            for name, tensor in module.named_buffers(recurse=False)
            if id(tensor) not in looked_after
            and not tensor.is_inference()
            # An expanded one no pass can write to.
            and not overlaps(tensor.shape, tensor.stride())
        ]
        self._changing: list[int] | None = None
        """which of all; None: not known yet"""
        self._places: dict[int, _Place] = {}
        self._left: dict[int, Tensor] = {}
        """by the first pass here"""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._all)

    @contextmanager
    def step(self, count: int, learn: bool, waiting: Waiting) -> Iterator[None]:
        """A step of `count` micro-batches, at whose end every worker has what the pass over the
        first of them left. One that fails, by the loss of a worker say, leaves what it began with.
        It waits for the others inside `waiting`; all of them `learn` in the same steps."""
        if learn:
            self._changing = None
        self._begin(count)
        try:
            yield
            self._exchange(waiting)
        except BaseException:
            self._undo()
            raise

    @torch.no_grad()
    def _begin(self, count: int) -> None:
        dealt = deal(count, self._cluster.world)
        self._first = next(rank for rank, (first, last) in enumerate(dealt) if first < last)
        self._passes = 0
        self._places, self._left = {}, {}
        for index in range(len(self._all)) if self._changing is None else self._changing:
            module, name = self._all[index]
            tensor = module._buffers[name]
            if tensor is not None:
                self._places[index] = _Place(module, name, tensor, _values(tensor))

    @torch.no_grad()
    def each_pass(self) -> None:
        if self._passes == 1:
            self._left = self._now()
        if self._passes:
            for place in self._places.values():
                place.put(place.before)
        self._passes += 1

    @torch.no_grad()
    def _exchange(self, waiting: Waiting) -> None:
        # Before anything of the step is taken over: a worker that is lost here costs the step.
        left = self._left or self._now()
        with waiting("the buffers of the module") if self._cluster.world > 1 else nullcontext():
            if self._changing is None:
                self._changing = self._learnt(left)
            self._left = {index: left[index] for index in self._changing}
            if self._cluster.world > 1 and self._left:
                self._broadcast(list(self._left.values()))

    @torch.no_grad()
    def end(self, good: Tensor | None) -> None:
        """Take over what was exchanged; where `good`, a boolean on the device, is false, what the
        step began with."""
        for index, place in self._places.items():
            values = self._left.get(index, place.before)
            place.put(values if good is None else torch.where(good, values, place.before))
        self._places, self._left = {}, {}

    @torch.no_grad()
    def _undo(self) -> None:
        for place in self._places.values():
            place.put(place.before)
        self._places, self._left = {}, {}

    def _now(self) -> dict[int, Tensor]:
        return {index: _values(place.now()) for index, place in self._places.items()}

    def _learnt(self, left: dict[int, Tensor]) -> list[int]:
        """Which have changed where the first micro-batch was; those that were remade there are
        remade here."""
        changed = [i for i in left if not torch.equal(self._places[i].before, left[i])]
        if self._cluster.world == 1:
            return changed
        remade = {i: place.present for i, place in self._places.items() if place.remade}
        found: list[Any] = [changed, {i: t if t is None else t.cpu() for i, t in remade.items()}]
        dist.broadcast_object_list(found, group=self._cluster.group, group_src=self._first)
        for index, tensor in found[1].items():
            place = self._places[index]
            if self._cluster.rank != self._first:
                tensor = tensor if tensor is None else tensor.to(self._cluster.device)
                place.module._buffers[place.name] = tensor
        return list(found[0])

    def _broadcast(self, tensors: list[Tensor]) -> None:
        """In place. All at once, and by bytes: not every backend knows every dtype."""
        flats = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        together = torch.cat(flats)
        dist.broadcast(together, group=self._cluster.group, group_src=self._first)
        for flat, came in zip(flats, together.split([len(f) for f in flats]), strict=True):
            flat.copy_(came)


def _values(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
