"""Which cut is the fastest for kernels that have one small product a span?

They are `_weight_gradients` (with the sum of its parts), `_covary` and `_quadratic` of the Gram
form (`kernels/gram.py`, `gram_backward.py`). Each at ResNet-50's widths, for several cuts:
microseconds of a launch in a CUDA graph.

    python benchmarks/spans_gpu.py [--images 1024] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
import triton
from launches_gpu import microseconds
from machine import on_gpu

from megabatch.kernels import gram, gram_backward

SHAPES = [(64, 56), (128, 28), (256, 14)]  # what a block's last convolution reads
CUTS = {
    "weight gradients": [(4, 4, 4), (8, 4, 4), (4, 8, 4)],
    "covary": [
        *((64, 64, 64, 4, 3), (128, 64, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 32, 4, 3)),
        *((64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (64, 128, 64, 8, 2)),
    ],
    "quadratic": [
        *((64, 64, 4, 3), (64, 64, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3)),
        *((64, 64, 4, 2), (64, 32, 4, 4), (128, 32, 8, 4)),
    ],
}
"""outputs, spans, warps; a Tile of W cov; side, depth, warps, stages of a quadratic form's tile"""
KEPT = {
    "weight gradients": gram_backward._WALK,
    "covary": gram._COVARY_SPANS,
    "quadratic": (64, 64, 4, 3),
}
"""with several spans; one has a cut of its own for W cov"""


def launches(spans, inputs, rows):
    """Each kernel as a function of its cut, on tensors of a span's sizes."""
    outputs = 4 * inputs

    def full(*shape):
        return torch.randn(shape, device="cuda")

    weight = full(outputs, inputs).bfloat16()
    grams, mean, products, covaried = (
        full(spans, inputs, inputs),
        full(spans, inputs),
        full(spans, outputs, inputs),
        full(spans, outputs, inputs),
    )
    scale, shift_mean, inverse, sums = (full(spans, outputs) for _ in range(4))
    pulls = full(2, spans, outputs)
    scaled = torch.empty_like(products, dtype=torch.bfloat16)
    quadratic = torch.empty_like(grams, dtype=torch.bfloat16)
    slots = full(spans, inputs // min(inputs, 64), 2, outputs)
    constant = full(spans, inputs)
    kept = {}

    def weight_gradients(block, each, warps):
        groups = triton.cdiv(spans, each)
        parts = full(groups, outputs * (inputs + 2)) if groups not in kept else kept[groups]
        kept[groups] = parts
        gram_backward._weight_gradients[(triton.cdiv(outputs, block), groups)](
            products, weight, covaried, scale, shift_mean, inverse, sums, mean,
            parts, scaled, pulls, spans, each, rows, outputs, inputs, block, num_warps=warps,
        )  # fmt: skip
        return parts.sum(0) if groups > 1 else parts[0]

    def covary(block, columns, depth, warps, stages):
        columns = min(inputs, columns)
        gram._covary[(spans, triton.cdiv(outputs, block), inputs // columns)](
            grams, mean, weight, covaried, slots, rows, outputs, inputs, True, block, columns,
            min(inputs, depth), num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def to_quadratic(side, depth, warps, stages):
        side = min(inputs, side)
        gram_backward._quadratic[(spans, inputs // side, inputs // side)](
            weight, pulls, quadratic, constant, outputs, inputs, True, side, depth,
            gram_backward.precision_of(scaled), num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return {"weight gradients": weight_gradients, "covary": covary, "quadratic": to_quadratic}


def measured(kernel, inputs, side, images, span):
    work = launches(images // span, inputs, span * side * side)[kernel]
    times = {cut: round(microseconds(lambda cut=cut: work(*cut)), 2) for cut in CUTS[kernel]}
    best = min(times, key=times.get)
    kept = gram._COVARY if kernel == "covary" and span == images else KEPT[kernel]
    kept = tuple(kept[: len(best)])
    return {
        "kernel": kernel, "inputs": inputs, "images": images, "span": span,
        "kept": times[kept], "best": times[best], "best_cut": best,
        "all": {"/".join(map(str, cut)): taken for cut, taken in times.items()},
    }  # fmt: skip


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--images", type=int, default=1024)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    found = {**on_gpu(), "unit": "microseconds of a launch", "rows": []}
    for kernel in CUTS:
        for inputs, side in SHAPES:
            for span in (32, arguments.images):
                row = measured(kernel, inputs, side, arguments.images, span)
                found["rows"].append(row)
                print(row, flush=True)
                if arguments.json:  # as it comes: a machine may be taken back
                    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
