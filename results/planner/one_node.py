"""The planner against the images/s of 2 to 16 GPUs of one node that NVIDIA's DeepLearningExamples
document (MxNet/Classification/RN50v1.5, mxnet-20.12), each from the speed of one GPU.

Replayed once, after the planner was made; nothing was changed for them.

    python results/planner/one_node.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from megabatch.planner import Forecast, Setting, load
from megabatch.planner.machine import Rate
from megabatch.planner.published import replay

# by machine: images a GPU, images/s of one GPU and of several in mixed precision
THROUGHPUT = {
    "dgx2h": (256, 1492, {2: 2935, 4: 5726, 8: 11368, 16: 21484}),
    "dgx-a100": (256, 2180, {2: 4332, 4: 8587}),
    "dgx1-v100": (192, 1376, {2: 2768, 4: 5357}),
}
# 90 epochs on a DGX-1, 192 images a GPU: hours
HOURS = {1: 24.2, 4: 6.0, 8: 3.0}


class Row(NamedTuple):
    what: str
    published: float
    planner: float
    found: Forecast

    @property
    def error(self) -> float:
        return 100 * (self.planner / self.published - 1)


def planned(name: str, gpus: int, epochs: float) -> Forecast:
    """NCCL's ring, a fusion buffer of 64 MB, fp16; an evaluation each epoch."""
    images, alone, _ = THROUGHPUT[name]
    machine = replace(load(name), rates=(Rate("resnet50", images, alone),), largest_micro=images)
    ring = Setting("ring", (1, gpus), 64.0, "fp16")
    return replay(machine, gpus, images * gpus, ring, epochs=epochs, eval_every=1.0)


def rows() -> Iterator[Row]:
    for name, (_, _, known) in THROUGHPUT.items():
        for gpus, rate in known.items():
            found = planned(name, gpus, 1)
            yield Row(f"{name}, {gpus} GPUs, images/s", rate, found.images_per_second, found)
    for gpus, hours in HOURS.items():
        found = planned("dgx1-v100", gpus, 90)
        what = f"dgx1-v100, {gpus} GPU{'s' * (gpus > 1)}, hours of 90 epochs"
        yield Row(what, hours, found.seconds_to_target / 3600, found)


def table() -> str:
    lines = ["| row | published | planner | error |", "|---|---|---|---|"]
    for row in rows():
        published, planner = (f"{x:,.0f}" if x > 100 else f"{x:.1f}" for x in row[1:3])
        lines.append(f"| {row.what} | {published} | {planner} | {row.error:+.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
