"""The planner against real steps between hosts that are network namespaces (root, Linux).

`megabatch bench sync` measures the links and the work of sending into machine.json, and training
steps without messages add what computing takes. The planner then says how long sums and steps take
that were not measured: other sizes, plans, grids, bucket sizes and worlds. Only then are they run,
by the engine that trains.

    python results/planner/emulated.py --out results/planner/first
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
HOSTS, EACH = 4, 2
MODEL, SIZE, CHANNELS, CLASSES = "small20", 32, 3, 10
COMPUTED = (2, 16)  # images of a pass whose time is measured without messages; rows use others
TURNS, IN_A_ROW = 3, 3


@dataclass(frozen=True)
class Case:
    """A sum of so many bytes, or (micro > 0) a training step."""

    hosts: int
    plan: str
    grid: tuple[int, int]
    nbytes: int = 0
    micro: int = 0
    bucket_mb: float = 0.0

    @property
    def world(self) -> int:
        return self.hosts * EACH

    def __str__(self) -> str:
        shape = f"{self.world} | {self.grid[0]} x {self.grid[1]} | {self.plan}"
        if not self.micro:
            return f"{shape} | sum of {self.nbytes:,} B"
        return f"{shape} | step, {self.micro} images, buckets of {self.bucket_mb:g} MB"


def cases() -> list[Case]:
    """Those of most hosts first, in the order in which they are run."""
    found = []
    for nbytes in (50_000, 200_000, 800_000):
        found += [Case(HOSTS, plan, (1, 8), nbytes) for plan in ("ring", "ring:halving_doubling")]
        for plan in ("torus", "hierarchical", "three_phase", "blueconnect"):
            found.append(Case(HOSTS, plan, (4, 2), nbytes))
        found.append(Case(HOSTS, "torus", (2, 4), nbytes))
    for plan, grid in (("ring", (1, 8)), ("ring:halving_doubling", (1, 8)), ("torus", (4, 2))):
        for micro, bucket_mb in ((4, 0.1), (4, 0.3), (8, 0.1), (8, 0.3), (8, 1.0), (8, 10.0)):
            found.append(Case(HOSTS, plan, grid, micro=micro, bucket_mb=bucket_mb))
    for hosts in (3, 2):
        found.append(Case(hosts, "ring", (1, hosts * EACH), 600_000))
        found += [Case(hosts, plan, (hosts, EACH), 600_000) for plan in ("torus", "hierarchical")]
    return found


# --- what the planner says ----------------------------------------------------------------------


def predict(case: Case, file: str) -> float:
    from megabatch.config import Config, Data
    from megabatch.planner import forecast, load
    from megabatch.planner.cost import price
    from megabatch.plans.names import plan_of

    machine = load(file)
    if not case.micro:
        return price(plan_of(case.plan), *case.grid, machine).seconds(case.nbytes)
    batch = case.micro * case.world
    data = Data("synthetic", size=SIZE, channels=CHANNELS, images=10 * batch, classes=CLASSES)
    config = Config(name="emulated", model=MODEL, batch=batch, epochs=1.0, data=data)
    found = forecast(
        config, machine, case.world, plan=case.plan, grid=case.grid, bucket_mb=case.bucket_mb
    )
    return found.step_seconds


# --- one worker ---------------------------------------------------------------------------------


def call_of(case: Case, cluster: Any, ending: contextlib.ExitStack) -> Callable[[], None]:
    import torch

    from megabatch.plans.names import named
    from megabatch.sync.execute import execute

    if case.micro:
        return training_step(cluster, ending, case.micro, case.plan, case.bucket_mb)
    plan, tensor = named(case.plan, "gloo"), torch.zeros(case.nbytes // 4)
    return lambda: execute(plan, tensor, cluster)


def training_step(
    cluster: Any,
    ending: contextlib.ExitStack,
    micro: int,
    plan: str | None = None,
    bucket_mb: float = 1.0,
) -> Callable[[], None]:
    """The trainer's step, of one pass a worker."""
    import torch

    from megabatch.config import Config, Data
    from megabatch.data.loader import MicroBatch
    from megabatch.parts import assemble, prepared
    from megabatch.step import train_step

    batch = micro * cluster.world
    data = Data("synthetic", size=SIZE, channels=CHANNELS, classes=CLASSES)
    config = Config(model=MODEL, batch=batch, micro=micro, span=micro, data=data)
    config = replace(config, plan=plan or "backend", bucket_mb=bucket_mb).check()
    images = torch.randn(micro, CHANNELS, SIZE, SIZE)
    labels, positions = torch.randint(CLASSES, (micro,)), torch.arange(micro)
    net = ending.enter_context(prepared(config, cluster, CLASSES))
    parts = ending.enter_context(assemble(config, cluster, net))

    def step() -> None:
        train_step(parts, [MicroBatch(images, labels, positions, 0)], batch, lr=0.0, momentum=0.9)

    return step


