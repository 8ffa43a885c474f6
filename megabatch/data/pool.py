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
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megabatch.config import Config
from megabatch.data.room import Layout, Room
from megabatch.data.slots import Slots
from megabatch.errors import RunFailed, UserError

if TYPE_CHECKING:
    from megabatch.data.shared import SharedOut

REQUEST = struct.Struct("<iiqiiiqq")
"""part (training or validation), slot, position of the micro-batch, its images, a piece's from and
to, place and bytes of the area where its images were received (no bytes: nowhere)"""
REPLY = struct.Struct("<iiddi")
"""slot, outcome, seconds, seconds on a core or waiting for one, length of the words that follow"""
DONE, MISTAKE, FAILURE = range(3)
TRAINING, VALIDATION = range(2)
NO_SLOT = -1
_LEAST_PIECE, _MOST_PIECE = 16, 64
_PIPE_BYTES = 1 << 20
_GLANCE_SECONDS = 1


Piece = tuple[int, int, int]
"""from, to, epoch of images that come from other workers (of others 0)"""


class Batch:
    """A micro-batch that is on its way."""

    def __init__(
        self,
        decoders: Decoders,
        part: DecodersPart,
        slot: int,
        first: int,
        count: int,
        pieces: list[Piece],
    ) -> None:
        self._decoders, self.part, self.slot = decoders, part, slot
        self._first, self._count, self._pieces = first, count, pieces
        self.unfinished = len(pieces)
        self.mistake = ""
        self.wanted = True

    @property
    def received(self) -> bool:
        """Whether its images have come from the other workers, where they do."""
        shared = self.part.shared
        return shared is None or all(shared.received(epoch) for *_, epoch in self._pieces)

    def requests(self) -> list[bytes]:
        """What is asked of the processes; waits until the images were received."""
        shared, what = self.part.shared, (self.part.number, self.slot, self._first, self._count)
        found = []
        for begin, end, epoch in self._pieces:
            area = None if shared is None else shared.area(epoch)
            where = (0, 0) if area is None else (area.place, area.nbytes)
            found.append(REQUEST.pack(*what, begin, end, *where))
        return found

    def result(self) -> Room:
        """The images, once all of them are there."""
        self._decoders.send(self)
        while self.unfinished:
            self._decoders.exchange(wait=True)
        if self.mistake:
            self._decoders.slots.give_back(self.slot)
            raise UserError(self.mistake)
        return self._decoders.slots.room(self.slot, self._count)

    def done(self) -> bool:
        self._decoders.exchange(wait=False)
        return self.unfinished == 0

    def cancel(self) -> None:
        self.wanted = False
        if not self.unfinished or self._decoders.take_back(self):
            self._decoders.slots.give_back(self.slot)


