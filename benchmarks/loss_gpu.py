"""Claim: the loss by kernels of our own stays as close to fp32's as plain bf16's does.

Tiny ImageNet, `tiny30` at 1,024, the same 200 steps three ways for each seed: fp32, the plain net
under bf16 autocast, and the pass by kernels. A distance is the mean over steps of how far a loss
lies from fp32's; ours may be 1.5 times plain bf16's.

    python benchmarks/loss_gpu.py PACK [--seeds 3] [--json FILE]

Seeds that the file has are kept.
"""

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from accuracy_gpu import tiny30, without_kernels
from machine import on_gpu, so_far

import megabatch as mb

WAYS = {"fp32": ("fp32", False), "plain bf16": ("bf16", False), "kernels": ("bf16", True)}


class Losses:
    """A logger that keeps the loss of every step."""

    def __init__(self):
        self.kept = []

    def begin(self, about):
        pass

    def write(self, kind, record):
        if kind == "train":
            self.kept.append(record["loss"])

    def end(self, summary):
        pass


def losses(config, seed, way):
    precision, ours = WAYS[way]
    how = {"precision": precision, "compile": "always" if ours else "never"}
    heard = Losses()
    with nullcontext() if ours else without_kernels():
        mb.train(replace(config, seed=seed, **how), quiet=True, loggers=[heard])
    return heard.kept


def distance(one, other):
    return statistics.mean(abs(a - b) for a, b in zip(one, other, strict=True))


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("pack")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--batch", type=int, default=1024)
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    config = tiny30(arguments.pack, arguments.batch)
    config = config.resized(epochs=arguments.steps * arguments.batch / 100_000)
    kept = so_far(arguments.json, "seeds")
    found = {**on_gpu(), "batch": arguments.batch, "seeds": kept}
    for seed in range(len(kept), arguments.seeds):
        taken = {way: losses(config, seed, way) for way in WAYS}
        if any(len(losses) < arguments.steps for losses in taken.values()):
            sys.exit("a run was stopped: the same command goes on")
        plain, ours = (distance(taken[way], taken["fp32"]) for way in ("plain bf16", "kernels"))
        found["seeds"].append({"plain bf16": plain, "kernels": ours, "losses": taken})
        print(f"seed {seed}: {plain:.5f} plain bf16, {ours:.5f} kernels, {ours / plain:.2f} x")
        if arguments.json:  # as it comes: a machine may be taken back
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
