"""Runs with faults for an hour: what this machine holds of us before each run must not grow.

    python benchmarks/soak.py --minutes 60 --out results/faults/soak.json

One process supervises run after run of the digits recipe while their workers are killed, stopped
and asked to stop; between those, whole commands are killed, emulated hosts die (root) and a chaos
fills a disk of its own. Each run must end with the weights and steps of an undisturbed one. Before
each, memory, handles, processes, threads, namespaces, mounts, shared memory and temporary files are
counted, and a line is laid through each (Theil and Sen's, which a few outliers do not move).
"""

import contextlib
import itertools
import json
import multiprocessing.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import hosts
import tyro
from faults import Run, command, steps_of
from machine import on_cores

import megabatch as mb
from megabatch.elastic.processes import all_processes
from megabatch.elastic.supervisor import Losses
from megabatch.elastic.worlds import join_others
from megabatch.launch import run_local

WORKERS = 3
EPOCHS = 2.0
PATIENCE_SECONDS = 3.0
STUCK_SECONDS = 300.0
FIRST = 7
"""runs that may load and open what stays: one of each kind"""
MEMORY_SHARE = 0.02
"""by which memory may grow over all runs; what is counted may not"""
CONFIG = replace(
    mb.recipes.named("digits", epochs=EPOCHS), deterministic=True, patience=PATIENCE_SECONDS
)


# --- runs, and what happens to them ------------------------------------------------------------


def work(out: str, resume: bool) -> tuple[str, str]:
    """As megabatch train's own worker, without a word."""
    cluster = join_others(device="cpu")
    try:
        summary = mb.train(CONFIG, cluster=cluster, out=out, resume=resume, quiet=True)
    finally:
        cluster.leave()
    return summary.ended, summary.weights_sha256


Strike = Callable[[list[int], random.Random], object]


