"""The net that a run ended with, without its training: weights, names of the classes, and how it
wants its images.

The weights are those that evaluation uses: their moving average where the run kept one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megabatch import models
from megabatch.config import Config
from megabatch.data.augment import normalise
from megabatch.data.decoded import Decoded
from megabatch.data.jpeg import BadImage
from megabatch.data.origins import open_origin
from megabatch.data.packs.reading import Arena, Pack
from megabatch.data.source import InMemory
from megabatch.ema import put_averages
from megabatch.errors import UserError
from megabatch.runs import checkpoint
from megabatch.runs.begun import check_run, written_classes

_ODD = 7919
"""a number of classes that no other dimension of a net has"""


@dataclass(frozen=True)
class Trained:
    run: Path
    config: Config
    net: nn.Module
    """in fp32 on the CPU, set to evaluate"""
    classes: list[str]
    named: bool
    """whether the classes' names are known; otherwise they are numbers"""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """of the channels, on a scale of 0 to 1: images are brought to (image - mean) / std"""
    checkpoint: Path
    averaged: bool
    """the weights are their moving average"""

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Of bytes, n x channels x size x size."""
        found: Tensor = self.net(normalise(images, self.mean, self.std, torch.float32))
        return found

    def read(self, paths: list[Path]) -> Tensor:
        """Images from files, cropped and sized as evaluation does it."""
        none = torch.zeros(len(paths), dtype=torch.int64)
        chosen = torch.arange(len(paths))
        source = Decoded(self._data, _Files(paths), chosen, none, len(self.classes))
        return source.read(chosen, None)[0]

    @property
    def _data(self) -> Any:
        data = self.config.data
        # Of images that live in memory evaluation sees all there is.
        in_memory = data.kind in ("digits", "synthetic", "own")
        return replace(data, resize=data.size) if in_memory else data


class _Files:
    """Images by the names of their files."""

    checked, pack = False, None

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def record(self, index: int, arena: Arena | None = None) -> bytes:
        try:
            return self._paths[index].read_bytes()
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None

    def records(self, indices: list[int], arena: Arena) -> Iterable[bytes]:
        return map(self.record, indices)

    def name(self, index: int) -> str:
        return str(self._paths[index])


def load(run: Path, best: bool = False) -> Trained:
    """The newest good checkpoint of a run, or the best that it kept."""
    check_run(run)
    config = Config.read(run / "config.json")
    if config.model.startswith("own"):
        raise UserError(
            f"{run} was trained with a model of its caller's: load "
            f"{run}/checkpoints/.../model.safetensors into it yourself"
        )
    found = checkpoint.of_run(run, best)
    with checkpoint.fitting(found):
        count = _class_count(config, found)
        net = _build(config, count)
        checkpoint.load_weights(found, net)
        put_averages(net, checkpoint.load_extra(found))
    net.float().eval()
    names = class_names(run, config)
    named = names is not None and len(names) == count
    mean, std = _scale(config)
    return Trained(
        run=run,
        config=config,
        net=net,
        classes=names if named and names is not None else [str(n) for n in range(count)],
        named=named,
        mean=mean,
        std=std,
        checkpoint=found,
        averaged=config.ema > 0,
    )


def _build(config: Config, classes: int) -> nn.Module:
    return models.build(config.model, classes, config.data.channels, config.data.size)


def _class_count(config: Config, found: Path) -> int:
    """How many classes the weights are for: the dimension that the net takes from its caller.

    Every shape is compared before a net of that many is built: a file that says a billion must
    hold them.
    """
    with safe_open(found / checkpoint.WEIGHTS, "pt") as weights:
        theirs = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    shapes = _shapes(config, _ODD)
    count = int(theirs[next(name for name, shape in shapes.items() if shape[:1] == [_ODD])][0])
    for name, shape in shapes.items():
        wanted = [count, *shape[1:]] if shape[:1] == [_ODD] else shape
        if theirs[name] != wanted:
            raise ValueError(f"{name} has shape {theirs[name]}, not {wanted}")
    return count


def _shapes(config: Config, classes: int) -> dict[str, list[int]]:
    try:
        with torch.device("meta"):
            net = _build(config, classes)
    except NotImplementedError:  # a net that computes its own shape with tensors
        net = _build(config, classes)
    return {name: [*t.shape] for name, t in net.state_dict().items()}


def class_names(run: Path, config: Config) -> list[str] | None:
    """From the run's classes.json, or from its data where that is still there."""
    if (written := written_classes(run)) is not None:
        return written
    if config.data.kind == "digits":
        return [str(digit) for digit in range(10)]
    path = Path(config.data.path)
    try:
        if config.data.kind == "pack":
            return Pack(path).about.classes
        if config.data.kind == "folder":
            return open_origin(path).classes
    except (UserError, OSError):
        return None  # the data has moved; the classes' numbers are still right
    return None


def _scale(config: Config) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that the run's images were brought to 0 and 1 by."""
    none = torch.zeros(0, dtype=torch.int64)
    source: Decoded | InMemory
    if config.data.kind in ("pack", "folder"):
        source = Decoded(config.data, _Files([]), none, none, 1)
    else:
        source = InMemory(torch.zeros(0, config.data.channels, 1, 1), none, 1)
    return source.mean, source.std
