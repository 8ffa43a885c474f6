"""Processes that decode: none of their work holds up the interpreter of the loop that trains.

A pipe of requests is shared by all of them: whoever is free takes the next piece of a micro-batch
and writes its images into a slot of shared memory; a pipe of replies says so. The training loop
sends and receives by itself, without a thread. The processes are copies of one that opened the
images (`megabatch.data.decoder`), and end when the pipe of requests is closed or its owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path

from megabatch.config import Config, RunFailed, UserError
from megabatch.data.room import Layout, Room
from megabatch.data.slots import Slots
from megabatch.data.work import PIECE

REQUEST = struct.Struct("<iiqiii")
"""part (training or validation), slot, position of the micro-batch, its images, a piece's from and
to"""
REPLY = struct.Struct("<iiddi")
"""slot, outcome, seconds, seconds of a core, length of the words that follow"""
DONE, MISTAKE, FAILURE = range(3)
TRAINING, VALIDATION = range(2)
NO_SLOT = -1
_PIPE_BYTES = 1 << 20
_PATIENCE_SECONDS = 10


class Batch:
    """A micro-batch that is on its way."""

    def __init__(self, decoders: Decoders, part: DecodersPart, slot: int, count: int) -> None:
        self._decoders, self.part, self.slot, self.count = decoders, part, slot, count
        self.pieces = -(-count // PIECE)
        self.mistake = ""
        self.wanted = True

    def result(self) -> Room:
        """The images, once all of them are there."""
        while self.pieces:
            self._decoders.exchange(wait=True)
        if self.mistake:
            raise UserError(self.mistake)
        return self._decoders.slots.room(self.slot, self.count)

    def done(self) -> bool:
        self._decoders.exchange(wait=False)
        return self.pieces == 0

    def cancel(self) -> None:
        self.wanted = False
        if not self.pieces:
            self._decoders.slots.give_back(self.slot)


class DecodersPart:
    """What the processes do for training, or for validation. `busy_seconds` is their work so far,
    all together, of which `core_seconds` were spent on a core and not waiting for storage."""

    def __init__(self, decoders: Decoders, number: int) -> None:
        self._decoders, self.number = decoders, number
        self.busy_seconds = self.core_seconds = 0.0

    def submit(self, first: int, count: int) -> Batch:
        """Begin to read the images at `count` positions from `first` on."""
        return self._decoders.submit(self, first, count)


class Decoders:
    """So many processes, which open both parts of the images a config names."""

    def __init__(
        self, config: Config, layout: Layout, processes: int, slots: int, pinned: bool
    ) -> None:
        self.processes = processes
        self.slots = Slots(layout, slots, pinned)
        self._batches: dict[int, Batch] = {}
        self._unsent: deque[bytes] = deque()
        self._received = b""
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        for ours in (self._requests, self._replies):
            os.set_blocking(ours, False)
            _enlarge(ours)
        task = {
            "config": config.to_json(),
            "form": layout.form,
            "dtype": str(layout.dtype).removeprefix("torch."),
            "processes": processes,
            "slot_bytes": self.slots.nbytes,
            "files": [theirs_in, theirs_out, self.slots.file],
        }
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megabatch.data.decoder", json.dumps(task)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out, self.slots.file),
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def part(self, number: int) -> DecodersPart:
        return DecodersPart(self, number)

    def submit(self, part: DecodersPart, first: int, count: int) -> Batch:
        batch = Batch(self, part, self.slots.take(), count)
        self._batches[batch.slot] = batch
        for begin in range(0, count, PIECE):
            end = min(begin + PIECE, count)
            self._unsent.append(REQUEST.pack(part.number, batch.slot, first, count, begin, end))
        self.exchange(wait=False)
        return batch

    def exchange(self, wait: bool) -> None:
        """Send what there is room for in the pipe, take in what came back; wait for something if
        asked to."""
        if wait:
            select.select([self._replies], [self._requests] if self._unsent else [], [])
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

    def _take_in(self) -> None:
        while len(self._received) >= REPLY.size:
            slot, outcome, seconds, core_seconds, length = REPLY.unpack_from(self._received)
            if len(self._received) < REPLY.size + length:
                return
            words = self._received[REPLY.size : REPLY.size + length].decode()
            self._received = self._received[REPLY.size + length :]
            if outcome == FAILURE:
                raise RunFailed(words)
            if slot == NO_SLOT:
                raise UserError(words)
            batch = self._batches[slot]
            batch.part.busy_seconds += seconds
            batch.part.core_seconds += core_seconds
            batch.pieces -= 1
            batch.mistake = batch.mistake or words
            if batch.pieces == 0:
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
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._replies)
        self.slots.close()


def _enlarge(pipe: int) -> None:
    """Room for many requests, so that few of them wait here; where that is not allowed they do."""
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
