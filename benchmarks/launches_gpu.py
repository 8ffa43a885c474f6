"""Claim: batch norm's launches are cut up as an H200 does them fastest (`kernels/rows.py`).

Each kernel at the widths of ResNet-50 for several cuts: microseconds of a launch in a CUDA graph,
behind a copy that leaves its input in the cache as the convolution before it does.

    python benchmarks/launches_gpu.py [--json results/gpu/launches.json]
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import triton
from machine import on_gpu

from megabatch.kernels import batchnorm, batchnorm_backward, rows
from megabatch.kernels.rows import STAGES, ByWidth, Programs, rows_of

SHAPES = [(64, 56), (128, 28), (256, 14), (512, 7)]
PASSES = [(256, 256), (1024, 1024), (1024, 32)]  # images and span
TILES = [(r, c, w) for r in (16, 32, 64, 128) for c in (64, 128) for w in (4, 8)]
TILES = [tile for tile in TILES if 1024 <= tile[0] * tile[1] <= 8192]
COUNTS = (264, 528, 792, 1056, 2112)
KEPT = {
    "moments": rows.MOMENTS,
    "apply": rows.APPLY,
    "apply and sum": rows.APPLY_AND_SUM,
    "backward sums": rows.BACKWARD_SUMS,
    "backward apply": rows.BACKWARD_APPLY,
    "join": rows.JOIN,
}


def launch(kernel, x, y, gradient, vectors, span, programs):
    """One launch of a kernel, cut up so."""
    cut, _, grid = rows_of(y, span, ByWidth(programs, programs))
    slots = torch.empty((cut.spans, cut.parts, 2, cut.channels), device=x.device)
    size = cut.rows, cut.parts, cut.each
    tile = programs.rows, programs.columns
    scale, shift, mean, inverse, factors = vectors
    warps = {"num_warps": programs.warps}
    if kernel == "moments":
        batchnorm._moments[grid](y, slots, *size, cut.channels, *tile, STAGES, **warps)
    elif kernel in ("apply", "apply and sum"):
        found = scale, shift, scale, shift, slots
        how = True, 0, kernel == "apply and sum"
        batchnorm._apply[grid](
            y, y, torch.empty_like(y), *found, *size, cut.channels, *how, *tile, **warps
        )
    elif kernel == "backward sums":
        found = scale, shift, mean, inverse, slots
        batchnorm_backward._backward_sums[grid](
            y, gradient, *found, *size, cut.channels, True, *tile, STAGES, **warps
        )
    elif kernel == "backward apply":
        widths = cut.spans * cut.channels, cut.channels
        batchnorm_backward._backward_apply[grid](
            gradient, y, scale, shift, factors, gradient, *size, *widths, True, *tile, **warps
        )
    else:
        batchnorm_backward._join[grid](
            y, gradient, x, torch.empty_like(y), slots, *size, cut.channels, True, *tile, **warps
        )


def microseconds(work, turns=8, repeats=5):
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            work()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / turns * 1e3)
    return statistics.median(taken)


def measured(kernel, channels, side, images, span):
    shape = images, channels, side, side
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    y, gradient = x.clone(), x.clone()
    spans = images // span
    vectors = [torch.ones(spans, channels, device="cuda") for _ in range(4)]
    vectors.append(torch.zeros(2, spans, channels, device="cuda"))
    alone = microseconds(lambda: y.copy_(x))

    def of(programs):
        def work():
            y.copy_(x)
            launch(kernel, x, y, gradient, vectors, span, programs)

        return round(microseconds(work) - alone, 2)

    wide = channels > 64
    kept = KEPT[kernel].wide if wide else KEPT[kernel].narrow
    tried = {Programs(*tile, n) for tile in TILES for n in COUNTS if tile[1] <= channels}
    times = {programs: of(programs) for programs in {*tried, kept}}
    best = min(times, key=times.get)
    return {
        "kernel": kernel, "channels": channels, "side": side, "images": images, "span": span,
        "before": times[Programs(64, 64, 8, 1056)], "kept": times[kept],
        "best": times[best], "best_launch": best,
    }  # fmt: skip


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", type=Path, default=Path("results/gpu/launches.json"))
    arguments = flags.parse_args()
    found = []
    for kernel in KEPT:
        for shape in SHAPES:
            for images, span in PASSES:
                found.append(measured(kernel, *shape, images, span))
                print(found[-1], flush=True)
    head = {
        **on_gpu(),
        "triton": triton.__version__,
        "unit": "microseconds of one launch behind a copy of its input, in a CUDA graph",
        "launch": "rows, columns, warps, programs",
    }
    lines = ",\n".join(json.dumps(row) for row in found)
    arguments.json.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
