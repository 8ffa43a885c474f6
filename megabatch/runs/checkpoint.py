"""Checkpoints: a folder of safetensors and JSON, written aside, synced, then renamed into place.

A checkpoint holds everything the rest of the run depends on; its checksums are verified before it
is used, and the newest good one is taken. All workers hold the same state, so one of them writes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megabatch.durable import sync

_WEIGHTS, _OPTIMIZER, _EXTRA = "model.safetensors", "optimizer.safetensors", "extra.safetensors"
_STATE = "state.json"


class Saved(Protocol):
    """What a checkpoint holds of a run: a module, its optimizer, and tensors that are neither's."""

    @property
    def net(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


def save(folder: Path, saved: Saved, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint named by state["seen"], which is JSON; the newest `keep` stay."""
    final = folder / f"seen-{state['seen']:012d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors, rest = _split(saved.optimizer.state_dict())
    save_file(_contiguous(saved.net.state_dict()), partial / _WEIGHTS)
    save_file(_contiguous(tensors), partial / _OPTIMIZER)
    save_file(_contiguous(saved.tensors()), partial / _EXTRA)
    sums = {name: _checksum(partial / name) for name in (_WEIGHTS, _OPTIMIZER, _EXTRA)}
    record = {"state": state, "optimizer": rest, "sha256": sums}
    (partial / _STATE).write_text(json.dumps(record, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync(folder)
    for old in list(_newest_first(folder))[keep:]:
        shutil.rmtree(old)
    return final


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are left out, and that is said."""
    for path in _newest_first(folder):
        fault = _fault(path)
        if fault is None:
            return path
        print(f"megabatch: the checkpoint {path} is left out: {fault}", file=sys.stderr)
    return None


def seen(path: Path) -> int:
    """How many images the run had seen at a checkpoint."""
    return int(path.name.removeprefix("seen-"))


def load_weights(path: Path, module: nn.Module) -> None:
    module.load_state_dict(load_file(path / _WEIGHTS))


def load_extra(path: Path) -> dict[str, Tensor]:
    return load_file(path / _EXTRA)


def load(path: Path, saved: Saved) -> dict[str, Any]:
    """Restore all of it; returns the state the checkpoint was saved with."""
    record = json.loads((path / _STATE).read_text())
    load_weights(path, saved.net)
    saved.optimizer.load_state_dict(_join(load_file(path / _OPTIMIZER), record["optimizer"]))
    saved.load(load_extra(path))
    state: dict[str, Any] = record["state"]
    return state


def weights_sha256(module: nn.Module) -> str:
    """A fingerprint of all parameters and buffers: names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict as tensors by "parameter.name", and the rest, which is JSON."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, {"numbers": numbers, "param_groups": state["param_groups"]}


def _join(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["numbers"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": rest["param_groups"]}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Clones, because safetensors refuses tensors that share storage.
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("seen-*"), reverse=True)


def _fault(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted; None when it can."""
    try:
        sums = json.loads((path / _STATE).read_text())["sha256"]
        bad = [name for name, wanted in sums.items() if _checksum(path / name) != wanted]
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return f"the checksum of {bad[0]} does not agree" if bad else None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
