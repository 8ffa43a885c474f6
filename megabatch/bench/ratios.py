"""megabatch bench ratios: norms of weights and gradients at the first step, tensor by tensor.

It is Table 3 of You et al. 2018: the two norms of one net lie decades apart from layer to layer, so
no one rate suits all of them, and LARS takes a rate for each.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, OptimizerConfig, check_setting
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.errors import DONE, UserError
from megabatch.parts import assemble, prepared
from megabatch.planner.workload import made_for
from megabatch.precision import full_dtype
from megabatch.step import train_step
from megabatch.verbs.parsing import parse
from megabatch.workers.process import compute_settings

_FEWEST = 6
"""random images of which a tenth, rounded, is one to hold out"""


@dataclass(frozen=True)
class RatioFlags:
    models: tuple[str, ...] = ("alexnet", "alexnet_bn")
    """bundled models, a table each"""
    batch: int = 32
    """images of the step"""
    path: str = ""
    """a pack, or a folder of images (without one: random images)"""
    weight_decay: float = 5e-4
    """in the ratio, as LARS has it"""
    trust: float = 0.001
    """LARS's coefficient"""
    seed: int = 0
    """of weights and images"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(RatioFlags, "bench ratios", arguments)
    if flags.batch < 2:
        raise UserError(f"--batch is {flags.batch}; batch norm needs 2 images and more")
    check_setting(OptimizerConfig, "weight_decay", flags.weight_decay)
    check_setting(OptimizerConfig, "trust", flags.trust)
    if not flags.models:
        raise UserError("bench ratios has no model to look at: give --models alexnet, say")
    found = {model: first_step(flags, model) for model in flags.models}
    for model, rows in found.items():
        print(f"\n{model}, first step of {flags.batch} images")
        print(f"{'tensor':24} {'||w||':>10} {'||grad||':>11} {'ratio':>10} {'LARS rate':>11}")
        for row in rows:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.4g}"
            print(
                f"{row['tensor']:24} {row['weight_norm']:10.4g} {row['gradient_norm']:11.4g} "
                f"{ratio:>10} {row['local_rate']:11.4g}"
            )
    if flags.json:
        print(json.dumps(found), flush=True)
    return DONE


def first_step(flags: RatioFlags, model: str) -> list[dict[str, Any]]:
    """Of every tensor that trains: both norms, their ratio, and the local rate LARS makes of them
    (1 where one of them is 0)."""
    size, channels, classes = made_for(model)
    images = max(2 * flags.batch, _FEWEST)
    data = Data("synthetic", size=size, channels=channels, classes=classes, images=images)
    if flags.path:
        data = replace(data, source="folder", path=flags.path)
    config = Config(
        model=model, batch=flags.batch, micro=flags.batch, span=flags.batch, seed=flags.seed,
        data=data,
    ).check()  # fmt: skip
    with contextlib.ExitStack() as ending:
        cluster = Cluster.from_env(None, flags.device)
        ending.callback(cluster.leave)
        ending.enter_context(compute_settings(config, cluster))
        train_set, val_set = open_sources(config, None, cluster)
        net = ending.enter_context(prepared(config, cluster, train_set.classes))
        parts = ending.enter_context(assemble(config, cluster, net))
        loader = StepLoader(train_set, val_set, config, cluster, full_dtype(config))
        ending.callback(loader.close)
        first = loader.micro_batches(Step(index=0, seen=0, batch=flags.batch, epoch=0.0, stage=0))
        train_step(parts, first, flags.batch, lr=0.0, momentum=0.0)  # a rate of 0 moves nothing
        rows = []
        for name, parameter in net.named_parameters():
            if not parameter.requires_grad:
                continue
            weight = float(parameter.detach().double().norm())
            gradient = parts.masters.of(parameter).grad
            assert gradient is not None
            slope = float(gradient.double().norm())
            known = weight > 0 and slope > 0
            local = flags.trust * weight / (slope + flags.weight_decay * weight) if known else 1.0
            rows.append(
                {
                    "tensor": name,
                    "weight_norm": weight,
                    "gradient_norm": slope,
                    "ratio": weight / slope if slope > 0 else None,
                    "local_rate": local,
                }
            )
        return rows
