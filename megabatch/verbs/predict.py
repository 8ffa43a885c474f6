"""megabatch predict RUN IMAGE...: what a run's model sees in images."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megabatch.errors import DONE, FAILED, UserError
from megabatch.runs.begun import check_run
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import say

_AT_ONCE = 64


@dataclass(frozen=True)
class PredictFlags:
    """The likeliest classes of each image, by the newest checkpoint of a run; images are cropped
    and sized as the run's evaluation does it.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run"""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")]
    """image files"""
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """how many classes to name"""
    best: bool = False
    """take the best checkpoint, where the run kept it (train --keep-best), not the newest"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(PredictFlags, "predict", arguments)
    if not flags.images:
        raise UserError("predict needs an image: megabatch predict RUN IMAGE [IMAGE ...]")
    if flags.top < 1:
        raise UserError(f"--top is {flags.top}; name at least 1 class")
    for name in flags.images:
        if Path(name).is_dir():
            raise UserError(f"{name} is a folder: name image files")
        if not Path(name).is_file():
            raise UserError(f"there is no image file {name}: name image files")
    check_run(Path(flags.run))
    from megabatch.runs.trained import load

    trained = load(Path(flags.run), flags.best)
    if not trained.named and trained.config.data.kind in ("pack", "folder"):
        say(
            f"megabatch: the classes' names are not known, their numbers are told: "
            f"{flags.run} has no classes.json and {trained.config.data.path} does not tell",
            progress=True,
        )
    found: list[dict[str, Any]] = []
    bad = 0
    for first in range(0, len(flags.images), _AT_ONCE):
        for prediction in _predicted(trained, flags.images[first : first + _AT_ONCE], flags.top):
            bad += "error" in prediction
            found.append(prediction)
            _say(prediction)
    if flags.json:
        result = {"run": flags.run, "checkpoint": str(trained.checkpoint), "images": found}
        print(json.dumps(result), flush=True)
    return FAILED if bad else DONE


def _predicted(trained: Any, names: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    """The classes of some images, or why one cannot be read."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    pixels = []
    for name in names:
        try:
            pixels.append(trained.read([Path(name)]))
            found[name] = {"image": name}
        except UserError as error:
            found[name] = {"image": name, "error": f"{name} cannot be read ({error.__cause__})"}
    readable = [name for name in names if "error" not in found[name]]
    if readable:
        likely = trained.logits(torch.cat(pixels)).double().softmax(1)
        values, labels = likely.topk(min(top, likely.shape[1]), dim=1)
        for name, likeliest, classes in zip(
            readable, values.tolist(), labels.tolist(), strict=True
        ):
            if not math.isfinite(sum(likeliest)):
                found[name]["error"] = f"what the net says of {name} is no number"
                continue
            found[name]["top"] = [
                {"class": trained.classes[label], "label": label, "probability": probability}
                for label, probability in zip(classes, likeliest, strict=True)
            ]
    return [found[name] for name in names]


def _say(prediction: dict[str, Any]) -> None:
    if "error" in prediction:
        say(f"megabatch: {prediction['error']}", progress=True)
        return
    say(prediction["image"])
    for guess in prediction["top"]:
        say(f"  {100 * guess['probability']:6.2f} %  {guess['class']}")
