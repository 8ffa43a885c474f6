"""What takes a bucket's sum to the other workers while backward goes on: the backend's own
collectives in a lane beside it, or a plan of ours; and the measure of what backward did not
hide."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megabatch.cluster import Cluster
from megabatch.sync.choice import choose
from megabatch.sync.execute import WIRES, Pipeline
from megabatch.sync.heartbeat import Heartbeat, compare
from megabatch.sync.lanes import Pending

_engines = itertools.count()  # the same on every worker: they make the same engines


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
    """Where sums over workers run beside backward: a thread on CPU, a stream on CUDA; in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "lane")
        self._sent: list[Future[None]] = []

    def send(self, work: Callable[[], None]) -> None:
        if self._thread is not None:
            self._sent.append(self._thread.submit(work))
        else:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()

    def wait(self) -> None:
        """Until all that was sent is done (on CUDA: the present stream waits, not the host)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for sent in self._sent:
            sent.result()
        self._sent = []

    def close(self) -> None:
        """End the thread; one that waits for a worker that failed is left to the process's end."""
        if self._thread is not None:
            self._thread.shutdown(all(sent.done() for sent in self._sent), cancel_futures=True)


class Planned:
    """Sums by a plan of our own instead, in the lanes of execute.py, under a heartbeat."""

    def __init__(self, cluster: Cluster, plan: str, wire: str, sizes: list[int]) -> None:
        backend = "nccl" if cluster.device.type == "cuda" else "gloo"
        self._choice = cluster.agree(lambda: choose(plan, backend, grid=cluster.grid))
        self._wire = WIRES[wire]
        said = f"buckets of {sizes} elements, {wire} on the wire, plans {self._choice.digest()}"
        compare(cluster, f"engine {next(_engines)}", said)
        self._heartbeat = Heartbeat(cluster)
        self._pipeline = Pipeline(
            cluster, on_phase=self._heartbeat.at, on_error=self._heartbeat.failed
        )
        self._pending: list[Pending] = []
        self._steps = 0

    def send(self, total: Tensor, bucket: int, is_control: bool) -> None:
        # Counts and flags travel as they are, whatever the gradients do.
        wire = None if is_control else self._wire
        plan = self._choice.plan(total.numel() * (wire or total.dtype).itemsize)
        pending = self._pipeline.submit(plan, total, wire=wire, bucket=bucket)
        self._heartbeat.expect(pending)
        self._pending.append(pending)

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._steps += 1
        self._heartbeat.step(self._steps)

    def close(self) -> None:
        self._heartbeat.close()
