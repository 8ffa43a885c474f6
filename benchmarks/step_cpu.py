"""Claim: on a CPU the trainer's step is not slower than plain torch's, as it is and compiled.

Rivals and ours take turns, step by step, so that whatever else the machine does meets all of them;
a figure is the median over turns of their time over ours. Ours is what `megabatch train` runs
(LARS, counts, moving averages), and the same with its SGD; a rival is the same net with torch's SGD
and nothing else: as torch has it, and tuned (channels last, SGD fused).
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from machine import on_cores

import megabatch as mb
from megabatch.bench.rivals import plain_step
from megabatch.bench.step import one_worker
from megabatch.bench.timing import by_turns, times_faster
from megabatch.config import OptimizerConfig

CPU = torch.device("cpu")
SGD = OptimizerConfig(trust=None, form="pytorch")
# model, pixels, micro, precision, compiled
CASES = {
    "small16": ("small", 8, 16, "fp32", False),
    "small64": ("small", 8, 64, "fp32", False),
    "resnet50-64": ("resnet50", 64, 16, "fp32", False),
    "resnet50-224": ("resnet50", 224, 8, "fp32", False),
    "alexnet": ("alexnet_bn", 227, 16, "fp32", False),
    "resnet50-64-bf16": ("resnet50", 64, 16, "bf16", False),
    "small64-compiled": ("small", 8, 64, "fp32", True),
    "resnet50-64-compiled": ("resnet50", 64, 16, "fp32", True),
}


def settings(model, size, micro, precision, compiled):
    channels, classes = (1, 10) if model == "small" else (3, 1000)
    return mb.Config(
        model=model,
        batch=micro,
        micro=micro,
        span=micro,
        precision=precision,
        compile="always" if compiled else "never",
        data=mb.Data("synthetic", size=size, channels=channels, classes=classes),
    ).check()


def measured(name, seconds, clock):
    """One row: milliseconds of each, and how many times faster ours are."""
    config = settings(*CASES[name])
    compiled = config.compile == "always"
    with contextlib.ExitStack() as ending:
        works = {
            "ours": ending.enter_context(one_worker(config, CPU)),
            "ours, SGD": ending.enter_context(one_worker(replace(config, optimizer=SGD), CPU)),
            "torch": plain_step(config, CPU, compiled, tuned=False),
            "torch, tuned": plain_step(config, CPU, compiled, tuned=True),
        }
        began = time.perf_counter()
        works["ours"]()
        first = time.perf_counter() - began
        times = by_turns(works, seconds, clock)
    row = {"case": name, "images": config.micro, "first_s": first, "turns": len(times["ours"])}
    row["ms"] = {who: 1e3 * statistics.median(taken) for who, taken in times.items()}
    row["times_faster"] = {
        f"{ours} / {theirs}": times_faster(times[ours], times[theirs])
        for ours in ("ours", "ours, SGD")
        for theirs in ("torch", "torch, tuned")
    }
    return row


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    flags.add_argument("--seconds", type=float, default=3.0, help="for each of four, each case")
    flags.add_argument(
        "--busy", action="store_true", help="processor time of one thread: others use the machine"
    )
    flags.add_argument("--json", type=Path, default=Path("results/cpu/step.json"))
    arguments = flags.parse_args()
    if arguments.busy:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    found = {
        "clock": "processor" if arguments.busy else "wall",
        **on_cores(),
        "threads": torch.get_num_threads(),
        "rows": [],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases:
        clock = time.process_time if arguments.busy else time.perf_counter
        row = measured(name, arguments.seconds, clock)
        found["rows"].append(row)
        print(f"{name:22}" + "".join(f" {who} {ms:.2f} ms" for who, ms in row["ms"].items()))
        print(f"{'':22}" + "".join(f"  {a} {x:.2f} x" for a, x in row["times_faster"].items()))
        sys.stdout.flush()
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print("\nas docs/performance.md has it:")
    for row in found["rows"]:
        print(table_row(row))


def table_row(row):
    cells = [f"{ms:.2f}" for ms in row["ms"].values()]
    cells += [f"{times:.2f}" for times in row["times_faster"].values()]
    return f"| {row['case']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
