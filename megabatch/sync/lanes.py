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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.elastic.link import world_is_lost
from megabatch.plans import Move
from megabatch.sync.program import Exchange, RankPhase
from megabatch.sync.segment import Buffers, Segment

_PATIENCE_SECONDS = 2.0

# Messages of lanes that failed. gloo may still write into their memory, and a message that is let
# go of unfinished hangs or aborts the process.
_unfinished: list[Any] = []

Walk = Callable[["ThreadLane | StreamLane"], None]
OnError = Callable[["Reduction", BaseException], None]


class Closed(RuntimeError):
    """A sum was asked of what is closed, or was closed before the sum was there."""


@dataclass(eq=False)
class Reduction:
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
    """A lane on CPU: a thread of its own. Messages go over gloo, in the workers' own group: `tag`
    keeps them apart from those of all other lanes."""

    def __init__(self, device: torch.device, group: Any, on_error: OnError) -> None:
        self._group, self._on_error = group, on_error
        self.buffers = Buffers(device)
        self.tag = 0
        self._work: SimpleQueue[tuple[Walk, Reduction] | None] = SimpleQueue()
        self._current: Reduction | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._expected: deque[list[tuple[Move, Tensor, Any]]] = deque()
        self._sent: list[Any] = []
        # A daemon: after a fault it may wait for ever, and the process must still end. Otherwise it
        # ends before the interpreter does, which would cut it off inside torch and abort: by its
        # owner's close(), and where there was none, at the interpreter's end.
        self._thread = threading.Thread(target=self._serve, name="lane", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, walk: Walk, reduction: Reduction) -> None:
        self._work.put((walk, reduction))

    def close(self) -> None:
        """End the thread when it has done what it was given. What it cannot do, because another
        worker does not come, ends with Closed; the thread then waits as long as gloo does."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._work.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._failure = Closed("closed before this sum was there")
            if (current := self._current) is not None:
                current.end(self._failure)
        elif world_is_lost():  # nothing is on its way any more: all connections are shut
            _unfinished.clear()
        self.buffers.free()

    def begin(self, phases: tuple[RankPhase, ...], segment: Segment) -> None:
        """Post all receives of a segment.

        A message that replaces a part of the sum may arrive early: it holds what this rank sent of
        that part, so it cannot come before that was read.
        """
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

    def exchange(self, exchange: Exchange, segment: Segment, group: Any) -> None:
        for move in exchange.sends:
            message = segment.outgoing(move, exchange.sums)
            if message is not None:
                self._sent.append(
                    dist.isend(message, group=self._group, group_dst=move.peer, tag=self.tag)
                )
        for move, message, coming in self._expected.popleft():
            coming.wait()
            segment.receive(move, message, exchange.sums)

    def end_phase(self) -> None:
        """The next phase may add to what was sent in this one."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _receive(self, buffer: Tensor, peer: int) -> Any:
        return dist.irecv(buffer, group=self._group, group_src=peer, tag=self.tag)

    def _serve(self) -> None:
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                walk, self._current = work
                try:
                    if self._failure is not None:
                        raise self._failure
                    walk(self)
                except BaseException as error:
                    self._fail(error)
                    self._on_error(self._current, error)
                else:
                    self._current.one_done()
                self._current = None
                del walk, work  # and with them the tensor

    def _fail(self, error: BaseException) -> None:
        """Messages may be on their way that nobody will take: this lane can sum no more."""
        if self._failure is None:
            self._failure = error
        _unfinished.extend((self._expected, self._sent, self.buffers))
        self._expected, self._sent = deque(), []


class StreamLane:
    """A lane on CUDA: a stream and NCCL communicators of its own; the host never waits.

    Errors are raised where the segment is submitted, or reported by NCCL's own watchdog.
    """

    def __init__(self, device: torch.device, group: Any, on_error: OnError) -> None:
        self.tag = 0
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self.buffers = Buffers(device)

    def run(self, walk: Walk, reduction: Reduction) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            walk(self)
            reduction.events.append(self._stream.record_event())
        reduction.one_done()

    def close(self) -> None:
        self._stream.synchronize()
        self.buffers.free()

    def begin(self, phases: tuple[RankPhase, ...], segment: Segment) -> None:
        """NCCL's receives are posted with the sends of their exchange."""

    def exchange(self, exchange: Exchange, segment: Segment, group: Any) -> None:
        outgoing = [(move, segment.outgoing(move, exchange.sums)) for move in exchange.sends]
        incoming = [(move, segment.incoming(move)) for move in exchange.receives]
        together = [
            dist.P2POp(call, message, group=group, group_peer=move.peer)
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
