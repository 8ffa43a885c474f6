"""megabatch evaluate RUN: the newest good checkpoint of a run on its validation images."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from megabatch.cluster import Cluster
from megabatch.errors import DONE
from megabatch.verbs.parsing import parse


@dataclass(frozen=True)
class EvaluateFlags:
    run: tyro.conf.Positional[str]
    """the folder of a run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    json: bool = False
    """the last line on standard output is the result as one JSON object"""


def run(arguments: list[str]) -> int:
    flags = parse(EvaluateFlags, "evaluate", arguments)
    from megabatch.training import evaluate

    cluster = Cluster.from_env(device=flags.device)
    try:
        result = evaluate(flags.run, cluster=cluster)
    finally:
        cluster.leave()
    if cluster.first:
        print(
            f"top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%}, loss {result['loss']:.4f} "
            f"after {result['seen']:,} images",
            file=sys.stderr,
        )
        if flags.json:
            print(json.dumps(result), flush=True)
    return DONE
