"""GradSync: our plans for anyone's DistributedDataParallel, as a communication hook.

DDP fills its buckets and overlaps them with backward as always; each bucket is then summed by the
same pipeline that runs a plan anywhere else (execute.py).
"""

import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from megabatch.cluster import Cluster
from megabatch.plans import Plan
from megabatch.sync.choice import HYBRID, choose
from megabatch.sync.execute import LANES, SEGMENT_BYTES, WIRES, Pipeline
from megabatch.sync.heartbeat import Disagreement, Heartbeat, compare

_instances = itertools.count()


class GradSync:
    """Sums DDP's gradient buckets by a plan; attach() once, before the first backward.

    `plan` is a name ("torus", "torus:halving_doubling"), phases, "hybrid" (by `thresholds`, see
    choice.py) or "auto" (by what `megabatch bench sync` wrote to `machine`; rank 0's copy decides).
    A half `wire` halves the traffic: see segment.py for what it rounds and why it does not
    overflow. Bucket sizes are DDP's own (bucket_cap_mb). A rank that dies or hangs ends the others
    as heartbeat.py says; `silent_seconds` None turns that off.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: str | Plan = "torus",
        wire: Literal["fp32", "fp16", "bf16"] = "fp32",
        *,
        thresholds: Iterable[tuple[int | None, str]] = HYBRID,
        machine: str | Path = "machine.json",
        lanes: int = LANES,
        segment_bytes: int = SEGMENT_BYTES,
        silent_seconds: float | None = 60,
        late_seconds: float = 600,
    ) -> None:
        self._cluster, self._wire = cluster, WIRES[wire]
        backend = "nccl" if cluster.device.type == "cuda" else "gloo"
        self.choice = cluster.agree(
            lambda: choose(plan, backend, thresholds=thresholds, machine=machine, grid=cluster.grid)
        )
        self._heartbeat: Heartbeat | None = None
        told: dict[str, Any] = {}
        if silent_seconds is not None and cluster.world > 1:
            self._heartbeat = Heartbeat(cluster, silent_seconds, late_seconds)
            told = {"on_phase": self._heartbeat.at, "on_error": self._heartbeat.failed}
        self._pipeline = Pipeline(cluster, lanes, segment_bytes, **told)
        self._side = torch.cuda.Stream(cluster.device) if cluster.device.type == "cuda" else None
        self._compared: dict[int, str] = {}
        number = next(_instances)  # the same on every rank
        self._keys = (f"{number}/{count}" for count in itertools.count())
        self.steps = 0  # backward passes whose gradients were summed

    def attach(self, model: DistributedDataParallel) -> DistributedDataParallel:
        """Make DDP sum its gradients by the plan; returns the model."""
        model.register_comm_hook(None, self._hook)
        return model

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of one bucket over all workers, in the future."""
        flat, index = bucket.buffer(), bucket.index()
        if index == 0:
            self.steps += 1
            if self._heartbeat:
                self._heartbeat.step(self.steps)
        plan = self.choice.plan(flat.numel() * (self._wire or flat.dtype).itemsize)
        self._compare(
            index,
            f"bucket {index} has {flat.numel()} x {flat.dtype}, on the wire "
            f"{self._wire or flat.dtype}, by {' then '.join(map(str, plan))}",
        )
        pending = self._pipeline.submit(
            plan, flat, wire=self._wire, divide=self._cluster.world, bucket=index
        )
        if self._heartbeat:
            self._heartbeat.expect(pending)
        if self._side is not None:
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device])
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                pending.wait()
                future.set_result(flat)  # ready when the side stream is
            return future
        done: torch.futures.Future[BaseException | None] = torch.futures.Future()
        pending.then(done.set_result)
        return done.then(partial(_result, flat))

    def _compare(self, index: int, said: str) -> None:
        """Each bucket once, and again when DDP has built its buckets anew."""
        if self._compared.get(index) == said:
            return
        self._compared[index] = said
        try:
            compare(self._cluster, next(self._keys), said)
        except Disagreement as error:
            if self._heartbeat:
                self._heartbeat.accuse(str(error))
            raise


def _result(flat: Tensor, done: torch.futures.Future[BaseException | None]) -> Tensor:
    """What a bucket ends with; DDP understands an error only if it is raised here."""
    error = done.value()
    if error is not None:
        raise error
    return flat
