"""A run folder under fire: a run killed while it writes a checkpoint, and a disk that is full at
any moment; each time it must go on, to the weights of the undisturbed run.

    python benchmarks/faults_files.py --kills 200 --full 50 --out results/faults/files.json

One worker trains digits in a process of its own with a checkpoint at every step or so. A kill
counts where it left a half written checkpoint behind; a full disk is a file system of its own where
that can be mounted (root), with a random number of bytes left free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megabatch as mb
from megabatch.chaos.job import small_disk

_STUCK_SECONDS = 300.0
_DISK_BYTES = 24 << 20


def train(out: str, epochs: float, told: Any) -> None:
    """The work of one process: from wherever the folder stands to the end."""
    torch.set_num_threads(1)
    config = mb.recipes.named("digits", epochs=epochs)
    config = replace(config, deterministic=True, save_every=0.01, eval_every=0)
    cluster = mb.Cluster.from_env(device="cpu")
    try:
        summary = mb.train(config, cluster=cluster, out=out, resume=True, quiet=True)
        told.send(("done", summary.weights_sha256))
    except (mb.RunFailed, mb.UserError) as error:
        told.send((type(error).__name__, str(error)))
    except BaseException as error:
        told.send(("traceback", f"{type(error).__name__}: {error}"))


class Process:
    """A process that trains; what it says, and that it ended."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["torch", "torch._dynamo", "megabatch.training"])

    def __init__(self, out: Path, epochs: float) -> None:
        self._pipe, theirs = self._context.Pipe(duplex=False)
        self._process = self._context.Process(target=train, args=(str(out), epochs, theirs))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def said(self) -> tuple[str, str]:
        """Its last words; a killed one has none."""
        self._process.join(_STUCK_SECONDS)
        try:
            kind, words = self._pipe.recv()
        except EOFError:
            return "nothing", ""
        return kind, words


def partial(out: Path) -> list[Path]:
    return list((out / "checkpoints").glob(".seen-*.partial"))


def kills(count: int, place: Path, epochs: float, whole: str, rng: random.Random) -> dict[str, Any]:
    """Kill processes inside the writing of a checkpoint until so many were; all must go on."""
    inside = outside = finished = 0
    wrong: list[str] = []
    out = place / "run-0"
    while inside < count:
        process = Process(out, epochs)
        skip = rng.randrange(12)  # checkpoints to let pass
        wait = rng.uniform(0.0, 0.02)
        seen: set[Path] = set()
        while process.alive and len(seen) <= skip:
            seen.update(partial(out))
        time.sleep(wait)
        process.kill()
        kind, words = process.said()
        if kind == "nothing":
            inside, outside = inside + bool(partial(out)), outside + (not partial(out))
        elif kind == "done":
            finished += 1
            if words != whole:
                wrong.append(f"other weights after {inside} kills")
            shutil.rmtree(out)
            out = place / f"run-{finished}"
        else:
            wrong.append(words)
    kind, words = Process(out, epochs).said()
    if (kind, words) != ("done", whole):
        wrong.append(f"the last one: {kind} {words}")
    return {
        "inside_a_checkpoint": inside,
        "elsewhere": outside,
        "runs_finished": finished + 1,
        "wrong": wrong,
    }


def full(count: int, disk: Path, epochs: float, whole: str, rng: random.Random) -> dict[str, Any]:
    """Fill the disk at some moment, but for some bytes; the run goes on when there is room."""
    moments = unhurt = finished = 0
    wrong: list[str] = []
    out, filler = disk / "run", disk / "filler"
    while moments < count:
        process = Process(out, epochs)
        skip = rng.randrange(12)
        seen: set[Path] = set()
        while process.alive and len(seen) <= skip:
            seen.update(partial(out))
        free = shutil.disk_usage(disk).free
        left = min(free, rng.choice((0, rng.randrange(1 << 12), rng.randrange(1 << 19))))
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, free - left)
        kind, words = process.said()
        filler.unlink()
        if kind == "done":
            unhurt += 1  # it ended before it needed the room
            if words != whole:
                wrong.append("other weights")
            shutil.rmtree(out)
        elif kind in ("RunFailed", "UserError") and "No space left on device" in words:
            moments += 1
        else:
            wrong.append(f"{kind}: {words}")
            moments += 1
        if moments % 10 == 0 and out.exists():
            finished += 1
            kind, words = Process(out, epochs).said()
            if (kind, words) != ("done", whole):
                wrong.append(f"{kind}: {words}")
            shutil.rmtree(out)
    return {
        "moments": moments,
        "ended_before": unhurt,
        "runs_finished": finished,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--full", type=int, default=50)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    rng, began = random.Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        place = Path(folder)
        kind, whole = Process(place / "whole", asked.epochs).said()
        assert kind == "done", whole
        result: dict[str, Any] = {
            "command": f"benchmarks/faults_files.py --kills {asked.kills} --full {asked.full} "
            f"--epochs {asked.epochs:g} --seed {asked.seed}",
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}",
            "torch": torch.__version__,
            "kills": kills(asked.kills, place, asked.epochs, whole, rng),
        }
        result["kills"]["seconds"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        with small_disk(place / "disk", _DISK_BYTES) as disk:
            if disk is None:
                result["full"] = "no file system of its own could be mounted"
            else:
                result["full"] = full(asked.full, disk, asked.epochs, whole, rng)
                result["full"]["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(result, indent=2))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
