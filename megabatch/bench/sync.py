"""megabatch bench sync: every plan against the backend's own all-reduce and the wire's limit.

Run it by any launcher, or alone for local workers. It prints milliseconds by size, writes links and
plans to machine.json (which the planner and plan="auto" read), and measures that choice again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megabatch.bench.links import links, sending
from megabatch.bench.slowest import slowest
from megabatch.bench.tcp_ring import tcp_ring
from megabatch.bench.timing import check_seconds
from megabatch.cluster import Cluster
from megabatch.errors import DONE, UserError
from megabatch.launch import run_local
from megabatch.planner import machine_file
from megabatch.plans import PLANS
from megabatch.plans.names import named
from megabatch.runs.log import environment
from megabatch.sync.choice import Choice, fastest_by_size
from megabatch.sync.execute import Pipeline
from megabatch.verbs.parsing import parse
from megabatch.verbs.workers import check_workers
from megabatch.verbs.writing import check_out
from megabatch.workers.place import under_launcher

LIMIT, BACKEND, BEST = "bare TCP ring", "backend", "best plan"
AUTO, AUTO_HALF = "auto", "auto fp16"
# A plan that is slower than the best by this much at first sight is not measured again.
_HOPELESS = 1.5


@dataclass(frozen=True)
class SyncFlags:
    sizes: tuple[int, ...] = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20, 100_000_000)
    """bytes of the tensors, fp32"""
    repeats: int = 20
    """runs of each plan and size; the median counts"""
    seconds: float = 30.0
    """at most so long for one plan at one size, but three runs at least"""
    workers: int = 4
    """local workers, where no launcher has started any"""
    grid: tuple[int, int] | None = None
    """rows and columns (none: hosts and workers in each)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the tensors are"""
    machine: str | None = "machine.json"
    """file that receives links and plans"""
    out: str | None = None
    """file that receives all figures as JSON"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(SyncFlags, "bench sync", arguments)
    if flags.machine:
        machine_file.check_updatable(flags.machine)
    if flags.out:
        check_out(Path(flags.out), (".json",), "a file of figures")
    check_workers(flags.workers)
    if flags.repeats < 1:
        raise UserError(f"--repeats is {flags.repeats}; give 1 or more")
    if min(flags.sizes, default=0) < 4:
        raise UserError("--sizes are bytes, 4 and more: name at least one")
    check_seconds(flags.seconds)
    if not under_launcher():
        print(f"starting {flags.workers} workers", file=sys.stderr, flush=True)
    report = measure(flags) if under_launcher() else run_local(flags.workers, measure, flags)
    if report is not None:
        _show(report)
        if flags.machine:
            machine_file.update(flags.machine, _machine_part(report))
        if flags.out:
            Path(flags.out).write_text(json.dumps(report, indent=1) + "\n")
        if flags.json:
            print(json.dumps(report), flush=True)
    return DONE


def measure(flags: SyncFlags) -> dict[str, Any] | None:
    """One worker's part; the first returns the report."""
    torch.set_num_threads(1)
    cluster = Cluster.from_env(flags.grid, flags.device)
    pipeline = Pipeline(cluster)
    try:
        ring = tcp_ring(cluster)
        via = ["ring", "halving_doubling"] + ["backend"] * (cluster.device.type == "cuda")
        names = [f"{plan}:{wiring}" for plan in PLANS for wiring in via]
        calls: dict[str, Callable[[torch.Tensor], object]] = {
            LIMIT: lambda tensor: ring(tensor.nbytes),
            BACKEND: dist.all_reduce,
        }
        calls |= {name: partial(pipeline.sum, named(name, "gloo")) for name in names}
        rows = _measure(calls, flags, cluster)
        # The choice is made by the first worker from what all have measured, then measured itself.
        plans = [row for row in rows if row["plan"] in names]
        chosen = cluster.agree(lambda: fastest_by_size(plans))
        again: dict[str, Callable[[torch.Tensor], object]] = {
            LIMIT: calls[LIMIT],
            BACKEND: calls[BACKEND],
            AUTO: partial(_sum_chosen, chosen, pipeline, None),
            AUTO_HALF: partial(_sum_chosen, chosen, pipeline, torch.float16),
        }
        again |= {_best(plans, size): calls[_best(plans, size)] for size in flags.sizes}
        second = _measure(again, flags, cluster)
        found, work = links(cluster), sending(cluster, pipeline)
    finally:
        pipeline.close()
        cluster.leave()
    if not cluster.first:
        return None
    return {
        "environment": environment(),
        "grid": cluster.grid,
        "hosts": cluster.world // cluster.local_world,
        "workers_per_node": cluster.local_world,
        "links": found,
        "sending": work,
        "rows": rows,
        "chosen": second,
    }


