"""The planner against MLPerf's ResNet-50 result logs: each run from one measured speed of its chip.

The speed is that of a single node of the same round and, where there is one, the same submitter;
links are the chip's own node and what the submission says of its network. SEEN are runs that were
looked at while the planner was made, HELD those that were put aside (by a hash of round and system)
and replayed once, when it was done.

    python results/planner/mlperf.py
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from megabatch.planner import Forecast, Machine, forecast, load
from megabatch.planner.machine import Network, Node, Rate
from megabatch.planner.published import imagenet

IB = "infiniband"
# Nodes of four GPUs with NVLink (Dell XE8545 and XE8640) and with PCIe (R750xa).
FOUR: dict[str, Any] = {
    "workers_per_node": 4,
    "network": Network(9.6e-6, 25e9, nics=4, transport=IB),
    "input_images_per_second": None,
}
PCIE = FOUR | {"node": Node(5.7e-6, 20e9), "network": Network(9.6e-6, 12.5e9, transport=IB)}


def one_speed(name: str, images: int, total: float, workers: int, **changes: Any) -> Machine:
    """A bundled machine with one speed of its chip: the images/s of so many workers."""
    rate = Rate("resnet50", images, total / workers, workers)
    return replace(load(name), rates=(rate,), **changes)


def tpu(rate: float) -> Machine:
    """A torus of links between chips; their speed and latency are assumed."""
    rates = (Rate("resnet50", 256, rate, 8),)
    wires = (Node(1e-6, 70e9), Network(2e-6, 70e9, nics=4))
    return Machine("tpu", 4, *wires, rates=rates, launch_seconds=5e-6)


GAUDI = Machine(
    "gaudi",
    8,
    Node(5e-6, 60e9),
    Network(10e-6, 12.5e9, nics=4, transport="roce"),
    rates=(Rate("resnet50", 256, 1664, 8),),
)
L40S = Machine(
    "l40s",
    4,
    Node(5.7e-6, 20e9),
    Network(9.6e-6, 25e9, transport=IB),
    rates=(Rate("resnet50", 200, 14835 / 8, 8),),
)


class Run(NamedTuple):
    """As the logs have it; images/s where a log states them."""

    name: str
    machine: Machine
    gpus: int
    batch: int
    epochs: float
    images_per_second: float | None
    seconds: float


def a100(total: float, **changes: Any) -> Machine:
    return one_speed("dgx-a100", 408, total, 8, **changes)


def h100(total: float) -> Machine:
    return one_speed("dgx-h100", 400, total, 8)


DELL_40 = one_speed("dgx-a100", 256, 12119, 4, **FOUR)
DELL_80 = one_speed("dgx-a100", 408, 13896, 4, **FOUR)
R750_V11 = one_speed("dgx-a100", 408, 11977, 4, **PCIE)
R750_V30 = one_speed("dgx-a100", 408, 12379, 4, **PCIE)

SEEN = [
    Run("v0.7 NVIDIA, 16 A100", a100(22520), 16, 3264, 41, 37416, 1425.2),
    Run("v0.7 NVIDIA, 768 A100", a100(22520), 768, 34560, 59, 1260216, 63.5),
    Run("v0.7 NVIDIA, 512 V100", load("dgx2h"), 512, 33280, 56, 632285, 120.2),
    Run("v1.1 Azure, 64 A100", a100(26200), 64, 3264, 35, 165473, 275.2),
    Run("v1.1 NVIDIA, 1,024 A100", a100(26351), 1024, 35840, 60, 2307565, 34.5),
    Run("v2.0 NVIDIA, 1,024 A100", a100(27182), 1024, 35840, 60, 2361523, 33.3),
    Run("v2.0 NVIDIA, 4,216 A100", a100(27182), 4216, 67456, 86, None, 19.2),
    Run("v2.1 NVIDIA, 64 A100", a100(27182), 64, 3264, 35, 167596, 270.2),
    Run("v3.0 Dell, 8 A100 40 GB", DELL_40, 8, 1632, 35, 22640, 2006),
    Run("v2.1 Dell, 16 A100 40 GB", DELL_40, 16, 3264, 35, 44953, 1025.7),
    Run("v2.0 Dell, 32 A100 40 GB", DELL_40, 32, 3264, 35, 77805, 587.2),
    Run("v2.1 Dell, 64 A100 40 GB", DELL_40, 64, 13056, 45, 174976, 331.9),
    Run("v2.0 Dell, 128 A100 40 GB", DELL_40, 128, 16384, 47, 310468, 195.6),
    Run("v3.0 Dell, 8 A100 80 GB", DELL_80, 8, 3264, 35, 26734, 1720.7),
    Run("v3.0 Dell, 16 A100 80 GB", DELL_80, 16, 3264, 35, 48798, 951.8),
    Run("v2.0 H3C, 16 A100", a100(27362), 16, 3264, 35, 50636, 927.9),
    Run("v2.1 HPE, 128 A100", a100(27103), 128, 16384, 47, 367043, 168.6),
    Run("v2.1 HPE, 32 A100", a100(27103), 32, 3264, 35, 58881, 771.0),
    Run("v1.1 Dell, 32 A100 PCIe", R750_V11, 32, 13056, 45, 91408, 635.1),
    Run("v3.0 Dell, 16 A100 PCIe", R750_V30, 16, 3264, 35, 39990, 1163.5),
    Run("v3.0 Dell, 32 A100 PCIe", R750_V30, 32, 3264, 35, 73057, 624.8),
    Run("v3.1 NVIDIA, 64 H100", h100(56443), 64, 3200, 35, 318154, 149.7),
    Run("v4.0 NVIDIA, 64 H100", h100(57450), 64, 3200, 35, 314111, 150.3),
    Run("v4.0 Supermicro, 64 H100", h100(56466), 64, 3200, 35, 299759, 152.6),
    Run("v3.0 CoreWeave, 3,584 H100", h100(56066), 3584, 57344, 77, 10103760, 11.0),
    Run("v0.7 Google, 4,096 TPU v3 JAX", tpu(1766), 4096, 65536, 92, None, 28.3),
    Run("v0.7 Google, 4,096 TPU v3", tpu(1766), 4096, 65536, 88, None, 28.9),
    Run("v0.7 Google, 64 TPU v4", tpu(3296), 64, 8192, 42, None, 269.8),
    Run("v0.7 Google, 256 TPU v4", tpu(3296), 256, 8192, 44, None, 109.2),
    Run("v1.0 Google, 3,456 TPU v4", tpu(3296), 3456, 55296, 80, None, 13.7),
    Run("v2.0 Google, 4,096 TPU v4", tpu(3296), 4096, 32768, 60, None, 11.4),
    Run("v1.1 Habana, 64 Gaudi", GAUDI, 64, 8192, 41, None, 568.7),
    Run("v1.1 Habana, 128 Gaudi", GAUDI, 128, 16384, 47, None, 324.5),
    Run("v1.1 Habana, 256 Gaudi", GAUDI, 256, 16384, 48, None, 203.2),
    Run("v4.0 NVIDIA, 64 L40S", L40S, 64, 3200, 35, 112525, 428.9),
]

HELD = [
    Run("v1.0 Google, 64 TPU v4", tpu(3296), 64, 8192, 42, None, 258.1),
    Run("v1.0 Google, 2,048 TPU v4", tpu(3296), 2048, 32768, 60, None, 17.1),
    Run("v1.0 NVIDIA, 64 A100", a100(26687), 64, 13056, 45, 198681, 294.6),
    Run("v1.1 NVIDIA, 4,320 A100", a100(26351), 4320, 64800, 85, 7257233, 20.8),
    Run("v1.1 NVIDIA, 64 A100", a100(26351), 64, 3264, 35, 166790, 271.9),
    Run("v1.1 Dell, 8 A100 PCIe", R750_V11, 8, 3264, 35, 23486, 1925.2),
    Run("v1.1 Dell, 16 A100 PCIe", R750_V11, 16, 3264, 35, 43529, 1040.2),
    Run("v3.0 Dell, 8 A100 PCIe", R750_V30, 8, 3264, 35, 21796, 2102.0),
    Run("v3.0 Dell, 32 A100 PCIe, other NIC", R750_V30, 32, 3264, 35, 76323, 600.9),
    Run("v1.1 Habana, 16 Gaudi", GAUDI, 16, 2048, 38, None, 1995.3),
    Run("v1.1 Habana, 32 Gaudi", GAUDI, 32, 4096, 39, None, 1042.9),
    Run("v2.1 HPE, 16 A100", a100(27103), 16, 3264, 35, 50469, 944.7),
    Run("v2.1 HPE, 64 A100", a100(27103), 64, 3264, 35, 131528, 353.9),
    Run("v2.1 NVIDIA, 32 H100 preview", h100(52433), 32, 3200, 35, 168986, 269.3),
    Run("v3.0 Dell, 16 A100", a100(27362), 16, 3264, 36, 53750, 863.7),
    Run("v3.0 Dell, 16 H100", h100(56066), 16, 3200, 35, 96498, 468.7),
    Run("v3.1 Dell, 16 H100", h100(56443), 16, 3200, 35, 100778, 450.9),
    Run("v4.0 HPE, 16 H100", h100(57269), 16, 3200, 35, 100346, 475.8),
    Run("v3.1 Dell, 8 H100 in two nodes", one_speed("dgx-h100", 816, 29125, 4, **FOUR), 8, 3264,
        35, 54389, 832.2),
    Run("v3.0 NVIDIA, 512 H100", h100(56066), 512, 20480, 50, 2256030, 30.4),
    Run("v3.0 NVIDIA, 64 H100", h100(56066), 64, 3200, 35, 294802, 159.8),
    Run("v3.0 NVIDIA, 768 H100", h100(56066), 768, 32256, 56, 3413943, 22.2),
    Run("v4.0 NVIDIA, 2,528 H100", h100(57295), 2528, 40448, 70, 6885334, 13.7),
    Run("v4.0 Oracle, 64 H100", h100(57295), 64, 3200, 35, 306735, 149.0),
]  # fmt: skip


def planned(run: Run) -> Forecast:
    """As anyone would ask: the best setting, fp16 on the wire, an evaluation every 4 epochs."""
    config = replace(imagenet("resnet50", run.batch, run.epochs), eval_every=4.0)
    return forecast(config, run.machine, run.gpus, wire="fp16")


def error(run: Run, found: Forecast) -> float:
    """In per cent of images/s where the log has them, else of the time."""
    if run.images_per_second:
        return 100 * (found.images_per_second / run.images_per_second - 1)
    return 100 * (found.seconds_to_target / run.seconds - 1)


def replay(runs: list[Run]) -> tuple[list[str], str]:
    """A line for each run, and one for all."""
    lines, errors, times, inside, widths = [], [], [], 0, []
    for run in runs:
        found = planned(run)
        low, high = found.interval
        errors.append(abs(error(run, found)))
        times.append(abs(100 * (found.seconds_to_target / run.seconds - 1)))
        inside += low <= run.seconds <= high
        widths.append(high / low)
        said = f"{run.images_per_second:,.0f}" if run.images_per_second else ""
        lines.append(
            f"| {run.name} | {run.batch / run.gpus:.0f} | {said} | {found.images_per_second:,.0f} "
            f"| {run.seconds:,.1f} | {found.seconds_to_target:,.1f} | {low:,.1f} to {high:,.1f} "
            f"| {error(run, found):+.1f} % |"
        )
    summary = (
        f"median {statistics.median(errors):.1f} %, worst {max(errors):.1f} % (of the times "
        f"{statistics.median(times):.1f} and {max(times):.1f} %); {inside} of {len(runs)} times "
        f"inside their intervals, whose high over low is {statistics.median(widths):.2f} in the "
        f"median"
    )
    return lines, summary


def table() -> str:
    head = [
        "| run | images a GPU | images/s | planner | seconds | planner | from, to | error |",
        "|" + "---|" * 8,
    ]
    parts = []
    for title, runs in (("Looked at", SEEN), ("Held out", HELD)):
        lines, summary = replay(runs)
        parts += [f"{title}: {summary}.", "", *head, *lines, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(table())
