"""One segment of a tensor on its way through a plan, phase by phase: its messages by gloo or NCCL,
and what a half-precision wire does to it.

Sums stay in fp32 (or fp64) where they are; only messages are rounded. What travels is the sum
divided by the power of two next above the number of ranks that it counts, a mean more or less, so a
half message overflows or underflows only where the gradients of a single rank would, at any number
of ranks. (Jia et al. 2018 send fp16 gradients; where to divide is ours.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.plans import Group, Move
from megabatch.plans.message import Slice, piece
from megabatch.plans.phase import Op
from megabatch.sync.program import Exchange, RankPhase

# torch 2.13 has new names for these and warns on the old ones; 2.11 has only the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HALVES = (torch.float16, torch.bfloat16)
_ALIGNED = 64

Begun = tuple[int, int, str]
"""a step, a bucket of it, and the phase of it that begins"""


@dataclass(frozen=True)
class Journey:
    """A piece of a tensor, and its way through a plan: what a lane is given to do."""

    piece: Tensor
    wire: torch.dtype | None
    phases: tuple[RankPhase, ...]
    process_groups: Sequence[Any]
    """one a phase: the backend's, where it does the phase or carries its messages"""
    rank: int
    step: int
    bucket: int
    tag: int
    divide: float
    log: SimpleQueue[Begun] | None
    """where each phase is noted as it begins, for whoever watches"""

    def walk(self, messages: GlooMessages | NcclMessages, buffers: Buffers) -> None:
        """Take the piece through all phases; in place, and divided at the end."""
        segment = Segment(self.piece, self.wire, buffers)
        messages.expect(self.phases, segment, self.tag)
        for (phase, group, sums, exchanges), process_group in zip(
            self.phases, self.process_groups, strict=True
        ):
            if self.log is not None:
                self.log.put((self.step, self.bucket, str(phase)))
            if exchanges is None:
                segment.collective(phase.op, group, self.rank, sums, process_group)
            else:
                for exchange in exchanges:
                    messages.exchange(exchange, segment, process_group)
                messages.end_phase()
        segment.finish(self.divide)


class GlooMessages:
    """A lane's messages over gloo, in the workers' own group: a journey's tag keeps them apart from
    those of all other lanes.

    All receives of a segment are posted before its first send, because gloo moves data only when
    the receiver has said that it is ready.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._tag = 0
        self._expected: deque[list[tuple[Move, Tensor, Any]]] = deque()
        self._sent: list[Any] = []

    def expect(self, phases: tuple[RankPhase, ...], segment: Segment, tag: int) -> None:
        """Post all receives of a segment.

        A message that replaces a part of the sum may arrive early: it holds what this rank sent of
        that part, so it cannot come before that was read.
        """
        self._tag = tag
        self._expected.clear()
        for exchange in (exchange for phase in phases for exchange in phase.exchanges or ()):
            arriving = [(move, segment.incoming(move)) for move in exchange.receives]
            self._expected.append(
                [
                    (move, buffer, self._receive(buffer, move.peer))
                    for move, buffer in arriving
                    if buffer is not None
                ]
            )

    def exchange(self, exchange: Exchange, segment: Segment, process_group: Any) -> None:
        for move in exchange.sends:
            message = segment.outgoing(move, exchange.sums)
            if message is not None:
                self._sent.append(
                    dist.isend(message, group=self._group, group_dst=move.peer, tag=self._tag)
                )
        for move, message, coming in self._expected.popleft():
            coming.wait()
            segment.receive(move, message, exchange.sums)

    def end_phase(self) -> None:
        """The next phase may add to what was sent in this one."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def give_up(self) -> tuple[Any, Any]:
        """The messages on their way, which nobody here waits for any more."""
        left = self._expected, self._sent
        self._expected, self._sent = deque(), []
        return left

    def _receive(self, buffer: Tensor, peer: int) -> Any:
        return dist.irecv(buffer, group=self._group, group_src=peer, tag=self._tag)


class NcclMessages:
    """A lane's messages over NCCL, on the present stream, in a communicator of the lane's own: the
    sends and receives of an exchange are given to it at once."""

    def expect(self, phases: tuple[RankPhase, ...], segment: Segment, tag: int) -> None:
        """Receives are posted with the sends of their exchange."""

    def exchange(self, exchange: Exchange, segment: Segment, process_group: Any) -> None:
        outgoing = [(move, segment.outgoing(move, exchange.sums)) for move in exchange.sends]
        incoming = [(move, segment.incoming(move)) for move in exchange.receives]
        together = [
            dist.P2POp(call, message, group=process_group, group_peer=move.peer)
            for call, side in ((dist.isend, outgoing), (dist.irecv, incoming))
            for move, message in side
            if message is not None
        ]
        for work in dist.batch_isend_irecv(together) if together else []:
            work.wait()
        for move, message in incoming:
            if message is not None:
                segment.receive(move, message, exchange.sums)

    def end_phase(self) -> None:
        """The stream keeps the order."""


