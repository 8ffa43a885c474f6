"""What takes a bucket's sum to the other workers while backward goes on: the backend's own
collectives in a lane beside it, or a plan of ours; and the measure of what backward did not
hide."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.errors import UserError, nearest
from megabatch.plans import Plan
from megabatch.sync.choice import HYBRID, choose_plan
from megabatch.sync.execute import LANES, SEGMENT_BYTES, WIRES, Pipeline
from megabatch.sync.heartbeat import Heartbeat
from megabatch.sync.lanes import Reduction
from megabatch.sync.meeting import Disagreement, Meeting
from megabatch.sync.summation import OnPhase

_PATIENCE_SECONDS = 2.0
_COMPUTING = "computing"
"""what a rank does when a step's first bucket is there and no phase of it has begun"""


class Exposed:
    """Measures how long training waits for other workers: communication that backward did not hide.

    On CUDA the present stream waits, not the host, so events are read when the sum is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        if self._cuda:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))
        else:
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Since the last call."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Lane:
    """Where the backend's own sums run beside backward, in order, under a heartbeat: a thread or a
    CUDA stream.

    Every worker makes it, in the same order as its others. `cluster` is then the same workers in a
    process group of this lane's own: the threads of two lanes may come to a group they share in
    another order on each worker, and their sums would mix. `silent_seconds` None: no heartbeat.
    """

    def __init__(
        self, cluster: Cluster, silent_seconds: float | None = 60, late_seconds: float = 600
    ) -> None:
        device = cluster.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "lane")
        self._sent: list[Reduction] = []
        self._at_work: list[Future[None]] = []
        self._steps = 0
        self.heartbeat: Heartbeat | None = None
        with contextlib.ExitStack() as failing:
            self.cluster = cluster.apart()
            failing.callback(self.cluster.leave)
            if silent_seconds is not None:
                keys = Meeting(cluster, "a lane of the backend", late_seconds).keys("heartbeat")
                self.heartbeat = Heartbeat(cluster, keys, silent_seconds, late_seconds)
            failing.pop_all()

    def send(self, work: Callable[[OnPhase], None], bucket: int) -> None:
        """Work that tells what it is about to do; bucket 0 comes first in each step."""
        watch = self.heartbeat
        if bucket == 0:
            self._steps += 1
        step = self._steps

        def on_phase(phase: str) -> None:
            if watch:
                watch.log.put((step, bucket, phase))

        if bucket == 0:
            on_phase(_COMPUTING)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work(on_phase)
            return
        assert self._thread is not None
        reduction = Reduction(1)
        if watch:
            watch.expect(reduction)
        self._sent.append(reduction)
        self._at_work.append(self._thread.submit(_do, work, on_phase, reduction))

    def wait(self) -> None:
        """Until all that was sent is done (on CUDA: the present stream waits, not the host)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for reduction in self._sent:
            reduction.wait()
        self._sent, self._at_work = [], []

    def close(self) -> None:
        """End the thread and the group; what waits for a worker that failed is left to the
        process's end."""
        if self.heartbeat is not None:
            self.heartbeat.close()
        # A moment for what was given up to feel it.
        over = not futures.wait(self._at_work, _PATIENCE_SECONDS).not_done
        if self._thread is not None:
            self._thread.shutdown(over, cancel_futures=True)
        if over:
            self.cluster.leave()


def _do(work: Callable[[OnPhase], None], on_phase: OnPhase, reduction: Reduction) -> None:
    try:
        work(on_phase)
    except BaseException as error:
        reduction.end(error)  # at once: who lost a connection need not ask who is silent
    else:
        reduction.one_done()


class Planned:
    """Sums buckets by a plan of our own, in the lanes of execute.py, under a heartbeat.

    Every worker makes it, in the same order as its others; `what` says in words what it is for, and
    `sizes` are the buckets' lengths where they are known. A half wire rounds gradients on their
    way. `silent_seconds` None: no heartbeat.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: str | Plan,
        wire: str = "fp32",
        sizes: Iterable[int] | None = None,
        *,
        what: str = "the trainer's sums",
        thresholds: Iterable[tuple[int | None, str]] = HYBRID,
        machine: str | Path = "machine.json",
        lanes: int = LANES,
        segment_bytes: int = SEGMENT_BYTES,
        silent_seconds: float | None = 60,
        late_seconds: float = 600,
    ) -> None:
        if wire not in WIRES:
            raise UserError(f"there is no wire {wire!r}: {nearest(str(wire), WIRES)}")
        for name, seconds in (("silent", silent_seconds), ("late", late_seconds)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise UserError(f"{name}_seconds is {seconds}: give seconds, more than 0")
        self._wire = WIRES[wire]
        meeting = Meeting(cluster, what, late_seconds)
        backend = "nccl" if cluster.device.type == "cuda" else "gloo"
        self.choice = meeting.decide(
            "plan",
            lambda: choose_plan(
                plan, backend, thresholds=thresholds, machine=machine, grid=cluster.grid
            ),
        )
        if sizes is not None:
            meeting.compare("sizes", f"its buckets have {list(sizes)} elements, {wire}")
        self._sent: list[Reduction] = []
        self.steps = 0  # begun: the first bucket of each was sent
        with contextlib.ExitStack() as ending:
            self.heartbeat: Heartbeat | None = None
            if silent_seconds is not None and cluster.world > 1:
                keys = meeting.keys("heartbeat")
                self.heartbeat = Heartbeat(cluster, keys, silent_seconds, late_seconds)
                ending.callback(self.heartbeat.close)
            watch = self.heartbeat
            self._pipeline = Pipeline(
                cluster,
                lanes,
                segment_bytes,
                log=watch.log if watch else None,
                on_error=watch.failed if watch else None,
                meeting=meeting,
            )
            ending.callback(self._pipeline.close)
            # Here and not at a bucket's first sum: backward may reach the buckets of two modules in
            # another order on each worker, and groups are made in one.
            for _, phases in self.choice.rows:
                self._pipeline.prepare(phases)
            self._ending = ending.pop_all()

    def __enter__(self) -> Planned:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, total: Tensor, bucket: int, is_control: bool = False, divide: float = 1
    ) -> Reduction:
        """Begin to sum a bucket in place; bucket 0 comes first in each step."""
        if bucket == 0:
            self._sent.clear()
            self.steps += 1
            if self.heartbeat:
                self.heartbeat.log.put((self.steps, 0, _COMPUTING))
        # Counts and flags travel as they are, whatever the gradients do.
        wire = None if is_control else self._wire
        travels = wire or total.dtype
        plan = self.choice.plan(total.numel() * travels.itemsize)
        try:
            reduction = self._pipeline.submit(
                plan, total, wire=wire, divide=divide, bucket=bucket, step=self.steps
            )
        except Disagreement as error:
            if self.heartbeat:
                self.heartbeat.accuse(str(error))
            raise
        if self.heartbeat:
            self.heartbeat.expect(reduction)
        self._sent.append(reduction)
        return reduction

    def wait(self) -> None:
        """Until all buckets of this step are summed."""
        for reduction in self._sent:
            reduction.wait()
        self._sent.clear()

    def close(self) -> None:
        """End lanes, process groups and heartbeat; each worker when it likes, after its sums are
        there."""
        self._ending.close()
