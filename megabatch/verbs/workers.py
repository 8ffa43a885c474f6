"""Local workers of a verb: how many, and that they are being started, said before anything is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megabatch.elastic.supervisor import Losses
from megabatch.errors import UserError
from megabatch.host.granted import memory
from megabatch.launch import run_local
from megabatch.verbs.writing import say
from megabatch.workers.place import place_by, under_launcher

_NO_LOSSES = Losses()
MOST_WORKERS = 1024  # of one machine: more are a slip of the finger
_WORKER_BYTES = 64 << 20
"""of each, at the least: 40 MB were measured with the smallest net, before any images"""


def on_workers(
    asked: int | None,
    device: str,
    without_gpu: int,
    function: Callable[..., Any],
    *arguments: Any,
    stops: bool = False,
    losses: Losses = _NO_LOSSES,
    by_stage: tuple[int, ...] = (),
) -> Any:
    """function(*arguments) on so many local workers, or here where a launcher started this process.

    A launcher's single task may ask for local workers. None asked for: one a GPU, `without_gpu`
    where there is none. `stops`, `losses` and `by_stage`: as run_local's. Returns what the first
    returned.
    """
    place = place_by(os.environ)
    # In a shell that a launcher gave (srun --pty bash) one task is there to start others.
    if not started_here(asked):
        if asked is not None:
            raise UserError("--workers starts local workers, but a launcher has started these")
        if place.rank == 0:
            say(f"joining {_workers(place.world)}", progress=True)
        return function(*arguments)
    workers = how_many(asked, device, without_gpu)
    say(f"starting {_workers(workers)}: torch is loaded first", progress=True)
    if workers == 1 and not by_stage:
        return function(*arguments)
    return run_local(workers, function, *arguments, stops=stops, losses=losses, by_stage=by_stage)


def how_many(asked: int | None, device: str, without_gpu: int) -> int:
    """Local workers: as asked, or one a GPU, or `without_gpu` where there is none."""
    workers = gpus(device) or without_gpu if asked is None else asked
    check_workers(workers)
    return workers


def started_here(asked: object) -> bool:
    """Whether workers are started by this process, and not by a launcher."""
    return not under_launcher() or (asked is not None and place_by(os.environ).world == 1)


def check_workers(workers: int) -> None:
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers is {workers}; give 1 to {MOST_WORKERS}")
    known = memory()
    if known is not None and 1 < workers > (most := max(1, known.free // _WORKER_BYTES)):
        raise UserError(
            f"--workers is {workers}, and each takes {_WORKER_BYTES >> 20} MB or more of the "
            f"{known.free / 2**30:.1f} GiB that are free here: give {most} at most"
        )


def _workers(count: int) -> str:
    return f"{count:,} worker{'s' if count > 1 else ''}"


def gpus(device: str) -> int:
    """How many GPUs there are to use, counted without loading CUDA here."""
    if device == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
