"""Beginning from somebody's weights: a safetensors file with this model's names (torchvision's, for
ResNets); a head of another number of classes is made anew."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from megabatch.errors import UserError


def load_initial(net: nn.Module, path: str) -> list[str]:
    """Load weights into a module; returns the names that keep their fresh values: the head's."""
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}: --init takes a safetensors file")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as safetensors ({error}): check the file"
        ) from error
    own = net.state_dict()
    head = _head(net)
    fresh = [name for name in head if name in found and found[name].shape != own[name].shape]
    for name in own:
        if name not in found and not name.endswith("num_batches_tracked"):
            raise UserError(f"{path} has no weight {name}: it is of another model than this run's")
        if name in found and name not in fresh and found[name].shape != own[name].shape:
            raise UserError(
                f"{name} has shape {tuple(found[name].shape)} in {path} but "
                f"{tuple(own[name].shape)} in this run's model: only the head may differ"
            )
    unknown = sorted(found.keys() - own.keys())
    if unknown:
        raise UserError(f"{path} holds {unknown[0]}, which this run's model does not have")
    with torch.no_grad():
        for name, tensor in own.items():
            if name in found and name not in fresh:
                tensor.copy_(found[name])
    return fresh


def _head(net: nn.Module) -> list[str]:
    """The parameters of the last linear layer."""
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    return [f"{linear[-1]}.weight", f"{linear[-1]}.bias"] if linear else []
