"""megabatch evaluate RUN: the newest good checkpoint of a run on its validation images."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.paths import check_named, moved
from megabatch.errors import DONE, UserError
from megabatch.runs.begun import check_brought, check_run
from megabatch.runs.loggers import finite
from megabatch.verbs.parsing import parse
from megabatch.verbs.workers import on_workers
from megabatch.verbs.writing import say_result


@dataclass(frozen=True)
class Elsewhere:
    path: str | None = None
    """a pack, a folder or an archive of the same classes (none: where the run had its images)"""


@dataclass(frozen=True)
class EvaluateFlags:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """the folder of a run"""
    workers: int | None = None
    """local workers (none: one a GPU, or one without a GPU; under a launcher: the launcher's)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    best: bool = False
    """take the best checkpoint, where the run kept it (train --keep-best), not the newest"""
    data: Elsewhere = Elsewhere()
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(EvaluateFlags, "evaluate", arguments)
    folder = Path(flags.run)
    check_run(folder)
    config = Config.read(folder / "config.json")
    data = moved(config.data, flags.data.path)
    check_brought(folder, replace(config, data=data))
    try:
        check_named(data)
    except UserError as error:
        if flags.data.path is not None:
            raise
        raise UserError(f"{error}; --data.path says where the run's images are now") from None
    first, result = on_workers(flags.workers, flags.device, 1, evaluate_here, flags)
    if first:
        say_result(
            f"top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['loss']:.4f} "
            f"after {result['seen']:,} images of training"
        )
        if flags.json:
            print(json.dumps(finite(result)), flush=True)
    return DONE


def evaluate_here(flags: EvaluateFlags) -> tuple[bool, dict[str, Any]]:
    """The work of one worker: whether it is the first, and the result."""
    from megabatch.evaluation import evaluate

    cluster = Cluster.from_env(device=flags.device)
    try:
        return cluster.first, evaluate(
            flags.run, cluster=cluster, quiet=False, best=flags.best, path=flags.data.path
        )
    finally:
        cluster.leave()
