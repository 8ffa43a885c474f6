"""Processes that decode: none of their work holds up the interpreter of the loop that trains.

A pipe of requests is shared by all of them: whoever is free takes the next piece of a micro-batch
and writes its images into a slot of shared memory; a pipe of replies says so. The training loop
sends and receives by itself, without a thread. The processes are copies of one that opened the
images (`megabatch.data.child`), and end when the pipe of requests is closed or its owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Self

from megabatch.config import Config
from megabatch.data.shared import SharedOut
from megabatch.data.slots import Buffer, Layout, Slots
from megabatch.elastic.processes import look_at
from megabatch.errors import RunFailed, UserError

REQUEST = struct.Struct("<iiqiiiqq")
"""split (training or validation), slot, position of the micro-batch, its images, a piece's from and
to, place and bytes of the area where its images were received (no bytes: nowhere)"""
REPLY = struct.Struct("<iiddi")
"""slot, outcome, seconds, seconds on a core or waiting for one, length of the words that follow"""
DONE, MISTAKE, FAILURE, STARTED = range(4)
TRAINING, VALIDATION = range(2)
NO_SLOT = -1
_LEAST_PIECE, _MOST_PIECE = 16, 64
_PIPE_BYTES = 1 << 20
_LOOK_SECONDS = 1.0
"""how often a loop that asks for images looks whether all processes live"""
STOPPED_SECONDS = 10.0
"""how long one may be stopped: a suspended job's processes do not all go on at once"""


MicroBatchPiece = tuple[int, int, int]
"""from, to, epoch of images that come from other workers (of others 0)"""


class PendingMicroBatch:
    """A micro-batch that is on its way."""

    def __init__(
        self,
        decoders: Decoders,
        split: SplitReader,
        slot: int,
        first: int,
        count: int,
        pieces: list[MicroBatchPiece],
    ) -> None:
        self._decoders, self.split, self.slot = decoders, split, slot
        self._first, self._count, self._pieces = first, count, pieces
        self.unfinished = len(pieces)
        self.mistake = ""
        self.wanted = True

    @property
    def received(self) -> bool:
        """Whether its images have come from the other workers, where they do."""
        shared = self.split.shared
        return shared is None or all(shared.received(epoch) for *_, epoch in self._pieces)

    def requests(self) -> list[bytes]:
        """What is asked of the processes; waits until the images were received."""
        shared, what = self.split.shared, (self.split.number, self.slot, self._first, self._count)
        found = []
        for begin, end, epoch in self._pieces:
            area = None if shared is None else shared.area(epoch)
            where = (0, 0) if area is None else (area.place, area.nbytes)
            found.append(REQUEST.pack(*what, begin, end, *where))
        return found

    def result(self) -> Buffer:
        """The images, once all of them are there."""
        self._decoders.send(self)
        while self.unfinished:
            self._decoders.exchange(wait=True)
        if self.mistake:
            self._decoders.slots.give_back(self.slot)
            raise UserError(self.mistake)
        return self._decoders.slots.buffer(self.slot, self._count)

    def done(self) -> bool:
        self._decoders.exchange(wait=False)
        return self.unfinished == 0

    def cancel(self) -> None:
        self.wanted = False
        if not self.unfinished or self._decoders.take_back(self):
            self._decoders.slots.give_back(self.slot)


class SplitReader:
    """What the processes do for training, or for validation."""

    kind = "processes"

    def __init__(self, decoders: Decoders, number: int, shared: SharedOut | None) -> None:
        self._decoders, self.number, self.shared = decoders, number, shared
        self.busy_seconds = 0.0
        self.core_seconds: float | None = 0.0

    def submit(self, first: int, count: int) -> PendingMicroBatch:
        """Begin to read the images at `count` positions from `first` on."""
        return self._decoders.submit(self, first, count, list(self._pieces(first, count)))

    def worked(self, seconds: float, core_seconds: float) -> None:
        self.busy_seconds += seconds
        self.core_seconds = (self.core_seconds or 0.0) + core_seconds

    def _pieces(self, first: int, count: int) -> Iterator[MicroBatchPiece]:
        last = first + count
        spans = [(first, last, 0)] if self.shared is None else self.shared.by_epoch(first, last)
        for low, high, epoch in spans:
            for begin in range(low, high, self._decoders.piece):
                yield begin - first, min(begin + self._decoders.piece, high) - first, epoch


