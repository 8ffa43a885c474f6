"""What local workers do whose launcher is a process of its own: it loads no torch for them."""

import os
import signal
import time
from pathlib import Path

from megabatch.host import stopping
from megabatch.host.stopping import stop_requests

LONG_SECONDS = 10_000
ONE_REQUEST_SECONDS = 5.0
"""within which two signals are one request: a launcher may be slow to pass its own on"""


def note_pid(folder):
    (Path(folder) / os.environ["RANK"]).write_text(f"{os.getpid()}")


def sleep(folder):
    note_pid(folder)
    time.sleep(LONG_SECONDS)


def await_signal(folder):
    import torch.distributed as dist

    from megabatch.cluster import Cluster

    got = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: got.append(number))
    note_pid(folder)
    while not got:
        time.sleep(0.01)
    cluster = Cluster.from_env(device="cpu")
    said = [None] * cluster.world
    dist.all_gather_object(said, got[0])
    cluster.leave()
    return said


def hear_and_go_on(folder):
    stopping._TWICE_SECONDS = ONE_REQUEST_SECONDS
    with stop_requests(speaks=False) as asked:
        note_pid(folder)
        while not asked():
            time.sleep(0.01)
        # What comes later than this is a second request.
        ends = time.monotonic() + 1.2 * ONE_REQUEST_SECONDS
        while time.monotonic() < ends:
            time.sleep(0.05)
        (Path(folder) / f"heard-{os.environ['RANK']}").touch()
        time.sleep(LONG_SECONDS)
