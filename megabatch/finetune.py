"""Beginning from somebody's weights: a file with this model's names (torchvision's, for ResNets),
or those that the library of a model has; a head of another number of classes is made anew."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.models import zoo

_INSIDE = ("state_dict", "model")
"""where training scripts put the weights among other things"""


def begin_from(net: nn.Module, config: Config) -> None:
    """Put the weights that a run begins from into its model."""
    if config.init == zoo.PRETRAINED:
        load_pretrained(net, config)
    else:
        load_initial(net, config.init)


def load_initial(net: nn.Module, path: str) -> list[str]:
    """Load weights into a module; returns the names that keep their fresh values: the head's."""
    zoo.check_init(path)
    return _put(net, _read(path), path)


def load_pretrained(net: nn.Module, config: Config) -> list[str]:
    """The same with the weights that timm or torchvision has, in its cache or on its servers."""
    data = config.data
    try:
        trained = zoo.build(config.model, None, data.channels, data.size, pretrained=True)
    except UserError:
        raise
    except Exception as error:  # of the network, the hub, the cache: each has its own
        first: BaseException = error
        while first.__cause__ is not None:  # the hub's own words are about the hub
            first = first.__cause__
        reason = next(iter(str(first).strip().splitlines()), type(first).__name__)
        raise UserError(
            f"the weights of {config.model} cannot be had ({reason:.200}): fetch them where there "
            f"is a network, or give a file, --init FILE"
        ) from error
    return _put(net, trained.state_dict(), f"the pretrained {config.model}")


def _read(path: str) -> dict[str, Tensor]:
    try:
        if not path.endswith((".pth", ".pt", ".bin")):
            return load_file(path)
        _check_zip(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises whatever a damaged file leads it to
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        kind = "weights of torch's" if path.endswith((".pth", ".pt", ".bin")) else "safetensors"
        raise UserError(f"{path} cannot be read as {kind} ({reason}): check the file") from error
    for name in _INSIDE:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{path} holds no weights by name: save model.state_dict() there")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def _check_zip(path: str) -> None:
    """torch compresses nothing, but it would expand whatever is."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > os.path.getsize(path):
                raise ValueError("it claims to expand to more than its size")


def _put(net: nn.Module, found: dict[str, Tensor], origin: str) -> list[str]:
    own = net.state_dict()
    head = _head(net)
    fresh = [name for name in head if name in found and found[name].shape != own[name].shape]
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            raise UserError(f"{name} in {origin} is no plain array of numbers")
    for name in own:
        if name not in found and not name.endswith("num_batches_tracked"):
            raise UserError(
                f"{origin} has no weight {name}: it is of another model than this run's"
            )
        if name in found and name not in fresh and found[name].shape != own[name].shape:
            raise UserError(
                f"{name} has {_by(found[name])} values in {origin} but {_by(own[name])} in this "
                f"run's model: only the head may differ"
            )
    unknown = sorted(found.keys() - own.keys())
    if unknown:
        raise UserError(f"{origin} holds {unknown[0]}, which this run's model does not have")
    with torch.no_grad():
        for name, tensor in own.items():
            if name in found and name not in fresh:
                tensor.copy_(found[name])
    return fresh


def _head(net: nn.Module) -> list[str]:
    """The parameters of the layer that gives the logits: the one that timm's models name
    themselves, or the last that multiplies."""
    layers = {module: name for name, module in net.named_modules()}
    ask: Any = getattr(net, "get_classifier", tuple)
    named = ask()
    heads: list[nn.Module] = [named] if isinstance(named, nn.Module) else list(named)
    if not heads:
        heads += [m for m in layers if isinstance(m, nn.Linear | nn.Conv2d)][-1:]
    return [f"{layers[head]}.{name}" for head in heads for name, _ in head.named_parameters()]


def _by(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "1"
