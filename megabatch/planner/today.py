"""The table of docs/todays-gpus.md: ResNet-50 at 8k, 32k and 64k on 8 to 100,000 of today's GPUs.

Epochs to 75.9 % are MLPerf's reference convergence points; a batch cannot use more GPUs than it has
images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megabatch.planner.machine import load
from megabatch.planner.published import imagenet
from megabatch.planner.run import Forecast
from megabatch.planner.search import forecast

MACHINE = "hgx-h200"
BATCHES = (8192, 32768, 65536)
SIZES = (8, 512, 100_000)


def rows() -> Iterator[tuple[int, int, Forecast]]:
    """Batch, GPUs that there are, and the forecast on those that can be used."""
    machine = load(MACHINE)
    each = machine.workers_per_node
    for batch in BATCHES:
        config = replace(imagenet("resnet50", batch), target_accuracy=0.759, eval_every=4.0)
        for gpus in SIZES:
            used = min(gpus, batch // each * each)
            yield batch, gpus, forecast(config, machine, used, wire="fp16")


def table() -> str:
    lines = [
        "| batch | GPUs | used | plan | grid | images a GPU | step | exposed | efficiency "
        "| images/s | epochs | time to 75.9 % | from, to | GPU hours | what limits it |",
        "|" + "---|" * 15,
    ]
    for batch, gpus, found in rows():
        low, high = found.interval
        setting = found.setting
        lines.append(
            f"| {batch:,} | {gpus:,} | {found.gpus:,} | {setting.plan} "
            f"| {setting.grid[0]} x {setting.grid[1]} | {batch / found.gpus:,.0f} "
            f"| {1e3 * found.step_seconds:.2f} ms | {1e3 * found.exposed_seconds:.2f} ms "
            f"| {found.efficiency:.0%} | {found.images_per_second:,.0f} | {found.epochs:g} "
            f"| {found.seconds_to_target:,.1f} s | {low:,.1f} to {high:,.1f} s "
            f"| {found.gpu_hours:,.1f} | {found.limit} |"
        )
    return "\n".join(lines)
