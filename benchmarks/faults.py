"""Workers of a supervised run are killed at random, and what that costs: `--out` writes it down.

Runs of the digits recipe go on one after another until so many SIGKILLs have hit one of their
workers: most when the run has recovered from the last and gone on for a while, some a moment after
it, while the others regroup. Each run must end by itself with the weights and the steps of an
undisturbed one. Then the same cost from the disk: the whole command is killed and started again
with --resume, as one would by hand, at once.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import tyro
from machine import on_cores

from megabatch.elastic.processes import children

AT_ONCE = 0.15  # share of kills that do not wait for the recovery from the last
PATIENCE_SECONDS = 300.0


def command(workers: int, epochs: float, out: Path) -> list[str]:
    flags = ["--deterministic", "--device", "cpu", "--epochs", f"{epochs:g}", "--json"]
    supervised = ["--workers", f"{workers}", "--max-restarts", "1000", "--out", str(out)]
    return [sys.executable, "-m", "megabatch.cli", "train", "digits", *flags, *supervised]


def steps_of(out: Path) -> list[tuple[int, int]]:
    """(step, images seen) of each line of a run's record; its last may be on its way."""
    found = []
    with contextlib.suppress(OSError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record["kind"] == "train":
                    found.append((record["step"], record["seen"]))
    return found


def workers_of(supervisor: int) -> list[int]:
    """Workers are forked by a server that the supervisor has started."""
    return sorted(worker for server in children(supervisor) for worker in children(server))


class Run:
    """A training command that is going on."""

    def __init__(self, line: list[str], out: Path) -> None:
        self.out = out
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def comes_to(self, steps: int) -> bool:
        """Wait until so many steps are in its record; False if it ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            if len(steps_of(self.out)) >= steps:
                return True
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.out} stands still")
            time.sleep(0.005)
        return False

    def kill_one(self, chance: random.Random) -> bool:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(workers_of(self.process.pid)), signal.SIGKILL)
            return True
        return False

    def weights(self) -> str | None:
        said, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        if self.process.returncode != 0:
            return None
        weights: str = json.loads(said.splitlines()[-1])["weights_sha256"]
        return weights


def killing(
    folder: Path, kills: int, workers: int, epochs: float, seed: int, until: float
) -> dict[str, Any]:
    """Kill workers of run after run."""
    alone = folder / "alone"
    whole = (Run(command(1, epochs, alone), alone).weights(), steps_of(alone))
    chance, seconds, runs, killed, at_once = random.Random(seed), [], 0, 0, 0
    equal = True
    while killed < kills and time.monotonic() < until:
        runs += 1
        out = folder / f"run{runs}"
        run = Run(command(workers, epochs, out), out)
        while killed < kills and run.comes_to(len(steps_of(out)) + chance.randint(1, 8)):
            before, began = len(steps_of(out)), time.monotonic()
            if not run.kill_one(chance):
                break
            killed += 1
            while chance.random() < AT_ONCE and killed < kills:
                time.sleep(chance.uniform(0, 2))
                hit = run.kill_one(chance)
                at_once, killed, began = at_once + hit, killed + hit, 0.0
            # A step's line is written in the step after it: one that was begun after the kill.
            if run.comes_to(before + 2) and began:
                seconds.append(time.monotonic() - began)
        same = (run.weights(), steps_of(out)) == whole
        equal &= same
        print(f"run {runs}: {killed} killed so far, {'equal' if same else 'NOT EQUAL'}")
    return {
        "kills": killed,
        "while the others regrouped": at_once,
        "runs": runs,
        "steps a run": len(whole[1]),
        "all ended by themselves, with equal weights and steps": equal,
        "seconds to the next step": summary(seconds),
    }


def from_disk(folder: Path, rounds: int, workers: int, epochs: float) -> dict[str, Any]:
    """Kill the whole command, start it again, and wait until it is past where it was."""
    to_go_on, to_be_there = [], []
    for number in range(rounds):
        out = folder / f"disk{number}"
        line = command(workers, epochs, out)
        run = Run(line, out)
        # Far from the last checkpoint: there is one an epoch.
        run.comes_to(40)
        before, began = len(steps_of(out)), time.monotonic()
        run.process.kill()
        run.process.communicate()
        again = Run([*line, "--resume"], out)
        while len(steps_of(out)) >= before and again.process.poll() is None:
            time.sleep(0.005)
        again.comes_to(len(steps_of(out)) + 2)
        to_go_on.append(time.monotonic() - began)
        again.comes_to(before + 2)
        to_be_there.append(time.monotonic() - began)
        again.process.kill()
        again.process.communicate()
    return {
        "rounds": rounds,
        "seconds to the next step": summary(to_go_on),
        "seconds to where it was": summary(to_be_there),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = {"median": median(seconds), "mean": mean(seconds), "most": max(seconds)}
    return {"of": len(seconds), **{name: round(value, 2) for name, value in found.items()}}


def main(
    kills: int = 100,
    workers: int = 4,
    epochs: float = 6,
    seed: int = 0,
    rounds: int = 5,
    minutes: float = 60,
    out: Path | None = None,
) -> None:
    """`rounds`: of starting from disk; `minutes`: no run is begun after so long."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        disk = from_disk(Path(folder), rounds, workers, epochs)
        load = os.getloadavg()[1]
        lost = killing(Path(folder), kills, workers, epochs, seed, began + 60 * minutes)
    record = {
        **on_cores(),
        "load of the machine": [round(load, 1), round(os.getloadavg()[1], 1)],
        "workers": workers,
        "seed": seed,
        "killed workers, replaced from the others' memory": lost,
        "killed command, started again from the disk": disk,
    }
    words = json.dumps(record, indent=2)
    print(words)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(words + "\n")
    if not lost["all ended by themselves, with equal weights and steps"]:
        raise SystemExit("a run did not end as the undisturbed one")


if __name__ == "__main__":
    tyro.cli(main)