class Buffers:
    """Memory for the messages of one segment at a time, kept from segment to segment.

    Fresh memory would cost more than the additions: every page of it is a fault.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    def clear(self) -> None:
        if self._taken > len(self._memory):
            self._memory = self._memory.new_empty(self._taken)
        self._taken = 0

    def free(self) -> None:
        self._memory, self._taken = self._memory.new_empty(0), 0

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        first = self._taken
        self._taken += -(-length * dtype.itemsize // _ALIGNED) * _ALIGNED
        if self._taken > len(self._memory):  # grows at the next clear()
            return torch.empty(length, dtype=dtype, device=self._memory.device)
        return self._memory[first : first + length * dtype.itemsize].view(dtype)


class Segment:
    """Holds the running sum of a flat piece of a tensor; packs and unpacks its messages."""

    def __init__(self, piece: Tensor, wire: torch.dtype | None, buffers: Buffers) -> None:
        self._piece = piece
        self._wire = wire if wire in _HALVES else piece.dtype
        self._half = self._wire in _HALVES
        self._sum = piece.float() if piece.dtype in _HALVES else piece
        self._buffers = buffers
        self._arrived: dict[Slice, Tensor] = {}
        buffers.clear()

    def outgoing(self, move: Move, sums: int) -> Tensor | None:
        """The message to send; None if a short tensor leaves it empty."""
        part = self._part(move.slice)
        if not len(part) or not self._half:
            return part if len(part) else None
        if move.op == "copy" and move.slice in self._arrived:  # passed on as it came
            return self._arrived[move.slice]
        return self._packed(part, sums, settle=move.op == "copy")

    def incoming(self, move: Move) -> Tensor | None:
        """Where a message shall arrive; None if there is nothing to come."""
        part = self._part(move.slice)
        if not len(part):
            return None
        direct = move.op == "copy" and not self._half
        return part if direct else self._buffers.take(len(part), self._wire)

    def receive(self, move: Move, message: Tensor, sums: int) -> None:
        part = self._part(move.slice)
        if move.op == "add":
            part.add_(message, alpha=_shrink(sums) if self._half else 1)
        elif self._half:
            part.copy_(message).mul_(_shrink(sums))
            self._arrived[move.slice] = message

    def finish(self, divide: float) -> None:
        """The sum is complete: divide it and put it in place."""
        if divide != 1:
            self._sum.div_(divide)
        if self._sum is not self._piece:
            self._piece.copy_(self._sum)

    def collective(self, op: Op, group: Group, rank: int, sums: int, process_group: Any) -> None:
        """Leave a phase to the backend; `sums` is the number of ranks each member's slice counts.

        A half sum grows inside the backend by the number of members: half of that growth, in bits,
        is taken off before, so that both ends of the range keep as much room.
        """
        part, members = self._part(group.slice), len(group.members)
        if not len(part):
            return
        grows = op not in ("broadcast", "all_gather")
        sums *= 1 << members.bit_length() // 2 if grows else 1
        buffer = self._packed(part, sums, settle=not grows) if self._half else part
        place = group.members.index(rank)
        if op == "all_reduce":
            dist.all_reduce(buffer, group=process_group)
        elif op == "reduce":
            dist.reduce(buffer, group_dst=0, group=process_group)
        elif op == "broadcast":
            dist.broadcast(buffer, group_src=0, group=process_group)
        elif op == "reduce_scatter":
            _scatter(buffer, place, members, process_group)
        else:
            _gather(buffer, place, members, process_group)
        if self._half:
            part.copy_(buffer).mul_(_shrink(sums))

    def _part(self, slice: Slice) -> Tensor:
        first, last = slice.bounds(len(self._sum))
        return self._sum[first:last]

    def _packed(self, part: Tensor, sums: int, settle: bool) -> Tensor:
        """A part as it travels; settled, the part itself is rounded too: all ranks end alike."""
        message = self._buffers.take(len(part), self._wire)
        torch.mul(part, 1 / _shrink(sums), out=message)
        if settle:
            part.copy_(message).mul_(_shrink(sums))
        return message


def _shrink(sums: int) -> float:
    """The power of two that a sum over so many ranks is divided by on a half wire: exact."""
    return float(1 << (sums - 1).bit_length())


def _scatter(buffer: Tensor, place: int, members: int, group: dist.ProcessGroup) -> None:
    """Sum piece i of the buffer at member i; backends want pieces of one size."""
    total = buffer.new_empty(-(-len(buffer) // members))
    if len(buffer) % members == 0:
        _reduce_scatter(total, buffer, group=group)
    else:
        rows = buffer.new_zeros(members, len(total))
        for row, (first, last) in zip(rows, _bounds(len(buffer), members), strict=True):
            row[: last - first] = buffer[first:last]
        _reduce_scatter(total, rows.view(-1), group=group)
    first, last = piece(place, members).bounds(len(buffer))
    buffer[first:last] = total[: last - first]


def _gather(buffer: Tensor, place: int, members: int, group: dist.ProcessGroup) -> None:
    """Bring piece i of the buffer from member i."""
    first, last = piece(place, members).bounds(len(buffer))
    if len(buffer) % members == 0:
        all_gather(buffer, buffer[first:last].clone(), group=group)
        return
    own = buffer.new_zeros(-(-len(buffer) // members))
    own[: last - first] = buffer[first:last]
    rows = buffer.new_empty(members, len(own))
    all_gather(rows.view(-1), own, group=group)
    for row, (first, last) in zip(rows, _bounds(len(buffer), members), strict=True):
        buffer[first:last] = row[: last - first]


def _bounds(length: int, members: int) -> list[tuple[int, int]]:
    return [piece(index, members).bounds(length) for index in range(members)]
