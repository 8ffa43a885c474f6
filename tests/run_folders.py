"""Folders of runs for tests: a real one, ones made up line by line, and a watch over what is
written elsewhere."""

import dataclasses
import json
import os
import sys
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


class Outside:
    """What is written elsewhere than in some folders; the hook stays, as hooks do."""

    def __init__(self):
        self.allowed, self.found = None, []
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self.allowed is None:
            return
        if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._note(arguments[0])
        if event in ("os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"):
            self._note(arguments[0])
        if event == "os.rename":
            self._note(arguments[1])

    def _note(self, path):
        if isinstance(path, str | bytes | os.PathLike):
            place = os.path.realpath(os.fsdecode(path))
            if not place.startswith((*self.allowed, "/dev/null")):
                self.found.append(place)