class DecodersPart:
    """What the processes do for training, or for validation. `busy_seconds` is their work so far,
    all together, of which `core_seconds` on a core or waiting for one, and not for storage."""

    def __init__(self, decoders: Decoders, number: int, shared: SharedOut | None) -> None:
        self._decoders, self.number, self.shared = decoders, number, shared
        self.busy_seconds = self.core_seconds = 0.0

    def submit(self, first: int, count: int) -> Batch:
        """Begin to read the images at `count` positions from `first` on."""
        return self._decoders.submit(self, first, count, list(self._pieces(first, count)))

    def _pieces(self, first: int, count: int) -> Iterator[Piece]:
        last = first + count
        parts = [(first, last, 0)] if self.shared is None else self.shared.by_epoch(first, last)
        for low, high, epoch in parts:
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
    ) -> None:
        self._shared = shared
        # Large pieces cost less each; small ones leave no process idle beside the others.
        self.piece = min(max(_LEAST_PIECE, layout.count * reading // (4 * processes)), _MOST_PIECE)
        self.slots = Slots(layout, reading, pinned)
        self._held: list[Batch] = []  # until their images were received
        self._batches: dict[int, Batch] = {}
        self._unsent: deque[bytes] = deque()
        self._received = b""
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        for ours in (self._requests, self._replies):
            os.set_blocking(ours, False)
            _enlarge(ours)
        files = [theirs_in, theirs_out, self.slots.file]
        received = None if shared is None else shared.file
        task = {
            "config": config.to_json(),
            "form": layout.form,
            "dtype": str(layout.dtype).removeprefix("torch."),
            "processes": processes,
            "slot_bytes": self.slots.nbytes,
            "files": files,
            "received": received,
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
        os.close(theirs_in)
        os.close(theirs_out)

    def part(self, number: int) -> DecodersPart:
        return DecodersPart(self, number, self._shared if number == TRAINING else None)

    def submit(self, part: DecodersPart, first: int, count: int, pieces: list[Piece]) -> Batch:
        # Slots of micro-batches that nobody wants any more come back by themselves.
        while not self.slots.free and any(not batch.wanted for batch in self._batches.values()):
            self.exchange(wait=True)
        batch = Batch(self, part, self.slots.take(), first, count, pieces)
        self._held.append(batch)
        self.exchange(wait=False)
        return batch

    def send(self, batch: Batch) -> None:
        """Ask the processes for a micro-batch, unless that was done; waits until its images were
        received."""
        if batch in self._held:
            self._unsent += batch.requests()
            self._held.remove(batch)
            self._batches[batch.slot] = batch

    def take_back(self, batch: Batch) -> bool:
        """Do not ask for a micro-batch, if that was not done yet."""
        held = batch in self._held
        if held:
            self._held.remove(batch)
        return held

    def exchange(self, wait: bool) -> None:
        """Send what there is room for in the pipe, take in what came back; wait for something if
        asked to."""
        for batch in [batch for batch in self._held if batch.received]:
            self.send(batch)
        if wait:
            self._wait()
        # A pipe that is full is tried again later; of one that is broken the replies say why.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                os.write(self._requests, self._unsent[0])
                self._unsent.popleft()
        try:
            news = os.read(self._replies, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not news:
            raise self._ended()
        self._received += news
        self._take_in()

    def _wait(self) -> None:
        """Until the pipes are ready, or a while has passed."""
        poll = select.poll()  # not select: a worker of thousands has more files than that takes
        poll.register(self._replies, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)
        # If the first was killed nobody speaks for the others any more.
        if not poll.poll(_GLANCE_SECONDS * 1000) and self._process.poll() is not None:
            raise self._ended()

    def _take_in(self) -> None:
        while len(self._received) >= REPLY.size:
            slot, outcome, seconds, core_seconds, length = REPLY.unpack_from(self._received)
            if len(self._received) < REPLY.size + length:
                return
            words = self._received[REPLY.size : REPLY.size + length].decode(errors="replace")
            self._received = self._received[REPLY.size + length :]
            if outcome == FAILURE:
                raise RunFailed(words)
            if slot == NO_SLOT:
                raise UserError(words)
            batch = self._batches[slot]
            batch.part.busy_seconds += seconds
            batch.part.core_seconds += core_seconds
            batch.unfinished -= 1
            batch.mistake = batch.mistake or words
            if batch.unfinished == 0:
                del self._batches[slot]
                if not batch.wanted:
                    self.slots.give_back(slot)

    def _ended(self) -> RunFailed:
        status = self._process.wait()
        return RunFailed(
            f"the decoding processes ended (exit status {status}) while images were still to be "
            f"read; --data.processes never decodes in threads instead"
        )

    def close(self) -> None:
        """End the processes; images that were handed out stay valid, except on their way to a
        GPU."""
        os.close(self._requests)
        # All of them at once: what they still read nobody wants.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._replies)
        self.slots.close()


def _enlarge(pipe: int) -> None:
    """Room for many requests, so that few of them wait here; where that is not allowed they do."""
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
