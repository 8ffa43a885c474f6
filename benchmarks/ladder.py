"""What each method wins back of the accuracy that a batch of a third of the training images costs.

The digits recipe for 20 epochs, with nothing and then with one method more a rung: linear scaling
and warm-up (Goyal 2017), LARS (You 2018), batch-size control (Mikami 2018); then two controls. Runs
are deterministic: the same table on any machine of one kind. `--docs docs/ladder.md` puts it there.
"""

import json as jsonlib
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import tyro

import megabatch as mb
from megabatch.batch import Stage
from megabatch.config import Config, LearningRate, OptimizerConfig

SMALL, LARGE = 32, 480  # of 1,438 training images
BEGIN, END = "<!-- made by benchmarks/ladder.py -->", "<!-- end -->"

_recipe = replace(mb.recipes.digits(), stages=(), eval_every=0, save_every=0, deterministic=True)
_sgd = replace(
    _recipe,
    optimizer=OptimizerConfig(momentum=0.9, weight_decay=1e-4, trust=None, form="pytorch"),
    # 0.2 was the best of 0.05, 0.1 and 0.2 for the small batch.
    lr=LearningRate(reference=0.2, per=SMALL, warmup=0, decay="poly", power=2),
)

RUNGS: dict[str, Config] = {
    "small batch": replace(_sgd, batch=SMALL),
    "none": replace(_sgd, batch=LARGE, lr=replace(_sgd.lr, per=None)),
    "linear scaling": replace(_sgd, batch=LARGE),
    "+ warm-up": replace(_sgd, batch=LARGE, lr=replace(_sgd.lr, warmup=2)),
    "+ LARS": replace(_recipe, batch=LARGE),  # rate and warm-up are the recipe's own
    "+ batch-size control": replace(
        _recipe, batch=LARGE // 5, stages=(Stage(6, LARGE // 2), Stage(12, LARGE))
    ),
    # What the last two rungs owe to warm-up, and to the steps that a small first batch buys.
    "control: LARS, no warm-up": replace(_recipe, batch=LARGE, lr=replace(_recipe.lr, warmup=0)),
    "control: LARS, as many steps": replace(_recipe, batch=192),
}


def run(config: Config) -> dict[str, Any]:
    return asdict(mb.train(config, quiet=True))


def climb(seeds: int, jobs: int) -> list[dict[str, Any]]:
    """All rungs with all seeds."""
    configs = [replace(rung, seed=seed) for rung in RUNGS.values() for seed in range(seeds)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = list(pool.map(run, configs))
    rows = []
    for index, (name, config) in enumerate(RUNGS.items()):
        runs = found[index * seeds : (index + 1) * seeds]
        row = {
            "rung": name,
            "optimizer": "SGD" if config.optimizer.trust is None else "LARS",
            "batches": [stage.batch for stage in config.all_stages],
            "rate": config.lr_at(config.lr.warmup),
            "warmup_epochs": config.lr.warmup,
            "steps": runs[0]["steps"],
            "top1": [one["top1"] for one in runs],
        }
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| rung | batch | optimizer | first peak rate | warm-up | steps | top-1 % | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        scores = [100 * top1 for top1 in row["top1"]]
        spread = f" +- {stdev(scores):.2f}" if len(scores) > 1 else ""
        lines.append(
            f"| {row['rung']} | {', '.join(map(str, row['batches']))} | {row['optimizer']} "
            f"| {row['rate']:g} | {row['warmup_epochs']:g} epochs | {row['steps']} "
            f"| {mean(scores):.2f}{spread} | {', '.join(f'{score:.1f}' for score in scores)} |"
        )
    return "\n".join(lines)


def put(text: str, page: Path) -> None:
    """Replace what lies between the two marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main(
    seeds: int = 5,
    jobs: int = os.cpu_count() or 1,
    docs: Path | None = None,
    json: Path | None = None,
) -> None:
    """Train every rung of the ladder and print the table.

    Args:
        seeds: runs a rung.
        jobs: runs at a time; each has one thread.
        docs: also put the table between the marks of this page.
        json: also write the figures to this file.
    """
    rows = climb(seeds, jobs)
    print(table(rows))
    if docs:
        put(table(rows), docs)
    if json:
        json.write_text(jsonlib.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
