"""Run a plan: the messages that were proved and priced, in place, over gloo or NCCL.

A tensor is cut into segments, and each goes through all phases by itself in one of a few lanes: one
segment crosses the rows while another crosses the columns (the plans are those of Mikami et al.
2018, Jia et al. 2018 and Goyal et al. 2017, see docs/algorithms.md).
"""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.elastic.connecting import connecting
from megabatch.errors import UserError
from megabatch.optim.layout import overlaps
from megabatch.plans import Plan, on_grid
from megabatch.plans.message import piece
from megabatch.sync.lanes import Closed, OnError, Reduction, StreamLane, ThreadLane
from megabatch.sync.meeting import Meeting
from megabatch.sync.program import RankPhase, program
from megabatch.sync.segment import Begun, Journey

# Larger segments leave the network idle at both ends of a tensor, smaller ones pay more for each
# message; a lane more than there are phases on the wire hides the turn-round of a step.
SEGMENT_BYTES = 2 << 20
LANES = 3
_MOST_LANES = 16

WIRES: dict[str, torch.dtype | None] = {
    "fp32": None,  # gradients travel as they are
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def execute(plan: Plan, tensor: Tensor, cluster: Cluster, wire: torch.dtype | None = None) -> None:
    """Sum a tensor over all workers, in place. Every worker calls it, in the same order.

    Half tensors, and any tensor with a half `wire`, are added in fp32 and rounded on the way. On
    CUDA the present stream waits for the sum, not the host. Lanes are made for this one sum; who
    has many keeps a Pipeline.
    """
    with Pipeline(cluster) as pipeline:
        pipeline.sum(plan, tensor, wire)


class Pipeline:
    """Sums of many tensors, in order of submission, in a few lanes that work side by side.

    Every worker makes it, in the same order as its other pipelines: they then agree on a number of
    their own, so that no two pipelines mix their messages (`meeting` is one that was held already).
    Segment j of all that was ever submitted goes through lane j mod `lanes`, so every worker must
    submit the same lengths in the same order; each kind of tensor is compared with the first
    worker's when it is first summed. Lanes note each phase that they begin in `log`; from a lane's
    thread `on_error(reduction, error)` is told what went wrong, and must end the reduction.
    """

    def __init__(
        self,
        cluster: Cluster,
        lanes: int = LANES,
        segment_bytes: int = SEGMENT_BYTES,
        log: SimpleQueue[Begun] | None = None,
        on_error: OnError | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        if not isinstance(lanes, int) or not 1 <= lanes <= _MOST_LANES:
            raise UserError(f"there are 1 to {_MOST_LANES} lanes, not {lanes}")
        if segment_bytes < 1:
            raise UserError(f"segments of {segment_bytes} bytes hold nothing: give 1 or more")
        self._cluster, self._segment_bytes, self._log = cluster, segment_bytes, log
        what = f"a pipeline of {lanes} lanes and segments of {segment_bytes} bytes"
        self._meeting = meeting or Meeting(cluster, what)
        self._compared: set[tuple[Any, ...]] = set()
        self._groups: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._ready: set[Plan] = set()
        self._submitted = 0
        self._closed = False
        kind = StreamLane if cluster.device.type == "cuda" else ThreadLane
        group = cluster.process_group() if cluster.world > 1 else None
        self._lanes = [kind(cluster.device, group, on_error or Reduction.end) for _ in range(lanes)]

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End lanes and process groups; each worker when it likes, after its sums are there."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            lane.close()
        for group in self._groups.values():
            # Who has ended torch's process groups has ended these.
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        self._groups.clear()

    def sum(self, plan: Plan, tensor: Tensor, wire: torch.dtype | None = None) -> None:
        """Sum a tensor of any shape over all workers, in place; returns when the sum is there."""
        if tensor.layout != torch.strided:
            raise UserError("a plan sums dense tensors: give it tensor.to_dense()")
        if overlaps(tensor.shape, tensor.stride()):
            raise UserError(
                "elements of this tensor share memory (it was expanded): sum what it was made of"
            )
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        self.submit(plan, dense.view(-1), wire=wire).wait()
        if dense is not tensor:
            tensor.copy_(dense)

    def submit(
        self,
        plan: Plan,
        flat: Tensor,
        *,
        wire: torch.dtype | None = None,
        divide: float = 1,
        bucket: int = 0,
        step: int = 0,
    ) -> Reduction:
        """Begin to sum a flat tensor over all workers, in place, and divide the sum at the end.

        The tensor must be left alone until the sum is there. Workers that are at different buckets
        or steps wait for each other; they never add what does not belong together.
        """
        if self._closed:
            raise Closed("this pipeline is closed")
        lazy = flat.is_conj() or flat.is_neg()  # not what lies in memory
        if flat.layout != torch.strided or flat.dim() != 1 or not flat.is_contiguous() or lazy:
            raise UserError(
                f"a pipeline takes flat tensors whose elements lie side by side, not one of shape "
                f"{tuple(flat.shape)}: Pipeline.sum and execute take any"
            )
        if flat.device != self._cluster.device:
            raise UserError(
                f"the tensor is on {flat.device}, but this worker of the cluster on "
                f"{self._cluster.device}"
            )
        if wire is not None and not (flat.is_floating_point() or flat.is_complex()):
            raise UserError(f"{flat.dtype} cannot travel as {wire}: leave the wire away")
        self._compare(plan, flat, wire, bucket)
        self.prepare(plan)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        phases = program(plan, *self._cluster.grid, self._cluster.rank)
        count = max(1, -(-len(flat) * (wire or flat.dtype).itemsize // self._segment_bytes))
        reduction = Reduction(count)
        for index in range(count):
            first, last = piece(index, count).bounds(len(flat))
            lane = self._submitted % len(self._lanes)
            self._submitted += 1
            journey = Journey(
                flat[first:last],
                wire,
                phases,
                [self._group(lane, phase) for phase in phases],
                rank=self._cluster.rank,
                step=step,
                bucket=bucket,
                tag=_tag(self._meeting.number, lane, step, bucket),
                divide=divide,
                log=self._log,
            )
            self._lanes[lane].run(journey, reduction)
        return reduction

    def _compare(self, plan: Plan, flat: Tensor, wire: torch.dtype | None, bucket: int) -> None:
        """Of each kind of sum the first: gloo would end the process over lengths that differ."""
        kind = (bucket, flat.numel(), flat.dtype, wire, plan)
        if kind in self._compared:
            return
        self._meeting.compare(
            f"sum {len(self._compared)}",
            f"bucket {bucket} has {flat.numel()} x {flat.dtype}, on the wire {wire or flat.dtype}, "
            f"by {' then '.join(f'{phase} ({phase.via})' for phase in plan)}",
        )
        self._compared.add(kind)

    def prepare(self, plan: Plan) -> None:
        """Make what a plan needs before its first sum; all workers do so in the same order."""
        if plan not in self._ready:
            self._make_groups(plan)
            self._ready.add(plan)

    def _make_groups(self, plan: Plan) -> None:
        """Process groups for every lane; all workers make all of them, in the same order.

        gloo's sends need none: tags keep the lanes apart.
        """
        cluster = self._cluster
        wanted = [
            group.members
            for placed in on_grid(plan, *cluster.grid)
            if placed.phase.via == "backend"
            for group in placed.groups
            if len(group.members) > 1
        ]
        if cluster.device.type == "cuda":
            wanted.append(tuple(range(cluster.world)))
        if wanted and cluster.group is not None:
            raise UserError(
                "in a group of some of the workers a plan goes over gloo by a wiring of its own, "
                "as torus:ring; the backend's own collectives and NCCL want all workers"
            )
        for members in dict.fromkeys(wanted):
            for lane in range(len(self._lanes)):
                if (lane, members) in self._groups:
                    continue
                with connecting():
                    group = self._groups[lane, members] = dist.new_group(list(members))
                if cluster.device.type == "cuda" and cluster.rank in members:
                    # NCCL wants all members at a group's first use; sends may not bring them all.
                    dist.all_reduce(torch.zeros(1, device=cluster.device), group=group)

    def _group(self, lane: int, phase: RankPhase) -> Any:
        if phase.exchanges is None:
            return self._groups[lane, phase.group.members]
        return self._groups.get((lane, tuple(range(self._cluster.world))))


def _tag(number: int, lane: int, step: int, bucket: int) -> int:
    """What keeps the messages of a lane apart from those of other lanes, pipelines, steps and
    buckets, and from those that the user sends in the same group under small tags."""
    return (1 + number % (1 << 14)) << 16 | lane << 12 | (step << 6) + bucket & 0xFFF
