"""Claim: our LARS follows Algorithm 1 of the paper when the rate moves; other packages' do not.

One 64 x 32 weight and one bias, float64, momentum 0.9, decay 1e-4, trust 0.001, rates 8, 8, 16, 4.
"""

import importlib.metadata
import importlib.util
import json as jsonlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import nn

from megabatch.optim import LARS

RATES = (8.0, 8.0, 16.0, 4.0)
MOMENTUM, DECAY, TRUST = 0.9, 1e-4, 0.001

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def ours(form: str, correction: bool = False) -> Factory:
    return lambda params: LARS(
        params, 0.0, MOMENTUM, DECAY, TRUST, form=form, momentum_correction=correction
    )


def contenders(timm_lars: Path | None) -> dict[str, Factory]:
    """Ours, and those of the others that are here."""
    found = {
        "megabatch paper": ours("paper"),
        "megabatch paper, momentum corrected": ours("paper", correction=True),
        "megabatch pytorch": ours("pytorch"),
    }
    if importlib.util.find_spec("pytorch_optimizer"):
        from pytorch_optimizer import LARS as TheirLARS

        found[f"pytorch_optimizer {importlib.metadata.version('pytorch_optimizer')}"] = (
            lambda params: TheirLARS(
                params, lr=1.0, momentum=MOMENTUM, weight_decay=DECAY, trust_coefficient=TRUST
            )
        )
    if timm_lars:
        # By path, because the package imports torchvision and this one file does not.
        spec = importlib.util.spec_from_file_location("timm_lars", timm_lars)
        assert spec and spec.loader, f"{timm_lars} is not a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found["timm"] = lambda params: module.Lars(
            params, lr=1.0, momentum=MOMENTUM, weight_decay=DECAY, trust_coeff=TRUST
        )
    return found


def algorithm(weight: np.ndarray, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """The weight before the first step and after each, by the paper."""
    velocity, path = np.zeros_like(weight), [weight]
    for gradient, rate in zip(gradients, RATES, strict=True):
        size, slope = np.linalg.norm(weight), np.linalg.norm(gradient)
        local_rate = rate * TRUST * size / (slope + DECAY * size)
        velocity = MOMENTUM * velocity + local_rate * (gradient + DECAY * weight)
        weight = weight - velocity
        path.append(weight)
    return path


def run(
    make: Factory, start: list[np.ndarray], gradients: list[list[np.ndarray]]
) -> list[np.ndarray]:
    """The same for an optimizer; the bias goes along and is not judged."""
    params = [nn.Parameter(torch.tensor(value)) for value in start]
    optimizer = make(params)
    path = [start[0]]
    for step, rate in zip(gradients, RATES, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for param, gradient in zip(params, step, strict=True):
            param.grad = torch.tensor(gradient)
        optimizer.step()
        path.append(params[0].detach().numpy().copy())
    return path


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


def main(json: Path | None = None, timm_lars: Path | None = None, seed: int = 0) -> None:
    """Compare each LARS found with the paper's algorithm, step by step.

    Args:
        json: also write the figures to this file.
        timm_lars: timm's optim/lars.py, to be measured too.
        seed: of the weights and gradients.
    """
    rng = np.random.default_rng(seed)
    shapes = ((64, 32), (32,))
    start = [rng.normal(size=shape) for shape in shapes]
    gradients = [[rng.normal(size=shape) for shape in shapes] for _ in RATES]
    paper = algorithm(start[0], [step[0] for step in gradients])

    rows: list[dict[str, Any]] = []
    for name, make in contenders(timm_lars).items():
        path = run(make, start, gradients)
        steps = range(1, len(path))
        updates = [distance(path[t], path[t - 1]) / distance(paper[t], paper[t - 1]) for t in steps]
        errors = [distance(path[t], paper[t]) / distance(paper[t], paper[0]) for t in steps]
        rows.append({"implementation": name, "upd": updates, "err": errors})

    print("upd: length of the weight's step over the paper's")
    print("err: distance from the paper's weight over the distance it has travelled\n")
    titles = [f"step {i}, lr {rate:g}: upd / err" for i, rate in enumerate(RATES, 1)]
    print("| implementation | " + " | ".join(titles) + " |")
    print("|---|" + "---|" * len(RATES))
    for row in rows:
        cells = [
            f"{upd:.3f} / " + (f"{err:.1%}" if err > 1e-3 else f"{err:.0e}")
            for upd, err in zip(row["upd"], row["err"], strict=True)
        ]
        print(f"| {row['implementation']} | " + " | ".join(cells) + " |")
    if json:
        settings = {"rates": RATES, "momentum": MOMENTUM, "weight_decay": DECAY, "trust": TRUST}
        record = {**settings, "seed": seed, "torch": torch.__version__, "rows": rows}
        json.write_text(jsonlib.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
