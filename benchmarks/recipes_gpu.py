"""Claim: each recipe trains on one GPU at its real image size in every precision, and stays finite.

Twenty steps of synthetic images a run, the batch cut to a few micro-batches; stages of the batch,
warm-up and decay keep their shares of the run. Run it as `python benchmarks/recipes_gpu.py`.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import megabatch as mb
from megabatch.batch import count_steps
from megabatch.config import Config
from megabatch.recipes import RECIPES
from megabatch.recipes.imagenet import IMAGES

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "half_weights": False, "loss_scale": None},
    "bf16": {"precision": "bf16", "half_weights": False, "loss_scale": None},
    "fp16": {"precision": "fp16", "half_weights": False},
    "fp16 weights": {"precision": "fp16", "half_weights": True},
}
IMAGENET = [name for name in RECIPES if name != "digits"]
# Few images, many times: it is the steps that count, and images of 224 px take long to make.
TRAINED, HELD_OUT = 64, 16


def shortened(recipe: Config, steps: int, micros: int, micro: int) -> Config:
    """The recipe for so many steps of synthetic images, its first batch cut to `micros` passes."""
    micro = max(1, micro // recipe.span) * recipe.span
    whole_steps, whole_seen = count_steps(recipe.all_stages, IMAGES, recipe.epochs)
    mean_growth = whole_seen / whole_steps / recipe.batch
    # Half a step less than asked for: the last batch is whole, and no rounding adds another.
    seen = (steps - 0.5) * mean_growth * micros * micro
    data = replace(
        recipe.data,
        source="synthetic",
        images=TRAINED + HELD_OUT,
        val_share=HELD_OUT / (TRAINED + HELD_OUT),
    )
    cut = replace(recipe, micro=micro, data=data, target_accuracy=None, eval_every=0)
    return cut.resized(epochs=seen / TRAINED, batch=micros * micro)


def measure(config: Config) -> dict[str, Any]:
    """One run; what went wrong, if anything, is part of the row."""
    began, device = time.monotonic(), torch.cuda.is_available()
    if device:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    data = config.data
    net = mb.models.build(config.model, data.classes, data.channels, data.size)
    before = [weight.detach().clone() for weight in net.parameters()]
    found: dict[str, Any]
    try:
        found = {"error": "", **asdict(mb.train(config, model=net, quiet=True))}
    except Exception as error:  # the others are still to be measured
        found = {"error": f"{type(error).__name__}: {error}"}
    pairs = [
        (w.detach().cpu(), b.to(w.dtype)) for w, b in zip(net.parameters(), before, strict=True)
    ]
    return {
        **found,
        "finite": all(tensor.isfinite().all().item() for tensor in net.state_dict().values()),
        # A loss scale that is never right would skip every step and leave finite weights.
        "moved": any((now != then).any().item() for now, then in pairs),
        "wall_seconds": time.monotonic() - began,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device else 0.0,
    }


def good(row: dict[str, Any]) -> bool:
    return not row["error"] and row["finite"] and row["moved"] and math.isfinite(row["loss"])


def line(row: dict[str, Any]) -> str:
    head = f"| {row['recipe']} | {row['precision']} | {row['size']} | {row['batch']} "
    if row["error"]:
        return f"{head}| - | - | - | - | no: {row['error'].splitlines()[0]} |"
    return (
        f"{head}| {row['steps']} | {row['loss']:.3f} | {row['images_per_second']:,.0f} "
        f"| {row['peak_gib']:.1f} | {'yes' if good(row) else 'no'} |"
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--micro", type=int, default=128, help="about; a multiple of the span")
    flags.add_argument("--micros", type=int, default=2, help="micro-batches in the first batch")
    flags.add_argument("--recipes", nargs="+", default=IMAGENET, choices=RECIPES)
    flags.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    flags.add_argument("--json", type=Path, help="also write the rows to this file")
    given = flags.parse_args()

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{where}, torch {torch.__version__}\n", flush=True)
    print("| recipe | precision | px | batch | steps | loss | images/s | GiB | finite |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    for name in given.recipes:
        recipe = shortened(RECIPES[name](), given.steps, given.micros, given.micro)
        for precision in given.precisions:
            config = replace(recipe, **PRECISIONS[precision])
            row = {"recipe": name, "precision": precision, "size": config.data.size}
            rows.append({**row, "batch": config.batch, **measure(config)})
            print(line(rows[-1]), flush=True)
    if given.json:
        about = {"device": where, "torch": torch.__version__, "steps": given.steps}
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    bad = sum(not good(row) for row in rows)
    seconds = sum(row["wall_seconds"] for row in rows)
    print(f"\n{len(rows) - bad} of {len(rows)} runs moved and stayed finite, {seconds:.0f} s")
    raise SystemExit(int(bad > 0))


if __name__ == "__main__":
    main()
