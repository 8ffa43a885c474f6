"""Claim: Jia's parts (half on the wire, fusion, the hybrid by size) and Goyal's weak scaling, as
their papers' tables have them, with real training between emulated hosts beside the planner's line.

    python benchmarks/papers_hosts.py ablation --json results/papers/ablation.json
    python benchmarks/papers_hosts.py ablation --workers 2 --json results/papers/ablation-pairs.json
    python benchmarks/papers_hosts.py scaling --json results/papers/scaling.json

Needs root (network namespaces) and a machine with nothing else to do. Every row is `megabatch
train` on hosts whose links carry --rate; rows are taken in turns, and the median of the turns
counts.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hosts as emulated
from machine import on_cores

from megabatch.planner.machine import Machine, Network, Node, Rate
from megabatch.planner.search import forecast
from megabatch.planner.workload import bundled
from megabatch.recipes import named

SINGLY = 1e-6
"""megabytes of a bucket: every tensor travels alone"""
# One part after another, as the paper's table adds them; and each one taken away from the whole.
ABLATION = {
    "ring, fp32, tensors singly": ("ring", "fp32", SINGLY),
    "half on the wire": ("ring", "fp16", SINGLY),
    "and fusion": ("ring", "fp16", 25.0),
    "and the hybrid: all of it": ("hybrid", "fp16", 25.0),
    "all without half": ("hybrid", "fp32", 25.0),
    "all without fusion": ("hybrid", "fp16", SINGLY),
}
UNLIMITED = "40000mbit"
CLASSES = 10
FIRST = 2
"""steps that are not counted"""


def trained(names, workers, flags, steps):
    """Images/s of all workers, by the run's own record."""
    world = len(names) * workers
    batch = flags.micro * world
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(sys.executable, "-m", "megabatch.cli", "train", "jia2018"),
            *f"--model {flags.model} --data.source synthetic --data.size {flags.size}".split(),
            *f"--data.images {4 * batch} --data.classes {CLASSES} --precision fp32".split(),
            *f"--batch {batch} --micro {flags.micro} --span {flags.micro}".split(),
            *f"--epochs {steps / 3.6:.3f} --lr.warmup 0 --eval-every 0 --save-every 0".split(),
            *f"--plan {flags.plan} --wire {flags.wire} --bucket-mb {flags.bucket}".split(),
            *("--no-half-weights", "--device", "cpu", "--out", f"{folder}/run"),
        ]
        status = emulated.run(names, workers, words, timeout=600)
        if status:
            raise SystemExit(f"a run ended with {status}: {' '.join(words)}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    rates = [line["images_per_second"] for line in found if line["kind"] == "train"]
    return statistics.median(rates[FIRST:-1])


def predicted(flags, host_count, workers, alone):
    """The planner's images/s, from the links' rate and one worker's speed."""
    bits = float(flags.rate.removesuffix("mbit")) * 1e6
    machine = Machine(
        name="emulated",
        workers_per_node=workers,
        node=Node(20e-6, 2e9),
        network=Network(100e-6, bits / 8),
        rates=(Rate(flags.model, flags.micro, alone),),
    )
    world = host_count * workers
    config = named("jia2018", None, None).resized(batch=flags.micro * world)
    how = {"plan": flags.plan, "bucket_mb": flags.bucket, "wire": flags.wire}
    # The run's own gradients: its last layer tells ten classes apart. Their size alone counts, as
    # the speed is measured.
    workload = bundled(flags.model, classes=CLASSES)
    found = forecast(config, machine, world, grid=(host_count, workers), workload=workload, **how)
    return found.images_per_second


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("what", choices=["ablation", "scaling"])
    flags.add_argument("--model", default="resnet50")
    flags.add_argument("--size", type=int, default=32)
    flags.add_argument("--micro", type=int, default=2)
    flags.add_argument("--rate", default="400mbit")
    flags.add_argument("--hosts", type=int, default=4)
    flags.add_argument("--workers", type=int, default=1, help="of a host, in the ablation")
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--turns", type=int, default=3)
    flags.add_argument("--json", type=Path)
    flags = flags.parse_args()
    if flags.what == "ablation":
        cases = {name: (flags.hosts, flags.workers, *how) for name, how in ABLATION.items()}
    else:
        cases = {f"{n} workers": (n, 1, "three_phase", "fp32", 25.0) for n in (1, 2, 4, 8)}
    taken = {name: [] for name in cases}
    for turn in range(flags.turns):
        for name, (count, workers, flags.plan, flags.wire, flags.bucket) in cases.items():
            with emulated.hosts(count, flags.rate) as names:
                taken[name].append(trained(names, workers, flags, flags.steps))
            print(f"turn {turn + 1}  {name:32} {taken[name][-1]:10.2f} images/s", flush=True)
    alone = {}  # what so many workers compute beside each other on these cores, by their number
    for count, workers, *_ in cases.values():
        if count not in alone:
            flags.plan, flags.wire, flags.bucket = "ring", "fp32", 25.0
            with emulated.hosts(count, UNLIMITED) as names:
                alone[count] = trained(names, workers, flags, flags.steps) / (count * workers)
    rows = []
    for name, (count, workers, flags.plan, flags.wire, flags.bucket) in cases.items():
        row = {"name": name, "images_per_second": statistics.median(taken[name])}
        if count > 1:
            row["predicted"] = predicted(flags, count, workers, alone[count])
        first = rows[0]["images_per_second"] if rows else row["images_per_second"]
        row["over_the_first"] = row["images_per_second"] / first
        rows.append(row)
        print(
            f"{name:32} {row['images_per_second']:10.2f} {row['over_the_first']:8.2f} x  "
            f"planner {row.get('predicted', row['images_per_second']):10.2f}"
        )
    if flags.json:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        found = {**on_cores(), "alone": alone, "rows": rows, "turns": taken}
        flags.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
