"""A decoding process: `python -m megabatch.data.child TASK`, started by megabatch.data.pool.

It opens the images once and then becomes several, which share all that was opened. A process that
dies is reported by the first, which does nothing but wait for the others.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from megabatch.config import Config
from megabatch.data.decoded import Decoded
from megabatch.data.opening import open_stored
from megabatch.data.pool import DONE, FAILURE, MISTAKE, NO_SLOT, REPLY, REQUEST, STARTED, TRAINING
from megabatch.data.shared import FromArea
from megabatch.data.slots import Layout, map_slots
from megabatch.data.source import Writer, for_tuning
from megabatch.errors import UserError
from megabatch.host.stopping import SIGNALS

_MOST_WORDS = 2000  # a reply is written in one go, which a pipe does up to 4096 bytes
_NICE = 5  # the loop that launches kernels goes first


def main(task: dict[str, Any]) -> None:
    requests, replies, file = task["files"]
    try:
        # The run decides when it ends: it finishes its step first, and needs images for that.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        config = Config.from_json(task["config"])
        data = config.data
        dtype = getattr(torch, task["dtype"])
        layout = Layout(task["form"], config.micro, data.size, data.channels, dtype)
        stored = open_stored(config, left_out=task["left_out"])
        parts = for_tuning(stored, data.tuning_share)
        train, val = (part for part in parts if isinstance(part, Decoded))
        received: FromArea | None = None
        if task["received"] is not None:
            assert train.pack is not None
            received = FromArea(train.pack, task["received"])
            train = train.of(received)
        writers = [train.writer(config, layout, True), val.writer(config, layout, False)]
        slots = torch.from_numpy(map_slots(file)).split(task["slot_bytes"])
    except UserError as error:
        reply(replies, NO_SLOT, MISTAKE, str(error))
        return
    except Exception:
        reply(replies, NO_SLOT, FAILURE, f"a decoding process failed: {traceback.format_exc()}")
        return
    os.nice(_NICE)
    # What is there now stays: a collector that walks over it, in each process, would only cost
    # time and copies of its pages.
    gc.collect()
    gc.freeze()
    for _ in range(task["processes"]):
        process = os.fork()
        if process == 0:
            serve(writers, received, layout, slots, requests, replies)
            os._exit(0)
        reply(replies, NO_SLOT, STARTED, str(process))
    os.close(requests)
    wait_for_others(replies)


def serve(
    writers: Sequence[Writer],
    received: FromArea | None,
    layout: Layout,
    slots: Sequence[torch.Tensor],
    requests: int,
    replies: int,
) -> None:
    """Read pieces until nobody asks any more."""
    while message := os.read(requests, REQUEST.size):
        split, slot, first, count, begin, end, *area = REQUEST.unpack(message)
        began, core = time.perf_counter(), core_seconds()
        outcome, words = DONE, ""
        try:
            if split == TRAINING and received is not None:
                received.look_in(*area)
            writers[split](first + begin, layout.views(slots[slot], count).rows(begin, end))
        except UserError as error:
            outcome, words = MISTAKE, str(error)
        except Exception:
            outcome, words = FAILURE, f"a decoding process failed: {traceback.format_exc()}"
        spent = time.perf_counter() - began, core_seconds() - core
        try:
            reply(replies, slot, outcome, words, *spent)
        except BrokenPipeError:
            return


def core_seconds() -> float:
    """How long this process has run or waited for a core."""
    try:
        with open("/proc/self/schedstat") as file:
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) * 1e-9
    except (OSError, ValueError):
        return time.process_time()


def wait_for_others(replies: int) -> None:
    while True:
        try:
            _, status = os.wait()
        except ChildProcessError:
            return
        code = os.waitstatus_to_exitcode(status)
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            advice = "; is there enough memory?" if code == -signal.SIGKILL else ""
            reply(replies, NO_SLOT, FAILURE, f"a decoding process {how}{advice}")


def reply(
    replies: int,
    slot: int,
    outcome: int,
    words: str,
    seconds: float = 0.0,
    on_cores: float = 0.0,
) -> None:
    text = words.encode()[-_MOST_WORDS:] if outcome == FAILURE else words.encode()[:_MOST_WORDS]
    os.write(replies, REPLY.pack(slot, outcome, seconds, on_cores, len(text)) + text)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
