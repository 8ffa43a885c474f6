"""Evaluation of what a run left: evaluate(run) scores its newest checkpoint, or its best."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

from torch import nn

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.paths import moved
from megabatch.ema import put_averages
from megabatch.own import check_model, named_folder, whose
from megabatch.parts import prepared
from megabatch.precision import full_dtype, with_half_weights
from megabatch.runs import checkpoint
from megabatch.runs.begun import check_brought, check_classes, check_run
from megabatch.runs.progress import counted, counting, say, to_people
from megabatch.runs.trained import class_names
from megabatch.runs.verdict import idle_workers
from megabatch.step import score
from megabatch.workers.process import compute_settings


def evaluate(
    run: str | os.PathLike[str],
    model: nn.Module | None = None,
    data: Any = None,
    *,
    cluster: Cluster | None = None,
    quiet: bool = True,
    best: bool = False,
    path: str | None = None,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's newest checkpoint; every worker of the cluster calls it.
    `best`: of its best one, where it kept that. `path`: where the images are now, or others of the
    same classes.

    A run of your own module or data needs them again; the module then holds what was evaluated, the
    average of the weights where the run kept one. Unless `quiet`, the first worker says on standard
    error how far it is.
    """
    folder = named_folder(run, "run")
    check_run(folder)
    config = Config.read(folder / "config.json")
    # What was written there may be anyone's: an evaluation copies nothing and needs no first
    # weights.
    known = None if path is None else class_names(folder, config)
    config = replace(config, init="", data=replace(moved(config.data, path), local_copy=""))
    check_brought(run, config, model, data)
    check_model(model)
    found = checkpoint.of_run(folder, best)
    cluster = Cluster.given(cluster)
    console = to_people(quiet or not cluster.first)
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, cluster))
        say(console, f"reading the images: {whose(config)}")
        _, val_set = open_sources(config, data, cluster, training=False)
        if known is not None:
            check_classes(folder, known, list(val_set.class_names), str(path))
        net = ending.enter_context(prepared(config, cluster, val_set.classes, model))
        ending.enter_context(with_half_weights(net, config))
        checkpoint.load_weights(found, net)
        with checkpoint.fitting(found):
            put_averages(net, checkpoint.load_extra(found))
        loader = StepLoader(None, val_set, config, cluster, full_dtype(config))
        ending.callback(loader.close)
        held_out = loader.validation_images
        if (idle := idle_workers(held_out, config.micro, cluster.world)) is not None:
            say(console, idle)
        on_progress = ending.enter_context(counting("evaluating", console))
        watched = counted(loader.validation(), held_out, cluster.world, on_progress)
        result = score(net, watched, held_out, config, cluster)
    seen = checkpoint.seen(found)
    return {**result, "seen": seen, "checkpoint": str(found), "world": cluster.world}