class Decoders:
    """So many processes, which open both parts of the images a config names and read up to
    `reading` micro-batches at a time. Training images that are `shared` out they find where this
    process receives them."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        processes: int,
        reading: int,
        pinned: bool,
        shared: SharedOut | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        self._shared = shared
        # Large pieces cost less each; small ones leave no process idle beside the others.
        self.piece = min(max(_LEAST_PIECE, layout.count * reading // (4 * processes)), _MOST_PIECE)
        self._held: list[PendingMicroBatch] = []  # until their images were received
        self._batches: dict[int, PendingMicroBatch] = {}
        self._unsent: deque[bytes] = deque()
        self._received = b""
        self._started: list[int] = []
        self._looked = time.monotonic()
        self._stopped_since: float | None = None
        with contextlib.ExitStack() as ending:
            self.slots = ending.enter_context(Slots(layout, reading, pinned))
            (theirs_in, requests), (replies, theirs_out) = _pipe(ending), _pipe(ending)
            self._requests, self._replies = requests.fileno(), replies.fileno()
            for ours in (self._requests, self._replies):
                os.set_blocking(ours, False)
                _enlarge(ours)
            files = [theirs_in.fileno(), theirs_out.fileno(), self.slots.file]
            received = None if shared is None else shared.file
            task = {
                "config": config.to_json(),
                "form": layout.form,
                "dtype": str(layout.dtype).removeprefix("torch."),
                "processes": processes,
                "slot_bytes": self.slots.nbytes,
                "files": files,
                "received": received,
                "left_out": list(left_out),
            }
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                # -P: what lies in the folder of the run must not stand in for a library.
                [sys.executable, "-P", "-m", "megabatch.data.child", json.dumps(task)],
                stdin=subprocess.DEVNULL,
                pass_fds=files if received is None else [*files, received],
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                # A group of their own: Ctrl-C is for the run, and what hangs can be ended together.
                process_group=0,
            )
            ending.callback(_end, self._process)
            theirs_in.close()
            theirs_out.close()
            self._ending = ending.pop_all()

    @property
    def processes(self) -> list[int]:
        """The first, which opens the images and then waits for the others, and those that have
        reported themselves since, which decode."""
        return [self._process.pid, *self._started]

    def split(self, number: int) -> SplitReader:
        return SplitReader(self, number, self._shared if number == TRAINING else None)

    def submit(
        self, split: SplitReader, first: int, count: int, pieces: list[MicroBatchPiece]
    ) -> PendingMicroBatch:
        # Slots of micro-batches that nobody wants any more come back by themselves.
        while not self.slots.free and any(not batch.wanted for batch in self._batches.values()):
            self.exchange(wait=True)
        batch = PendingMicroBatch(self, split, self.slots.take(), first, count, pieces)
        self._held.append(batch)
        self.exchange(wait=False)
        return batch

    def send(self, batch: PendingMicroBatch) -> None:
        """Ask the processes for a micro-batch, unless that was done; waits until its images were
        received."""
        if batch in self._held:
            self._unsent += batch.requests()
            self._held.remove(batch)
            self._batches[batch.slot] = batch

    def take_back(self, batch: PendingMicroBatch) -> bool:
        """Do not ask for a micro-batch, if that was not done yet."""
        held = batch in self._held
        if held:
            self._held.remove(batch)
        return held

    def exchange(self, wait: bool) -> None:
        """Send as much as the pipe takes, take in what came back; wait for something if asked
        to."""
        for batch in [batch for batch in self._held if batch.received]:
            self.send(batch)
        if wait:
            self._wait()
        # A pipe that is full is tried again later; of one that is broken the replies say why.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                os.write(self._requests, self._unsent[0])
                self._unsent.popleft()
        with contextlib.suppress(BlockingIOError):
            news = os.read(self._replies, _PIPE_BYTES)
            if not news:
                raise self._ended()
            self._received += news
            self._take_in()
        self._look()

    def _wait(self) -> None:
        """Until the pipes are ready, or a while has passed."""
        poll = select.poll()  # not select: a worker of thousands has more files than that takes
        poll.register(self._replies, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)
        poll.poll(_LOOK_SECONDS * 1000)

    def _look(self) -> None:
        """Now and then: whether all processes live. The first reports how another ended, but nobody
        would if the first was killed, or stopped."""
        now, before = time.monotonic(), self._looked
        if now - before < _LOOK_SECONDS:
            return
        self._looked = now
        first, *others = ((pid, look_at(pid)) for pid in self.processes)
        if first[1] is None or first[1].ended:
            raise self._ended()
        dead = [pid for pid, process in others if process is None or process.ended]
        if dead:
            raise RunFailed(
                f"the decoding process {dead[0]} ended, and images it had were not read"
            )
        stopped = [str(pid) for pid, process in (first, *others) if process and process.stopped]
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None or now - before > 3 * _LOOK_SECONDS:
            self._stopped_since = now  # also where this process itself was stopped meanwhile
        elif now - self._stopped_since >= STOPPED_SECONDS:
            raise RunFailed(
                f"decoding is held up: process {', '.join(stopped)} has been stopped for "
                f"{STOPPED_SECONDS:g} s; whoever stopped it can continue it (kill -CONT), and the "
                f"run goes on with --resume"
            )

    def _take_in(self) -> None:
        while len(self._received) >= REPLY.size:
            slot, outcome, seconds, core_seconds, length = REPLY.unpack_from(self._received)
            if len(self._received) < REPLY.size + length:
                return
            words = self._received[REPLY.size : REPLY.size + length].decode(errors="replace")
            self._received = self._received[REPLY.size + length :]
            if outcome == STARTED:
                self._started.append(int(words))
                continue
            if outcome == FAILURE:
                raise RunFailed(words)
            if slot == NO_SLOT:
                raise UserError(words)
            batch = self._batches[slot]
            batch.split.worked(seconds, core_seconds)
            batch.unfinished -= 1
            batch.mistake = batch.mistake or words
            if batch.unfinished == 0:
                del self._batches[slot]
                if not batch.wanted:
                    self.slots.give_back(slot)

    def _ended(self) -> RunFailed:
        # It is not waited for yet: its number, which is its group's too, must stay its own.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        killed = found.si_code != os.CLD_EXITED
        status = -found.si_status if killed else found.si_status
        return RunFailed(
            f"the decoding processes ended (exit status {status}) while images were still to be "
            f"read; --data.processes never decodes in threads instead"
        )

    def close(self) -> None:
        """End the processes; images that were handed out stay valid, except on their way to a
        GPU."""
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """All of them at once: what they still read nobody wants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pipe(ending: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """The two ends of a pipe, closed at the end at the latest."""
    out, into = os.pipe()
    return (
        ending.enter_context(open(out, "rb", buffering=0)),
        ending.enter_context(open(into, "wb", buffering=0)),
    )


def _enlarge(pipe: int) -> None:
    """For many requests, so that few of them wait here; where that is not allowed they do."""
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