def _sum_chosen(
    choice: Choice, pipeline: Pipeline, wire: torch.dtype | None, tensor: torch.Tensor
) -> None:
    nbytes = tensor.numel() * (wire or tensor.dtype).itemsize
    pipeline.sum(choice.plan(nbytes), tensor, wire)


def _measure(
    calls: dict[str, Callable[[torch.Tensor], object]], flags: SyncFlags, cluster: Cluster
) -> list[dict[str, Any]]:
    """Rows with plan, nbytes, seconds (median) and runs; plans take turns, so all see the same
    weather."""
    rows = []
    for nbytes in flags.sizes:
        tensor = torch.zeros(nbytes // 4, device=cluster.device)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call(tensor[: 1 << 18])  # connections, groups and memory are made once
        for turn in range(flags.repeats):
            best = min((min(times) for times in taken.values() if times), default=0.0)
            for name, call in calls.items():
                times = taken[name]
                hopeless = turn > 0 and min(times) > _HOPELESS * best and name != BACKEND
                enough = turn >= 3 and sum(times) > flags.seconds
                if not hopeless and not enough:
                    times.append(slowest(partial(call, tensor), cluster))
        rows += [
            {"plan": name, "nbytes": nbytes, "seconds": median(times), "runs": len(times)}
            for name, times in taken.items()
        ]
        if cluster.first:
            fast = min(taken, key=lambda name: median(taken[name]) if name != LIMIT else math.inf)
            line = f"{_size(nbytes)}: {fast} {median(taken[fast]) * 1e3:.2f} ms"
            print(line, file=sys.stderr, flush=True)
    return rows


def _best(rows: list[dict[str, Any]], nbytes: int) -> str:
    best = min((row for row in rows if row["nbytes"] == nbytes), key=lambda row: row["seconds"])
    return str(best["plan"])


# --- what is said ------------------------------------------------------------------------------


def _show(report: dict[str, Any]) -> None:
    chosen = [row for row in report["chosen"] if ":" not in row["plan"]]
    rows = [*report["rows"], *chosen]  # limit and backend count as measured beside the choice
    sizes = sorted({row["nbytes"] for row in rows})
    seconds = {(row["plan"], row["nbytes"]): row["seconds"] for row in rows}
    y, x = report["grid"]
    table = Table(title=f"milliseconds, {report['hosts']} hosts, {y} x {x} workers", box=None)
    table.add_column("")
    for nbytes in sizes:
        table.add_column(_size(nbytes), justify="right")
    for plan in dict.fromkeys(row["plan"] for row in rows):
        table.add_row(plan, *(f"{seconds[plan, nbytes] * 1e3:.2f}" for nbytes in sizes))
    for nbytes in sizes:  # of the same turn as the choice
        again = (row for row in report["chosen"] if ":" in row["plan"] and row["nbytes"] == nbytes)
        seconds[BEST, nbytes] = min(row["seconds"] for row in again)
    for above, below in ((BEST, AUTO), (BACKEND, AUTO), (AUTO, AUTO_HALF), (LIMIT, AUTO)):
        cells = [f"{seconds[above, nbytes] / seconds[below, nbytes]:.2f}" for nbytes in sizes]
        table.add_row(f"{above} / {below}", *cells, style="bold")
    Console().print(table)


def _size(nbytes: int) -> str:
    for unit, width in (("MB", 1_000_000), ("KB", 1_000)):
        if nbytes >= width:
            return f"{nbytes / width:.4g} {unit}"
    return f"{nbytes} B"


def _machine_part(report: dict[str, Any]) -> dict[str, Any]:
    """What machine.json takes over: links and the work of sending for the planner, plans by size
    for plan="auto"."""
    source = f"megabatch bench sync, {time.strftime('%Y-%m-%d')}"
    plans = [
        {"grid": report["grid"], **{key: row[key] for key in ("plan", "nbytes", "seconds")}}
        for row in report["rows"]
        if ":" in row["plan"]
    ]
    measured = [f"links.{level}" for level in report["links"]]
    part = {
        "workers_per_node": report["workers_per_node"],
        "links": report["links"],
        "plans": plans,
    }
    if report["sending"] is not None:
        part["sending"] = report["sending"]
        measured.append("sending")
    return part | {"sources": dict.fromkeys(measured, source)}


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
