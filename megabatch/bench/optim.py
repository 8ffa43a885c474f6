"""megabatch bench optim: one update of all weights, beside torch's SGD and timm's LARS, and the
bytes that it cannot do without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from megabatch import models
from megabatch.bench.timing import bandwidth, busy_time_of, time_of
from megabatch.errors import DONE, UserError
from megabatch.optim import LARS, Muon, parameter_groups
from megabatch.planner.workload import made_for
from megabatch.verbs.parsing import parse

_SGD_PASSES = 5
"""over the weights' bytes: weight, gradient and momentum are read, weight and momentum written"""
_LARS_PASSES = _SGD_PASSES + 2
"""the norms read weight and gradient once more"""


@dataclass(frozen=True)
class OptimFlags:
    model: str = "resnet50"
    """one of the bundled models"""
    seconds: float = 1.0
    """to measure for, each optimiser"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(OptimFlags, "bench optim", arguments)
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds is {flags.seconds:g}; give more than 0, and 600 at the most")
    device = flags.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for but torch sees no GPU: use --device cpu")
    size, channels, classes = made_for(flags.model)
    net = models.build(flags.model, classes, channels, size).to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rate = bandwidth(device)
    nbytes = sum(p.nbytes for p in net.parameters())
    rows = []
    for name, passes, step in _contenders(net, device):
        called = time_of(step, flags.seconds, device)
        busy = busy_time_of(step) if device == "cuda" else called
        floor = passes * nbytes / rate
        rows.append(
            {
                "optimizer": name,
                "ms": 1e3 * called,
                "device_ms": 1e3 * busy,
                "floor_ms": 1e3 * floor,
                "of_floor": floor / busy,
            }
        )
    print(f"{flags.model} on {device}: {nbytes / 1e6:,.0f} MB of weights, {rate / 1e9:,.0f} GB/s")
    print(f"{'ms':36} {'called':>9} {'computing':>10} {'its floor':>10} {'reached':>8}")
    for row in rows:
        print(
            f"{row['optimizer']:36} {row['ms']:9.3f} {row['device_ms']:10.3f} "
            f"{row['floor_ms']:10.3f} {row['of_floor']:8.0%}"
        )
    if flags.json:
        found = {"model": flags.model, "device": device, "bytes_per_second": rate, "rows": rows}
        print(json.dumps(found), flush=True)
    return DONE


def _contenders(net: nn.Module, device: str) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Name, passes over the weights' bytes, and one step; gradients stay as they are."""
    weights = list(net.parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    groups = parameter_groups(net, 5e-5)
    # As the trainer's step has it: on a CPU the host has read the gate, and rounding is free.
    good = torch.ones((), dtype=torch.bool, device=device) if device == "cuda" else None
    ours = LARS(groups, lr=1e-9)
    ours.rounds_freely = True
    yield "LARS, as training runs it", _LARS_PASSES, lambda: ours.step(good=good)
    plain = LARS(parameter_groups(net, 5e-5), lr=1e-9, foreach=True)
    yield "LARS by foreach", _LARS_PASSES, plain.step
    if device == "cuda":  # on a CPU its products take seconds; its floor leaves them out
        muon = Muon(parameter_groups(net, 5e-5, adapt_head=False), lr=1e-9)
        yield "Muon", _LARS_PASSES, lambda: muon.step(good=good)
    fused = torch.optim.SGD(weights, 1e-9, 0.9, weight_decay=5e-5, fused=device == "cuda" or None)
    yield "torch's SGD" + ", fused" * (device == "cuda"), _SGD_PASSES, fused.step
    if find_spec("timm"):
        from timm.optim import Lars

        theirs = Lars(weights, lr=1e-9, momentum=0.9, weight_decay=5e-5)
        yield "timm's LARS", _LARS_PASSES, theirs.step
