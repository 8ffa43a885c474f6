"""Claim: the trainer's step is faster on one GPU than compiling the whole model with fused SGD.

By batch, micro-batch and span; rival and ours in the same run, medians over groups of five steps.
Ours is what `megabatch train` runs (buckets, LARS, counts, moving averages), its rival the same net
(torchvision's where it is installed), channels last under autocast and torch.compile, with SGD and
nothing else.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from machine import on_gpu

import megabatch as mb
from megabatch.bench.rivals import plain_step
from megabatch.bench.step import one_worker

GPU = torch.device("cuda")
# model, pixels, batch, micro, span, precision, half weights, whether the rival runs beside it
CASES = {
    "1024": ("resnet50", 224, 1024, 1024, 1024, "bf16", False, True),
    "span32": ("resnet50", 224, 1024, 1024, 32, "bf16", False, False),
    "jia": ("resnet50", 224, 1024, 1024, 1024, "fp16", True, False),
    "micro256": ("resnet50", 224, 1024, 256, 256, "bf16", False, True),
    "64": ("resnet50", 64, 4096, 1024, 256, "bf16", False, True),
    "64small": ("resnet50", 64, 256, 256, 256, "bf16", False, True),
    "alexnet": ("alexnet_bn", 227, 1024, 1024, 1024, "bf16", False, True),
}


def settings(model, size, batch, micro, span, precision, half_weights):
    data = mb.Data("synthetic", size=size, channels=3, classes=1000)
    return mb.Config(
        model=model,
        batch=batch,
        micro=micro,
        span=span,
        precision=precision,
        half_weights=half_weights,
        label_smoothing=0.1,
        data=data,
    ).check()


def measured(step, batch, seconds):
    """Images/s and what else a step costs."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(5):
        step()
    taken, host = [], []
    while len(taken) < 5 or sum(taken) * 5 < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        begin.record()
        for _ in range(5):
            step()
        host.append((time.perf_counter() - began) / 5)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 5 / 1e3)
    seconds_a_step = statistics.median(taken)
    return {
        "images_per_second": batch / seconds_a_step,
        "ms": seconds_a_step * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "first_s": first,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    flags.add_argument("--seconds", type=float, default=3.0)
    flags.add_argument("--no-rival", action="store_true")
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    torch.backends.cudnn.benchmark = True
    found = {**on_gpu(), "rows": []}

    def note(name, batch, step):
        row = {"name": name, **measured(step, batch, arguments.seconds)}
        found["rows"].append(row)
        print(f"{name:44} {row['images_per_second']:10,.0f} images/s {row['ms']:8.2f} ms")
        if arguments.json:  # as it comes: a machine may be taken back
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        return row["images_per_second"]

    for case in arguments.cases:
        model, size, batch, micro, span, precision, half_weights, beside = CASES[case]
        name = f"{model} {size} px {precision} {batch}/{micro}/{span}"
        chosen = settings(model, size, batch, micro, span, precision, half_weights)
        with one_worker(chosen, GPU) as step:
            ours = note(f"ours {name}", batch, step)
        torch.cuda.empty_cache()
        if beside and not arguments.no_rival:
            torch._dynamo.reset()  # each size has kernels of its own, not ones for all sizes
            name = f"rival {model} {size} px bf16 {batch}/{micro}"
            theirs = note(name, batch, plain_step(chosen, GPU, compiled=True))
            print(f"{'':44} {ours / theirs:10.2f} x")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
