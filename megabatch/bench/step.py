"""megabatch bench step: images/s of the trainer's own step by model and micro-batch, for
machine.json.

`--export` writes a model as the planner's workload: a bundled one, or a module of your own by its
import path (`megabatch.bench.describe`).
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megabatch import models
from megabatch.bench.describe import describe, imported
from megabatch.bench.rivals import (
    as_in_training,
    convolutions_alone,
    plain_step,
    random_images,
)
from megabatch.bench.steady import noted, unsteady
from megabatch.bench.timing import by_turns, check_seconds, time_of, times_faster
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import MicroBatch
from megabatch.errors import DONE, UserError
from megabatch.parts import assemble, prepared
from megabatch.planner.machine_file import check_updatable, update
from megabatch.planner.peak import share_of_peak
from megabatch.planner.workload import made_for
from megabatch.precision import HALF
from megabatch.step import train_step
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import check_out, say, write_out
from megabatch.workers.process import compute_settings


@dataclass(frozen=True)
class StepFlags:
    model: str = "small"
    """one of the bundled models; --export also takes package.file:thing, a module or its maker"""
    micro: tuple[int, ...] = (16, 32, 64, 128)
    """images in one pass, each measured"""
    passes: int = 1
    """micro-batches in one step; small ones run side by side on a GPU"""
    span: int = 0
    """images that share batch-norm statistics (0: those of a pass)"""
    size: int = 0
    """side of the images in pixels (0: what the model was made for)"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the forward pass; the half ones by autocast"""
    compile: Literal["auto", "always", "never"] = "auto"
    """as in training: by kernels of our own where there are some, or compiled by torch"""
    graphs: Literal["auto", "always", "never"] = "auto"
    """as in training: replay passes as a CUDA graph"""
    rivals: bool = False
    """beside it the net with SGD, compiled whole (and on a CPU as it is), and the convolutions"""
    seconds: float = 2.0
    """to measure for, each size"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    out: str = "machine.json"
    """the file to add the rows to"""
    export: str | None = None
    """only write the model as a workload of the planner"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(StepFlags, "bench step", arguments)
    _check(flags)
    if flags.export and ":" in flags.model:
        return _export(flags, imported(flags.model), flags.size or 224, 3)
    usual, channels, classes = made_for(flags.model)
    size = flags.size or usual
    try:
        net = models.build(flags.model, classes, channels, size)
    except ValueError as error:
        raise UserError(str(error)) from None
    if flags.export:
        return _export(flags, net, size, channels)
    device = flags.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for but torch sees no GPU: use --device cpu")
    unwritten = _unwritten(flags, usual)
    if unwritten is None:
        check_updatable(flags.out)
    data = Data("synthetic", size=size, channels=channels, classes=classes)
    configs = [_config(flags, micro, data) for micro in flags.micro]  # all, before one is measured
    rows, peak_shares, beside = [], [], []
    print(f"measuring {flags.model} on {device}", file=sys.stderr, flush=True)
    for config in configs:
        micro = config.micro
        found: dict[str, float] = {}
        if flags.rivals:
            torch._dynamo.reset()  # each size has kernels of its own, not ones for all sizes
        with one_worker(config, torch.device(device)) as train:
            rate, peak = _measured(train, config.batch, flags.seconds, device)
            rows.append({"model": flags.model, "micro": micro, "images_per_second": rate})
            chip = torch.cuda.get_device_name() if device == "cuda" else ""
            reached = share_of_peak(chip, flags.model, size, channels, classes, rate)
            peak_shares.append(reached)
            of_peak = "" if reached is None else f"  {reached:6.1%} of the chip's peak FLOP/s"
            name = f"{flags.model} micro {micro:5d}"
            print(f"{name}  {rate:12,.1f} images/s{of_peak}{peak}", flush=True)
            if flags.rivals and device == "cpu":
                found = _rivals_by_turns(config, train, flags.seconds)
        if flags.rivals:
            found |= _compiled_rival(config, rate, flags.seconds) if device == "cuda" else {}
            found |= _floor(config, device, rate, flags.seconds)
            beside.append({"micro": micro, **found})
    if unwritten is None:
        facts = {"host": host(device), "sources": {"compute": _how(flags)}}
        update(flags.out, {"compute": rows, **facts})
    print(unwritten or f"written to {flags.out}", file=sys.stderr)
    if flags.json:
        measured = [
            {**row, "passes": flags.passes, "size": size, "peak_share": reached}
            for row, reached in zip(rows, peak_shares, strict=True)
        ]
        out = flags.out if unwritten is None else None
        print(json.dumps({"rows": measured, "rivals": beside, "out": out}), flush=True)
    return DONE


def _config(flags: StepFlags, micro: int, data: Data) -> Config:
    return Config(
        model=flags.model,
        batch=flags.passes * micro,
        micro=micro,
        span=flags.span or micro,
        precision=flags.precision,
        compile=flags.compile,
        graphs=flags.graphs,
        data=data,
    ).check()


