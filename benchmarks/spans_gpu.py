"""Which cut is the fastest for kernels that have one small product a span? Not run so far.

What spans of 32 images cost beside one span of all may be their work: `_weight_gradients`,
`_covary` and `_quadratic` of the Gram form (`kernels/gram.py`, `gram_backward.py`). Each at
ResNet-50's widths, for several cuts: microseconds of a launch in a CUDA graph.

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
    "weight gradients": [(block, warps) for block in (1, 2, 4, 8) for warps in (1, 2, 4)],
    "covary": [(block, warps) for block in (64, 128) for warps in (4, 8)],
    "quadratic": [(block, warps) for block in (32, 64) for warps in (4, 8)],
}
KEPT = {"weight gradients": (8, 4), "covary": (64, 4), "quadratic": (64, 4)}


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
    pulls, d_weight, d_vectors = full(2, spans, outputs), full(outputs, inputs), full(2, outputs)
    scaled = torch.empty_like(products, dtype=torch.bfloat16)
    quadratic = torch.empty_like(grams, dtype=torch.bfloat16)
    slots = full(spans, inputs // min(inputs, 64), 2, outputs)
    constant = full(spans, inputs)

    def weight_gradients(block, warps):
        gram_backward._weight_gradients[(triton.cdiv(outputs, block),)](
            products, weight, covaried, scale, shift_mean, inverse, sums, mean,
            d_weight, d_vectors, scaled, pulls, spans, rows, outputs, inputs, block,
            num_warps=warps,
        )  # fmt: skip

    def covary(block, warps):
        columns = min(inputs, 64)
        gram._covary[(spans, triton.cdiv(outputs, block), inputs // columns)](
            grams, mean, weight, covaried, slots, rows, outputs, inputs, block, columns,
            num_warps=warps,
        )  # fmt: skip

    def to_quadratic(block, warps):
        side = min(inputs, block)
        gram_backward._quadratic[(spans, inputs // side, inputs // side)](
            weight, pulls, quadratic, constant, outputs, inputs, side,
            gram_backward.precision_of(scaled), num_warps=warps,
        )  # fmt: skip

    return {"weight gradients": weight_gradients, "covary": covary, "quadratic": to_quadratic}


def measured(kernel, inputs, side, images, span):
    work = launches(images // span, inputs, span * side * side)[kernel]
    times = {cut: round(microseconds(lambda cut=cut: work(*cut)), 2) for cut in CUTS[kernel]}
    best = min(times, key=times.get)
    return {
        "kernel": kernel, "inputs": inputs, "images": images, "span": span,
        "kept": times[KEPT[kernel]], "best": times[best], "best_cut": best,
        "all": {f"{block}/{warps}": taken for (block, warps), taken in times.items()},
    }  # fmt: skip


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--images", type=int, default=1024)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    found = {**on_gpu(), "unit": "microseconds of a launch", "cut": "block/warps", "rows": []}
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