def work(task: str, file: Path) -> None:
    """Measure what computing takes, or the rows of as many hosts as there are."""
    import torch

    from megabatch.cluster import Cluster

    torch.set_num_threads(1)
    cluster = Cluster.from_env(None, "cpu")
    with contextlib.ExitStack() as ending:
        measure_here(task, file, cluster, ending)
    cluster.leave()


def measure_here(task: str, file: Path, cluster: Any, ending: contextlib.ExitStack) -> None:
    from megabatch.planner.machine_file import update

    if task == "compute":
        alone = replace(cluster, rank=0, world=1, grid=(1, 1))
        taken = in_turns([training_step(alone, ending, micro) for micro in COMPUTED], cluster)
        each = {"model": MODEL, "workers": cluster.world}
        rows = [
            each | {"micro": micro, "images_per_second": micro / seconds}
            for micro, seconds in zip(COMPUTED, taken, strict=True)
        ]
        if cluster.first:
            sources = {
                "compute": "results/planner/emulated.py, all workers at once, no messages",
                "sending.cores": "all hosts are on one computer: a host has its share of the cores",
            }
            part = {"compute": rows, "host": host(), "sources": sources}
            update(file, part | {"sending": {"cores": len(os.sched_getaffinity(0)) / HOSTS}})
    else:
        mine = [case for case in cases() if case.world == cluster.world]
        taken = in_turns(
            [call_of(case, replace(cluster, grid=case.grid), ending) for case in mine], cluster
        )
        if cluster.first:
            found = zip(mine, taken, strict=True)
            rows = [{"what": str(case), "seconds": seconds} for case, seconds in found]
            file.write_text(json.dumps(rows))


def in_turns(calls: list[Callable[[], None]], cluster: Any) -> list[float]:
    """Median seconds of each call, made several times in a row as in training; the rows take turns,
    so that all calls see the same weather."""
    from megabatch.bench.slowest import slowest

    for call in calls:  # opens connections, starts threads
        slowest(call, cluster)
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, seconds in zip(calls, taken, strict=True):
            seconds += [slowest(call, cluster) for _ in range(1 + IN_A_ROW)][1:]
    return [statistics.median(seconds) for seconds in taken]


def host() -> dict[str, Any]:
    import torch

    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "congestion control": congestion,
    }


# --- all of them --------------------------------------------------------------------------------


def measure(rate: str, machine: Path) -> list[dict[str, Any]]:
    """Rows with a case, what was predicted, and then the seconds that it took."""
    from benchmarks.hosts import hosts, run

    me = [sys.executable, __file__]
    sync = [sys.executable, "-m", "megabatch.cli", "bench", "sync", "--sizes", "4096"]
    part = machine.with_suffix(".part")

    def do(names: list[str], command: list[str]) -> None:
        if run(names, EACH, command, timeout=240):
            raise SystemExit(f"{' '.join(command)} failed")

    rows: list[dict[str, Any]] = []
    with hosts(HOSTS, rate) as names:
        for name in names:
            narrow(name, rate)
        machine.unlink(missing_ok=True)
        do(names, [*sync, "--repeats", "3", "--machine", str(machine)])
        do(names, [*me, "--task", "compute", "--file", str(machine)])
        predicted = [predict(case, str(machine)) for case in cases()]
        for count in sorted({case.hosts for case in cases()}, reverse=True):
            do(names[:count], [*me, "--task", "rows", "--file", str(part)])
            rows += json.loads(part.read_text())
    part.unlink()
    return [row | {"predicted": said} for row, said in zip(rows, predicted, strict=True)]


def narrow(name: str, rate: str) -> None:
    """Let no more than one packet of a host leave at once, and drop none.

    The burst that benchmarks/hosts.py allows lets a whole bucket through after an idle moment, as
    if the link were faster than it is.
    """
    limit = f"tbf rate {rate} burst 10kb limit 8mb"
    words = f"ip netns exec {name} tc qdisc replace dev eth0 root {limit}"
    subprocess.run(words.split(), check=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| workers | grid | plan | what | measured | planner | error |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = [row["predicted"] / row["seconds"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        lines.append(
            f"| {row['what']} | {1e3 * row['seconds']:.1f} ms | {1e3 * row['predicted']:.1f} ms "
            f"| {error:+.0%} |"
        )
    sizes = sorted(map(abs, errors))
    summary = f"median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}"
    return "\n".join([f"{summary}, {len(sizes)} rows", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="40mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--out", type=Path, default=HERE / "first", help="folder for what is made")
    parser.add_argument("--task", choices=("compute", "rows"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.task:
        work(flags.task, flags.file)
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    rows = measure(flags.rate, flags.out / "machine.json")
    (flags.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    (flags.out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