def _unwritten(flags: StepFlags, usual: int) -> str | None:
    """Why the rows are not for machine.json, if they are not: the planner takes them for times of
    one pass with its update, over images that the model was made for."""
    if flags.size not in (0, usual):
        what = f"images of {flags.size} px, and the planner's {flags.model} has {usual}"
    elif flags.passes > 1:
        what = f"steps of {flags.passes} passes, and the planner wants one"
    else:
        return None
    return f"not written to {flags.out}: these are of {what}"


def _check(flags: StepFlags) -> None:
    """What can be refused before anything is measured."""
    if flags.export:
        if flags.rivals:
            raise UserError("--export measures nothing: leave --rivals away, or --export")
        check_out(Path(flags.export), (".json",), "a workload")
        return
    if not flags.micro or any(micro < 1 for micro in flags.micro):
        raise UserError(f"--micro is {' '.join(map(str, flags.micro))}; give 1 image and more")
    if flags.passes < 1:
        raise UserError(f"--passes is {flags.passes}; give 1 or more")
    check_seconds(flags.seconds)


def _measured(
    step: Callable[[], None], images: int, seconds: float, device: str
) -> tuple[float, str]:
    """Images/s, and the memory that it took, in words."""
    if device != "cuda":
        taken, timed = noted(step)
        rate = images / time_of(timed, seconds, device)
        if (words := unsteady(taken)) is not None:
            say(words, progress=True)
        return rate, ""
    torch.cuda.reset_peak_memory_stats()
    rate = images / time_of(step, seconds, device)
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    return rate, f"  {peak:5.1f} GiB"


def _rivals_by_turns(config: Config, ours: Callable[[], None], seconds: float) -> dict[str, float]:
    """What the same images cost others on a CPU, each step beside one of ours."""
    cpu, found = torch.device("cpu"), {}
    for name, compiled, tuned in (
        ("as it is, SGD", False, False),
        ("channels last, fused SGD", False, True),
        ("compiled whole, SGD", True, False),
        ("compiled whole, tuned", True, True),
    ):
        works = {"ours": ours, name: plain_step(config, cpu, compiled, tuned)}
        times = by_turns(works, seconds)
        found[name] = theirs = config.batch / statistics.median(times[name])
        times_ours = times_faster(times["ours"], times[name])
        print(f"  {name:26} {theirs:12,.1f} images/s  ours {times_ours:.2f} x", flush=True)
    return found


def _compiled_rival(config: Config, rate: float, seconds: float) -> dict[str, float]:
    """What the same images cost another on a GPU, after ours: both might not fit."""
    name = "compiled whole, SGD"
    torch._dynamo.reset()
    step = plain_step(config, torch.device("cuda"), compiled=True)
    theirs, peak = _measured(step, config.batch, seconds, "cuda")
    print(f"  {name:26} {theirs:12,.1f} images/s  ours {rate / theirs:.2f} x{peak}", flush=True)
    return {name: theirs}


def _floor(config: Config, device: str, rate: float, seconds: float) -> dict[str, float]:
    """What of it is convolutions."""
    name, dtype = "convolutions alone", HALF.get(config.precision, torch.float32)
    alone = config.micro / convolutions_alone(config, torch.device(device), dtype, seconds)
    print(f"  {name:26} {alone:12,.1f} images/s  of it reached {rate / alone:.0%}", flush=True)
    return {name: alone}


def _export(flags: StepFlags, net: nn.Module, size: int, channels: int) -> int:
    described = describe(net, torch.zeros(1, channels, size, size), flags.model)
    written = described.to_json().encode()
    write_out(Path(str(flags.export)), written)
    say(f"{flags.export}: {len(described.layers)} layers, {described.parameters:,} parameters")
    if flags.json:
        print(json.dumps({"export": flags.export, "nbytes": len(written)}), flush=True)
    return DONE


@contextlib.contextmanager
def one_worker(config: Config, device: torch.device) -> Iterator[Callable[[], None]]:
    """The trainer's own step on one worker, of as many passes as the config says, over random
    images that lie on the device."""
    alone = Cluster(0, 1, 0, 1, device, (1, 1))
    data, count = config.data, config.batch // config.micro
    micro = MicroBatch(
        random_images(config, device),
        torch.randint(data.classes, (config.micro,), device=device),
        torch.arange(config.micro, device=device),
        0,
    )
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, alone))
        net = ending.enter_context(prepared(config, alone, data.classes))
        as_in_training(net)
        parts = ending.enter_context(assemble(config, alone, net))

        def train() -> None:
            train_step(parts, [micro] * count, config.batch, lr=0.01, momentum=0.9)

        yield train


def host(device: str) -> dict[str, Any]:
    """What was measured on."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _how(flags: StepFlags) -> str:
    return (
        f"megabatch bench step, {flags.precision}, --compile {flags.compile}, "
        f"--graphs {flags.graphs}, one worker"
    )
