"""Folders of runs for tests: a real one, and ones made up line by line."""

import dataclasses
import json
from pathlib import Path

import megabatch as mb


def real_run(out, **changes):
    """Two epochs on digits, in this process."""
    config = dataclasses.replace(mb.recipes.named("digits", epochs=2), **changes)
    return mb.train(config, cluster=mb.Cluster.from_env(device="cpu"), out=out, quiet=True)


def step_line(step, images=1000, batch=100, **changes):
    record = {
        "kind": "train", "step": step, "seen": (step + 1) * batch, "epoch": step * batch / images,
        "loss": 2.0 / (1 + step), "top1": 0.5, "top5": 0.9, "lr": 0.1, "momentum": 0.9,
        "batch": batch, "images_per_second": 500.0, "gradient_norm": 1.0, "noise_scale": 50.0,
        "loss_scale": 1.0, "skipped": False,
    }  # fmt: skip
    return json.dumps({**record, **changes})


def evaluation_line(epoch, images=1000, top1=0.5):
    told = {"seen": round(epoch * images), "epoch": epoch, "top1": top1, "top5": 0.9, "loss": 1.0}
    return json.dumps({"kind": "evaluation", "step": 0, **told})


def layer_line(name, epoch, ratio, images=1000):
    told = {"seen": round(epoch * images), "name": name, "ratio": ratio}
    return json.dumps({"kind": "layer", "step": 0, **told})


def made_up(folder: Path, lines=(), config=None, environment=None, **files):
    """A folder with these lines of metrics and these objects as NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    config = {"name": "made-up", "epochs": 4, "batch": 100} if config is None else config
    for name, told in {"environment": environment or {}, "config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(told))
    return folder
