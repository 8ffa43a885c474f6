"""Lanes: where segments travel side by side, each lane in order. A thread on CPU, a stream on CUDA.

A Reduction is what whoever submitted them waits for: it ends with the last segment, or with an
error.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from megabatch.elastic.link import world_is_lost
from megabatch.sync.hanging_up import hang_up
from megabatch.sync.segment import Buffers, GlooMessages, Journey, NcclMessages

_PATIENCE_SECONDS = 2.0

# Messages of lanes that failed. gloo may still write into their memory, and a message that is let
# go of unfinished hangs or aborts the process.
_unfinished: list[Any] = []

OnError = Callable[["Reduction", BaseException], None]


class Closed(RuntimeError):
    """A sum was asked of what is closed, or was closed before the sum was there."""


@dataclass(eq=False)
class Reduction:
    """A sum on its way: `segments` of it are still to be done."""

    segments: int
    events: list[torch.cuda.Event] = field(init=False, default_factory=list)
    over: threading.Event = field(init=False, default_factory=threading.Event)
    """set when it has ended, well or not"""
    _error: BaseException | None = field(init=False, default=None)
    _then: list[Callable[[BaseException | None], None]] = field(init=False, default_factory=list)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def wait(self) -> None:
        """Until the sum is there (on CUDA the present stream waits, not the host), or raise."""
        self.over.wait()
        if self._error is not None:
            raise self._error
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)

    def then(self, call: Callable[[BaseException | None], None]) -> None:
        """Call with the error, or None, at the end; from whichever thread ends it."""
        with self._lock:
            if not self.over.is_set():
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
            if self.over.is_set():
                return
            self._error = error
            self.over.set()
        for call in self._then:
            call(error)


class ThreadLane:
    """A lane on CPU: a thread of its own, and messages over gloo in a group that others use too
    (None: this worker is alone)."""

    def __init__(self, device: torch.device, group: Any, on_error: OnError) -> None:
        self._group = group
        self._messages, self._buffers = GlooMessages(group), Buffers(device)
        self._on_error = on_error
        self._work: SimpleQueue[tuple[Journey, Reduction] | None] = SimpleQueue()
        self._current: Reduction | None = None
        self._groups: set[Any] = set()
        """that it works in now"""
        self._failure: BaseException | None = None
        self._closed = False
        # A daemon: after a fault it may wait for ever, and the process must still end. But it ends
        # before the interpreter does, which would cut it off inside torch and abort: by its owner's
        # close(), or at the interpreter's end.
        self._thread = threading.Thread(target=self._serve, name="lane", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_process)

    def run(self, journey: Journey, reduction: Reduction) -> None:
        self._work.put((journey, reduction))

    def close(self) -> None:
        """End the thread when it has done what it was given. What it cannot do, because another
        worker does not come, ends with Closed; the thread then waits as long as gloo does, or until
        this process ends."""
        if self._closed:
            return
        self._closed = True
        self._work.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._failure = Closed("closed before this sum was there")
            if (current := self._current) is not None:
                current.end(self._failure)
        elif self._failure is None or world_is_lost():
            # Nothing is on its way any more: in a lost world all connections are shut.
            atexit.unregister(self._end_with_process)
            if world_is_lost():
                _unfinished.clear()
        self._buffers.free()

    def _end_with_process(self) -> None:
        """After a fault nobody goes on in this group: what waits there, and what is on its way, is
        given up while the interpreter can still hear of it."""
        self.close()
        for group in self._groups:
            hang_up(group)
        self._thread.join(_PATIENCE_SECONDS)

    def _serve(self) -> None:
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                journey, self._current = work
                self._groups = {self._group, *journey.process_groups} - {None}
                try:
                    if self._failure is not None:
                        raise self._failure
                    journey.walk(self._messages, self._buffers)
                except BaseException as error:
                    self._fail(error)
                    self._on_error(self._current, error)
                else:
                    self._current.one_done()
                if self._failure is None:
                    self._groups = set()
                self._current = None
                del journey, work  # and with them the tensor

    def _fail(self, error: BaseException) -> None:
        """Messages may be on their way that nobody will take: this lane can sum no more."""
        if self._failure is None:
            self._failure = error
        _unfinished.extend((*self._messages.give_up(), self._buffers))


class StreamLane:
    """A lane on CUDA: a stream and NCCL communicators of its own; the host never waits.

    Errors are raised where the segment is submitted, or reported by NCCL's own watchdog.
    """

    def __init__(self, device: torch.device, group: Any, on_error: OnError) -> None:
        self._stream = torch.cuda.Stream(device)
        self._messages = NcclMessages()
        with torch.cuda.stream(self._stream):
            self._buffers = Buffers(device)

    def run(self, journey: Journey, reduction: Reduction) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            journey.walk(self._messages, self._buffers)
            reduction.events.append(self._stream.record_event())
        reduction.one_done()

    def close(self) -> None:
        self._stream.synchronize()
        self._buffers.free()
