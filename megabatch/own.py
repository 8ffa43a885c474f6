"""What a caller brings: a module or data of their own, a folder's name, checked before anything is
begun."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from megabatch.config import Config
from megabatch.config.settings import shown
from megabatch.errors import UserError


def checked(config: Config, model: nn.Module | None, data: Any) -> Config:
    """The config as it is saved: a module or data of the caller's own are named as such."""
    if not isinstance(config, Config):
        raise UserError(
            f"config is {shown(config)}, not a Config: give one, such as megabatch.recipes.digits()"
        )
    check_model(model)
    if model is not None:
        config = replace(config, model=f"own {type(model).__name__}")
    if data is not None:
        config = replace(config, data=replace(config.data, source="own"))
    return config.check()


def check_model(model: Any) -> None:
    """Refuse what cannot be a caller's own module, and a module that cannot be trained."""
    if model is None:
        return
    if isinstance(model, type):
        raise UserError(
            f"model is the class {model.__name__}, not a module: give {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is {shown(model)}, not a torch.nn.Module: give a module, or name a bundled "
            f"model in config.model"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UserError(
            f"model is wrapped in {type(model).__name__}, but training sums gradients over workers "
            f"itself: give the module inside, model.module"
        )
    for name, layer in model.named_modules():
        # A graph of torch.jit's hides which layers it has: its batch norm would see other spans,
        # and other statistics on each worker.
        if isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name:
            raise UserError(
                f"the model's {name} is a {layer.original_name} in a graph of torch.jit, whose "
                f"statistics nobody can share: give the module that was scripted or traced"
            )
    for name, weight in model.named_parameters():
        if is_lazy(weight) or weight.is_meta:
            raise UserError(f"the model's {name} has no values yet: call the model on images once")
        if weight.is_inference():
            raise UserError(
                f"the model's {name} was made in torch.inference_mode and cannot be trained: "
                f"make the model outside"
            )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_complex():
            raise UserError(f"the model's {name} is complex: training is in real numbers")
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"the model's {name} is a {type(value).__name__}, and checkpoints hold tensors "
                f"alone: let get_extra_state give a tensor, or keep it elsewhere"
            )


def named_folder(path: Any, name: str) -> Path:
    """A folder of the caller's, by the name of the argument that it came in; refused if none can be
    called so."""
    try:
        text = os.fspath(path)
        possible = isinstance(text, str) and b"\0" not in os.fsencode(text) and text != ""
    except (TypeError, UnicodeEncodeError):
        possible = False
    if not possible:
        raise UserError(f"{name} is {shown(path)}, which is no name of a folder: give another")
    return Path(path)


def whose(config: Config) -> str:
    """The images' name, for people."""
    return "your data set" if config.data.kind == "own" else config.data.path or config.data.source