def supervised(out: Path, strikes: list[Strike], chance: random.Random) -> str:
    """A run that this process supervises; a thread strikes at random steps of it."""
    worlds: list[tuple[int, ...]] = []
    over = threading.Event()

    def strike() -> None:
        for number, one in enumerate(strikes):
            so_far, more = len(steps_of(out)), chance.randint(1, 30 // len(strikes))
            while len(steps_of(out)) < so_far + more + 2 * bool(number):
                if over.wait(0.01):
                    return
            with contextlib.suppress(ProcessLookupError):
                one([*worlds[-1]], chance)

    def run(resume: bool) -> tuple[str, str]:
        losses = Losses(most=1000, silent_seconds=PATIENCE_SECONDS)
        found: tuple[str, str] = run_local(
            WORKERS, work, str(out), resume, stops=True, losses=losses, on_world=worlds.append
        )
        return found

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        ended, weights = run(resume=False)
        if ended == "stopped":
            ended, weights = run(resume=True)
    finally:
        over.set()
        striking.join()
    return weights


def kill_one(workers: list[int], chance: random.Random) -> None:
    os.kill(chance.choice(workers), signal.SIGKILL)


def kill_all(workers: list[int], chance: random.Random) -> None:
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


def stop_one(workers: list[int], chance: random.Random) -> None:
    os.kill(chance.choice(workers), signal.SIGSTOP)


def ask_all(workers: list[int], chance: random.Random) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def killed_command(out: Path, chance: random.Random) -> str:
    """A command killed as a whole, its workers with it, and started again."""
    line = command(WORKERS, EPOCHS, out)
    run = Run(line, out)
    run.comes_to(chance.randint(1, 35))
    run.process.kill()
    run.process.communicate()
    return str(Run([*line, "--resume"], out).weights())


def lost_hosts(out: Path, chance: random.Random) -> str:
    """Two hosts of one worker each; one dies, and with it the run, which is started again."""
    line = [*command(1, EPOCHS, out), "--resume"]
    line = [word for word in line if word not in ("--workers", "1", "--max-restarts", "1000")]
    at = chance.randint(1, 30)
    with hosts.hosts(2, "400mbit") as names:
        over = threading.Event()

        def strike() -> None:
            while len(steps_of(out)) < at:
                if over.wait(0.01):
                    return
            hosts.kill(chance.choice(names))

        striking = threading.Thread(target=strike)
        striking.start()
        with quiet():
            hosts.run(names, 1, line, timeout=STUCK_SECONDS)
            over.set()
            striking.join()
            hosts.run(names, 1, line, timeout=STUCK_SECONDS)
    return str(json.loads((out / "summary.json").read_text())["weights_sha256"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What children say goes nowhere."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
        for one in (*kept, nowhere):
            os.close(one)


def chaos(out: Path, chance: random.Random) -> str:
    """A round of megabatch chaos, which mounts a disk and fills it: equal, or not."""
    line = [sys.executable, "-m", "megabatch.cli", "chaos", "digits", "--rounds", "1"]
    line += ["--faults", "2", "--kinds", "fill", "kill", "--epochs", "1", "--workers", "2"]
    line += ["--seed", str(chance.randrange(1000)), "--json"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=STUCK_SECONDS)
    equal = said.returncode == 0 and json.loads(said.stdout.splitlines()[-1])["equal"] == 1
    return "equal" if equal else f"status {said.returncode}: {said.stderr[-300:]}"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "workers killed": lambda out, chance: supervised(out, [kill_one, kill_one], chance),
    "all workers killed": lambda out, chance: supervised(out, [kill_all], chance),
    "a worker stopped": lambda out, chance: supervised(out, [stop_one], chance),
    "asked to stop, one killed": lambda out, chance: supervised(out, [kill_one, ask_all], chance),
    "command killed": killed_command,
    "hosts lost": lost_hosts,
    "chaos": chaos,
}


# --- what is held ------------------------------------------------------------------------------


def family() -> list[int]:
    """This process and all that come of it, the dead that nobody has buried too."""
    found, everyone = [os.getpid()], all_processes()
    for parent in found:
        found += [number for number, process in everyone.items() if process.parent == parent]
    return found


def held(folder: Path) -> dict[str, float]:
    ours = family()
    mine = f"{hosts.PREFIX}{os.getpid()}"
    return {
        "supervisor's MiB": memory(os.getpid(), "Rss"),
        "all processes' MiB": sum(memory(process, "Pss") for process in ours),
        "supervisor's handles": handles(os.getpid()),
        "all processes' handles": sum(map(handles, ours)),
        "processes": len(ours),
        "supervisor's threads": len(os.listdir("/proc/self/task")),
        "network namespaces": sum(n.startswith(mine) for n in listed("/run/netns")),
        "mounts": Path("/proc/self/mounts").read_text().count(str(folder)),
        "shared memory": len(listed("/dev/shm")),
        "temporary files": sum(1 for path in (folder / "tmp").rglob("*") if not path.is_dir()),
        "temporary folders": len(listed(folder / "tmp")),
    }


def memory(process: int, which: str) -> float:
    """MiB of a process; Pss divides what several share among them."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def handles(process: int) -> int:
    return len(listed(f"/proc/{process}/fd"))


def listed(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def growth(values: list[float]) -> float:
    """Over all of them, by the median of the slopes between any two."""
    places = enumerate(values)
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(places, 2)]
    return median(slopes) * (len(values) - 1) if slopes else 0.0


def judged(rows: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each thing that is held: how much at first and last, how it grew, whether it may."""
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        grown = growth(values)
        most = MEMORY_SHARE * median(values) if "MiB" in name else 0.5
        found[name] = {
            "first": round(values[0], 1),
            "last": round(values[-1], 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
            "grown": round(grown, 2),
            "may grow": round(most, 2),
            "steady": grown < most,
        }
    return found


def main(minutes: float = 60, pause: float = 0, seed: int = 0, out: Path | None = None) -> None:
    """`pause`: seconds between runs, to leave some of the machine to others."""
    chance, began = random.Random(seed), time.monotonic()
    rows: list[dict[str, float]] = []
    ran: dict[str, int] = {}
    wrong: list[str] = []
    kinds = dict(KINDS)
    try:
        hosts.check()
    except hosts.CannotEmulate as error:
        kinds.pop("hosts lost")
        print(f"no hosts are lost: {error}")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    # After multiprocessing has removed what it has in there.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-300)
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None  # asks for TMPDIR again
    alone = folder / "alone"
    weights = Run(command(1, EPOCHS, alone), alone).weights()
    steps = steps_of(alone)
    turns = itertools.cycle(kinds)
    while time.monotonic() - began < 60 * minutes:
        rows.append(held(folder))
        kind, run = next(turns), folder / "run"
        found = kinds[kind](run, chance)
        good = found == "equal" if kind == "chaos" else (found, steps_of(run)) == (
            weights, steps,
        )  # fmt: skip
        if not good:
            wrong.append(f"run {len(rows)}, {kind}: {found}")
        ran[kind] = ran.get(kind, 0) + 1
        print(f"{len(rows)}: {kind}: {'equal' if good else 'NOT EQUAL'}", flush=True)
        shutil.rmtree(run, ignore_errors=True)
        time.sleep(pause)
        write(out, record(seed, began, rows, ran, wrong))
    found = record(seed, began, rows, ran, wrong)
    print(json.dumps({**found, "before each run": "..."}, indent=2))
    grown = [name for name, one in found["held"].items() if not one["steady"]]
    if wrong or grown:
        raise SystemExit(f"not equal: {wrong}; grown: {grown}")


def record(
    seed: int,
    began: float,
    rows: list[dict[str, float]],
    ran: dict[str, int],
    wrong: list[str],
) -> dict[str, Any]:
    return {
        **on_cores(),
        "load of the machine": round(os.getloadavg()[2], 1),
        "seed": seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "runs": ran,
        "not equal": wrong,
        "left out as first": FIRST,
        "held": judged(rows[FIRST:] or rows),
        "before each run": {name: [round(row[name], 1) for row in rows] for name in rows[0]},
    }


def write(out: Path | None, found: dict[str, Any]) -> None:
    """As far as it is: an hour is long."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        words = json.dumps({**found, "before each run": None}, indent=2)
        rows = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(values)}"
            for name, values in found["before each run"].items()
        )
        words = words.replace('"before each run": null', f'"before each run": {{\n{rows}\n  }}')
        out.write_text(words + "\n")


if __name__ == "__main__":
    tyro.cli(main)
