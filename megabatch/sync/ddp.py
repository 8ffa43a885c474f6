"""GradSync: our plans for anyone's DistributedDataParallel, as a communication hook.

DDP fills its buckets and overlaps them with backward as always; each bucket is then summed by the
same sender that the trainer uses (senders.py).
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megabatch.cluster import Cluster
from megabatch.errors import UserError
from megabatch.plans import Plan
from megabatch.sync.choice import HYBRID
from megabatch.sync.execute import LANES, SEGMENT_BYTES
from megabatch.sync.senders import Planned


class GradSync:
    """Sums a DDP module's gradient buckets by a plan; attach() once, before the first backward.

    Every worker makes it, in the same order as its others; a module has one of its own. `plan` is a
    name ("torus", "torus:halving_doubling"), phases, "hybrid" (by `thresholds`, see choice.py) or
    "auto" (by what `megabatch bench sync` wrote to `machine`; rank 0's copy decides). A half `wire`
    halves the traffic: see segment.py for what it rounds and why it does not overflow. Bucket sizes
    are DDP's own (bucket_cap_mb). A rank that dies or hangs ends the others as heartbeat.py says;
    `silent_seconds` None turns that off. After close() (or `with`) the module sums by DDP's own
    all-reduce again, and another GradSync may be attached.
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
        self._cluster = cluster
        self._sender = Planned(
            cluster,
            plan,
            wire,
            what=f"a GradSync of {lanes} lanes on a grid of {cluster.grid[0]} x {cluster.grid[1]}",
            thresholds=thresholds,
            machine=machine,
            lanes=lanes,
            segment_bytes=segment_bytes,
            silent_seconds=silent_seconds,
            late_seconds=late_seconds,
        )
        # A script may forget it along with its module, as one that tries many nets does.
        self._forgotten = weakref.finalize(self, _close_aside, self._sender)
        self._forgotten.atexit = False
        self._side = torch.cuda.Stream(cluster.device) if cluster.device.type == "cuda" else None
        self._hook: _Hook | None = None
        self._closed = False
        self.choice = self._sender.choice

    @property
    def steps(self) -> int:
        """Backward passes whose gradients were summed."""
        return self._sender.steps

    def __enter__(self) -> "GradSync":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self, model: DistributedDataParallel) -> DistributedDataParallel:
        """Make DDP sum its gradients by the plan; returns the model."""
        self._check(model)
        # DDP takes a hook once and for ever: one that we put there is used again. A copy of the
        # module lists its original's, which DDP does not call for it.
        hooks = [
            state
            for _, state in model._comm_hooks
            if isinstance(state, _Hook) and state.of() is model
        ]
        if not hooks:
            hook = _Hook(model)
            try:
                model.register_comm_hook(hook, _Hook.reduce)
            except RuntimeError as error:
                model._comm_hooks.pop()  # it was put there all the same
                raise UserError(
                    f"this module cannot take the plan's hook, as it has one already: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            hooks = [hook]
        if hooks[0].sync is not None:
            raise UserError("this module has a GradSync already: close() that one first")
        self._hook = hooks[0]
        self._hook.sync = self
        return model

    def close(self) -> None:
        """End lanes, process groups and heartbeat, and give the module back to DDP's own
        all-reduce; every worker between the same two steps."""
        if self._hook is not None:
            self._hook.sync = None
        self._forgotten.detach()
        self._sender.close()
        self._closed = True

    def _check(self, model: DistributedDataParallel) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                f"attach takes a DistributedDataParallel module, not {type(model).__name__}: wrap "
                f"the net in it first, and compile the net, not the wrapper"
            )
        if self._closed:
            raise UserError("this GradSync is closed: make another")
        if self._hook is not None:
            raise UserError("this GradSync is attached already: a module has one of its own")
        if model._delay_all_reduce_params:
            # DDP never waits for the sum of these: that of a bucket behind it in the same process
            # group, which a plan does not use, is all that makes sure that it is there.
            raise UserError(
                "this module delays the sum of some parameters, which DDP then leaves to its own "
                "sums of the others: leave delay_all_reduce_named_params away"
            )
        cluster = self._cluster
        theirs = dist.get_process_group_ranks(model.process_group)
        ours = (
            dist.get_process_group_ranks(cluster.process_group())
            if cluster.world > 1
            else [dist.get_rank()]
        )
        if theirs != ours:
            raise UserError(
                f"this module sums over workers {_ranks(theirs)}, but the cluster has workers "
                f"{_ranks(ours)}: make the cluster when torch.distributed is initialised, by "
                f"Cluster.from_env(group=...) where the module has a process_group of its own"
            )
        devices = {p.device for p in model.parameters() if p.requires_grad}
        if devices - {cluster.device}:
            places = " and ".join(sorted(map(str, devices)))
            raise UserError(f"this module is on {places}, but the cluster on {cluster.device}")

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of one bucket over all workers, in the future."""
        flat = bucket.buffer()
        if flat.layout != torch.strided:
            raise UserError(
                "plans sum dense gradients, and this module has sparse ones (an embedding with "
                "sparse=True): make them dense, or leave the module to DDP"
            )
        reduction = self._sender.send(flat, bucket.index(), divide=self._cluster.world)
        if self._side is not None:
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device])
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                reduction.wait()
                future.set_result(flat)  # ready when the side stream is
            return future
        done: torch.futures.Future[BaseException | None] = torch.futures.Future()
        reduction.then(done.set_result)
        return done.then(partial(_result, flat))


class _Hook:
    """What DDP calls for each bucket, for as long as the module lives: the GradSync that is
    attached, or DDP's own all-reduce.

    A copy of it, in a copied or saved module, is nobody's: what is a copy sums as DDP does.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.of: Callable[[], DistributedDataParallel | None] = (
            _nobody if model is None else weakref.ref(model)
        )
        self.sync: GradSync | None = None

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        model = self.of()
        assert model is not None  # who calls this
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise UserError(
                "a hook cannot tell how many workers still have inputs, and its mean is over all "
                "of them: leave divide_by_initial_world_size at True in join()"
            )
        if self.sync is None:
            return allreduce_hook(model.process_group, bucket)
        return self.sync.reduce(bucket)


def _close_aside(sender: Planned) -> None:
    """In a thread of its own: what is forgotten is collected in any, be it one that this ends."""
    threading.Thread(target=sender.close, name="closing").start()


def _nobody() -> None:
    return None


def _result(flat: Tensor, done: torch.futures.Future[BaseException | None]) -> Tensor:
    """What a bucket ends with; DDP understands an error only if it is raised here."""
    error = done.value()
    if error is not None:
        raise error
    return flat


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
