"""Run a plan: the messages that were proved and priced, in place, over gloo or NCCL.

A tensor is cut into segments, and each goes through all phases by itself in one of a few lanes: one
segment crosses the rows while another crosses the columns (the plans are those of Mikami et al.
2018, Jia et al. 2018 and Goyal et al. 2017, see docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.plans import Move, Phase, Plan, stages
from megabatch.plans.message import piece
from megabatch.plans.phase import CLOSES
from megabatch.sync.lanes import OnError, Part, Pending, Step, StreamLane, ThreadLane
from megabatch.sync.segment import Segment

# Larger segments leave the network idle at both ends of a tensor, smaller ones pay more for each
# message; a lane more than there are phases on the wire hides the turn-round of a step.
SEGMENT_BYTES = 2 << 20
LANES = 3

WIRES: dict[str, torch.dtype | None] = {
    "fp32": None,  # gradients travel as they are
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def execute(plan: Plan, tensor: Tensor, cluster: Cluster, wire: torch.dtype | None = None) -> None:
    """Sum a tensor over all workers, in place. Every worker calls it, in the same order.

    Half tensors, and any tensor with a half `wire`, are added in fp32 and rounded on the way. On
    CUDA the present stream waits for the sum, not the host.
    """
    flat = tensor.reshape(-1)
    pipeline_of(cluster).submit(plan, flat, wire=wire).wait()
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))


@cache
def pipeline_of(cluster: Cluster) -> Pipeline:
    """The pipeline that execute() uses: one a cluster."""
    return Pipeline(cluster)


class Pipeline:
    """Sums of many tensors, in order of submission, in a few lanes that work side by side.

    Segment j of all that was ever submitted goes through lane j mod `lanes`, so every worker must
    submit the same lengths in the same order. From a lane's thread, `on_phase(bucket, phase)` is
    told what is about to be done, and `on_error(pending, error)` what went wrong; it must end the
    pending sum.
    """

    def __init__(
        self,
        cluster: Cluster,
        lanes: int = LANES,
        segment_bytes: int = SEGMENT_BYTES,
        on_phase: Callable[[int, str], None] | None = None,
        on_error: OnError | None = None,
    ) -> None:
        self._cluster, self._segment_bytes, self._on_phase = cluster, segment_bytes, on_phase
        self._groups: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._ready: set[Plan] = set()
        self._submitted = 0
        kind = StreamLane if cluster.device.type == "cuda" else ThreadLane
        self._lanes = [
            kind(index, cluster.device, on_error or Pending.end) for index in range(lanes)
        ]

    def submit(
        self,
        plan: Plan,
        flat: Tensor,
        *,
        wire: torch.dtype | None = None,
        divide: float = 1,
        bucket: int = 0,
    ) -> Pending:
        """Begin to sum a flat tensor over all workers, in place, and divide the sum at the end.

        The tensor must be left alone until the sum is there.
        """
        if plan not in self._ready:
            self._make_groups(plan)
        parts = program(plan, *self._cluster.grid, self._cluster.rank)
        count = max(1, -(-len(flat) * (wire or flat.dtype).itemsize // self._segment_bytes))
        pending = Pending(count)
        for index in range(count):
            first, last = piece(index, count).bounds(len(flat))
            lane = self._lanes[self._submitted % len(self._lanes)]
            self._submitted += 1
            groups = [self._group(lane.index, part) for part in parts]
            lane.run(
                partial(self._walk, flat[first:last], wire, parts, groups, divide, bucket), pending
            )
        return pending

    def _walk(
        self,
        flat: Tensor,
        wire: torch.dtype | None,
        parts: tuple[Part, ...],
        groups: list[Any],
        divide: float,
        bucket: int,
        lane: ThreadLane | StreamLane,
    ) -> None:
        """Take one segment through all phases."""
        segment = Segment(flat, wire, lane.scratch)
        lane.begin(parts, segment)
        for part, group in zip(parts, groups, strict=True):
            if self._on_phase is not None:
                self._on_phase(bucket, str(part.phase))
            if part.steps is None:
                segment.collective(part.phase.op, part.group, part.sums, group)
            else:
                for step in part.steps:
                    lane.exchange(step, segment, group)
                lane.end_phase()
        segment.finish(divide)

    def _make_groups(self, plan: Plan) -> None:
        """Process groups for every lane; all workers make all of them, in the same order.

        gloo's sends need none: tags keep the lanes apart.
        """
        cluster = self._cluster
        wanted = [
            group.members
            for stage in stages(plan, *cluster.grid)
            if stage.phase.via == "backend"
            for group in stage.groups
            if len(group.members) > 1
        ]
        if cluster.device.type == "cuda":
            wanted.append(tuple(range(cluster.world)))
        for members in dict.fromkeys(wanted):
            for lane in range(len(self._lanes)):
                if (lane, members) in self._groups:
                    continue
                group = self._groups[lane, members] = dist.new_group(list(members))
                if cluster.device.type == "cuda" and cluster.rank in members:
                    # NCCL wants all members at a group's first use; sends may not bring them all.
                    dist.all_reduce(torch.zeros(1, device=cluster.device), group=group)
        self._ready.add(plan)

    def _group(self, lane: int, part: Part) -> Any:
        if part.steps is None:
            return self._groups[lane, part.group.members]
        return self._groups.get((lane, tuple(range(self._cluster.world))))


@cache
def program(plan: Plan, y: int, x: int, rank: int) -> tuple[Part, ...]:
    """What one rank does for a plan on a grid of y rows and x columns, phase by phase."""
    sums, parts = 1, []
    for stage in stages(plan, y, x):
        group, members = stage.group_of(rank), len(stage.groups[0].members)
        whole = sums if stage.phase.op in CLOSES else sums * members
        if group is not None and members > 1:
            steps = None
            if stage.phase.via != "backend":
                together = groupby(stage.moves(rank), lambda move: move.step)
                steps = tuple(_step(list(moves), stage.phase, sums, whole) for _, moves in together)
            parts.append(Part(stage.phase, group, sums, steps))
        sums = whole
    return tuple(parts)


def _step(moves: list[Move], phase: Phase, sums: int, whole: int) -> Step:
    # A ring's partial sum grows by a member a step, halving's doubles at most.
    grown = moves[0].step + 1 if phase.wiring == "ring" else 1 << moves[0].step
    return Step(
        tuple(move for move in moves if move.action == "send"),
        tuple(move for move in moves if move.action == "receive"),
        whole if moves[0].op == "copy" else min(sums * grown, whole),
    )
