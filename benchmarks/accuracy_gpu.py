"""Claim: the pass by kernels of our own ends where the plain net does, compiled by torch.

Tiny ImageNet, `tiny30` at 4,096, seed by seed, first by kernels and then without.

    python benchmarks/accuracy_gpu.py PACK [--seeds 3] [--json FILE]

Runs that the file has are kept.
"""

import argparse
import json
import statistics
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from machine import on_gpu, so_far

import megabatch as mb
from megabatch.config import OptimizerConfig
from megabatch.passes import kinds as passes

WAYS = ("kernels", "plain, compiled")


LARS = OptimizerConfig(trust=0.001, form="pytorch", weight_decay=5e-5, unadapted_rate=0.1)
RATES = {1024: 10.0, 4096: 24.0}


def tiny30(pack, batch):
    """Of the images in a pack, with LARS, evaluated at the end alone."""
    config = mb.recipes.tiny30(batch)
    return replace(
        config,
        data=replace(config.data, path=pack),
        optimizer=LARS,
        lr=replace(config.lr, reference=RATES[batch], per=batch, warmup=5, power=2),
        eval_every=0,
    )


@contextmanager
def without_kernels():
    """The plain net: no pass by kernels of our own."""
    own, passes.fusable = passes.fusable, lambda *_: False
    try:
        yield
    finally:
        passes.fusable = own


def trained(config, seed, way):
    with nullcontext() if way == "kernels" else without_kernels():
        summary = mb.train(replace(config, seed=seed, compile="always"), quiet=True)
    if summary.ended != "finished":
        sys.exit("a run was stopped: the same command takes it again")
    return {
        "way": way,
        "seed": seed,
        "top1": summary.top1,
        "best_top1": summary.best_top1,
        "loss": summary.loss,
        "seconds": summary.seconds,
        "images_per_second": summary.images_per_second,
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("pack")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--batch", type=int, default=4096)
    flags.add_argument("--epochs", type=float, default=30)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    config = tiny30(arguments.pack, arguments.batch)
    if arguments.epochs != config.epochs:
        config = config.resized(epochs=arguments.epochs)
    found = {**on_gpu(), "runs": so_far(arguments.json, "runs")}
    kept = {(run["way"], run["seed"]) for run in found["runs"]}
    for way in WAYS:
        for seed in range(arguments.seeds):
            if (way, seed) in kept:
                continue
            found["runs"].append(trained(config, seed, way))
            print(found["runs"][-1], flush=True)
            if arguments.json:  # as it comes: a machine may be taken back
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    means = [
        statistics.mean(run["top1"] for run in found["runs"] if run["way"] == way) for way in WAYS
    ]
    print(f"mean top-1 {means[0]:.2%} by kernels, {means[1]:.2%} without")


if __name__ == "__main__":
    main()
