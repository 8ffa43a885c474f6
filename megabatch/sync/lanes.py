"""Lanes: where segments travel side by side, each lane in order. A thread on CPU, a stream on CUDA.

Over gloo a lane posts all receives of a segment before its first send, because gloo moves data only
when the receiver has said that it is ready. NCCL takes the sends and receives of a step at once.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.plans import Group, Move, Phase
from megabatch.sync.segment import Scratch, Segment

_PATIENCE_SECONDS = 2.0
_TAG = 7 << 16  # apart from sends that the user makes in the same group


class Step(NamedTuple):
    """What one rank sends and receives at once; `sums` is the most ranks that a message counts."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    sums: int


class Part(NamedTuple):
    """One rank's part in a phase; steps are None where the backend does it."""

    phase: Phase
    group: Group
    sums: int
    """ranks that each member's slice counts when the phase begins"""
    steps: tuple[Step, ...] | None


Walk = Callable[["ThreadLane | StreamLane"], None]
OnError = Callable[["Pending", BaseException], None]


@dataclass(eq=False)
class Pending:
    """A sum on its way: `segments` of it are still to be done."""

    segments: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._then: list[Callable[[BaseException | None], None]] = []
        self.events: list[torch.cuda.Event] = []

    def wait(self) -> None:
        """Until the sum is there (on CUDA the present stream waits, not the host), or raise."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Call with the error, or None, at the end; from whichever thread ends it."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call(self._error)

    def one_done(self) -> None:
        with self._lock:
            self.segments -= 1
            last = self.segments == 0
        if last:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Over, well or not, whatever its segments still wait for; only the first time counts."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
        for call in self._then:
            call(error)


class ThreadLane:
    """A lane on CPU: a thread of its own, sends over gloo kept apart by a tag of its own."""

    def __init__(self, index: int, device: torch.device, on_error: OnError) -> None:
        self.index, self._on_error = index, on_error
        self.scratch = Scratch(device)
        self._work: SimpleQueue[tuple[Walk, Pending] | None] = SimpleQueue()
        self._expected: deque[list[tuple[Move, Tensor, Any]]] = deque()
        self._sent: list[Any] = []
        # A daemon: after a fault it may wait for ever, and the process must still end. Otherwise it
        # ends before the interpreter does, which would cut it off inside torch and abort.
        self._thread = threading.Thread(target=self._serve, name=f"lane {index}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, walk: Walk, pending: Pending) -> None:
        self._work.put((walk, pending))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(_PATIENCE_SECONDS)

    def begin(self, parts: tuple[Part, ...], segment: Segment) -> None:
        """Post all receives of a segment.

        A message that replaces a part of the sum may arrive early: it holds what this rank sent of
        that part, so it cannot come before that was read.
        """
        self._expected.clear()
        for step in (step for part in parts for step in part.steps or ()):
            arriving = [(move, segment.incoming(move)) for move in step.receives]
            self._expected.append(
                [
                    (move, room, dist.irecv(room, move.peer, tag=_TAG + self.index))
                    for move, room in arriving
                    if room is not None
                ]
            )

    def exchange(self, step: Step, segment: Segment, group: Any) -> None:
        for move in step.sends:
            message = segment.outgoing(move, step.sums)
            if message is not None:
                self._sent.append(dist.isend(message, move.peer, tag=_TAG + self.index))
        for move, message, coming in self._expected.popleft():
            coming.wait()
            segment.receive(move, message, step.sums)

    def end_phase(self) -> None:
        """The next phase may add to what was sent in this one."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _serve(self) -> None:
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                walk, pending = work
                try:
                    walk(self)
                except BaseException as error:
                    self._on_error(pending, error)
                else:
                    pending.one_done()


class StreamLane:
    """A lane on CUDA: a stream and NCCL communicators of its own; the host never waits.

    Errors are raised where the segment is submitted, or reported by NCCL's own watchdog.
    """

    def __init__(self, index: int, device: torch.device, on_error: OnError) -> None:
        self.index = index
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self.scratch = Scratch(device)

    def run(self, walk: Walk, pending: Pending) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            walk(self)
            pending.events.append(self._stream.record_event())
        pending.one_done()

    def begin(self, parts: tuple[Part, ...], segment: Segment) -> None:
        """NCCL's receives are posted with the sends of their step."""

    def exchange(self, step: Step, segment: Segment, group: Any) -> None:
        outgoing = [(move, segment.outgoing(move, step.sums)) for move in step.sends]
        incoming = [(move, segment.incoming(move)) for move in step.receives]
        together = [
            dist.P2POp(call, message, move.peer, group)
            for call, side in ((dist.isend, outgoing), (dist.irecv, incoming))
            for move, message in side
            if message is not None
        ]
        for work in dist.batch_isend_irecv(together) if together else []:
            work.wait()
        for move, message in incoming:
            if message is not None:
                segment.receive(move, message, step.sums)

    def end_phase(self) -> None:
        """The stream keeps the order."""
