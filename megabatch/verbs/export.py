"""megabatch export RUN --to FORMAT: leave with the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megabatch.config import Config
from megabatch.errors import DONE
from megabatch.runs.begun import check_run
from megabatch.runs.formats import SUFFIXES, check_format
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import check_out, say, say_result, write_out


@dataclass(frozen=True)
class ExportFlags:
    """The newest checkpoint of a run as a file for others: the weights that evaluation uses (their
    moving average, where the run kept one), checked against the run's own outputs.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run"""
    to: Literal["safetensors", "torchvision", "onnx"] = "safetensors"
    """the format: safetensors has weights, with classes and scale in the head; torchvision is for
    its ResNets' load_state_dict; onnx takes images of 0 to 1 and gives logits"""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """the file to write (none: RUN's name and the format's ending, here)"""
    best: bool = False
    """take the best checkpoint, where the run kept it (train --keep-best), not the newest"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(ExportFlags, "export", arguments)
    folder, suffixes = Path(flags.run), SUFFIXES[flags.to]
    check_run(folder)
    out = Path(flags.out or f"{folder.resolve().name}{suffixes[0]}")
    check_out(out, suffixes, f"a file for {flags.to}")
    check_format(flags.to, Config.read(folder / "config.json"))
    from megabatch.runs.export import export
    from megabatch.runs.trained import load

    trained = load(folder, flags.best)
    exported = export(trained, flags.to)
    write_out(out, exported.data)
    if exported.difference is None:
        say("megabatch: not checked, onnxruntime is not installed", progress=True)
        checked = ""
    else:
        checked = f"; outputs within {exported.difference:.1e} of the run's"
    averaged = ", averaged weights" if trained.averaged else ""
    say_result(
        f"{out}: {trained.config.model} for {len(trained.classes):,} classes{averaged}, "
        f"{len(exported.data) / 1e6:,.2f} MB{checked}"
    )
    if flags.json:
        result = {
            "out": str(out),
            "to": flags.to,
            "nbytes": len(exported.data),
            "model": trained.config.model,
            "classes": len(trained.classes),
            "class_names": trained.named,
            "averaged": trained.averaged,
            "checkpoint": str(trained.checkpoint),
            "difference": exported.difference,
        }
        print(json.dumps(result), flush=True)
    return DONE
