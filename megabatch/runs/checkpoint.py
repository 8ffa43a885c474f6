"""Checkpoints: a folder of safetensors and JSON, written aside, synced, then renamed into place.

A checkpoint holds everything the rest of the run depends on, and a manifest of its files' sizes and
checksums, itself checked; the newest good one is taken. All workers hold the same state, so one of
them writes, from a snapshot, while training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from megabatch.errors import UserError, printable
from megabatch.host.durable import open_plain, read_plain, remove, sync, write

WEIGHTS = "model.safetensors"
CHECKPOINTS, BEST = "checkpoints", "best"
"""folders of a run"""
_OPTIMIZER, _EXTRA, _STATE = "optimizer.safetensors", "extra.safetensors", "state.json"
_MANIFEST = "manifest.json"
# Bytes at most: a folder of somebody else's may hold anything.
_MOST = {WEIGHTS: 64 << 30, _OPTIMIZER: 64 << 30, _EXTRA: 64 << 30, _STATE: 64 << 20}
_MOST_MANIFEST = 64 << 10


class Saved(Protocol):
    """What a checkpoint holds of a run: a module, its optimizer, and tensors that are neither's."""

    @property
    def net(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


class Snapshot:
    """A copy of what a checkpoint holds, as it is now: the run goes on, the copy is written.

    On a GPU the copy is made there, in the time of reading the state once; whoever writes it brings
    it to the host, on a stream of its own.
    """

    def __init__(self, saved: Saved) -> None:
        tensors, self.rest = _split(saved.optimizer.state_dict())
        held = {WEIGHTS: saved.net.state_dict(), _OPTIMIZER: tensors, _EXTRA: saved.tensors()}
        self._files = {name: _copies(tensors) for name, tensors in held.items()}
        on_gpu = any(t.is_cuda for tensors in self._files.values() for t in tensors.values())
        self._copied = torch.cuda.current_stream().record_event() if on_gpu else None

    def on_host(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files; from any thread."""
        tensors = self._files[name]
        if self._copied is None:
            return tensors
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        side = torch.cuda.Stream(device)
        side.wait_event(self._copied)
        with torch.cuda.stream(side):
            return {name: tensor.cpu() for name, tensor in tensors.items()}


def save(folder: Path, saved: Saved, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint of what is held now."""
    return write_snapshot(folder, Snapshot(saved), state, keep)


def write_snapshot(
    folder: Path, snapshot: Snapshot, state: dict[str, Any], keep: int, anew: bool = False
) -> Path:
    """Write a checkpoint named by state["seen"], which is JSON; the newest `keep` up to it stay.

    A good one of that name stays as it is, unless `anew`: a run that went no further has nothing
    new to save.
    """
    final = folder / f"seen-{state['seen']:012d}"
    partial = folder / f".{final.name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".seen-*"):  # by one that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    if final.exists() and not anew and _fault(final) is None:
        return final
    try:
        _write(partial, snapshot, state)
        if final.exists():
            remove(final)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk its space is wanted
        raise
    sync(folder)
    # Newer ones are damaged, or the run would have gone on from there: they do not count.
    for old in [path for path in _newest_first(folder) if seen(path) <= seen(final)][keep:]:
        remove(old)
    return final


def write_alone(folder: Path, snapshot: Snapshot, state: dict[str, Any]) -> Path:
    """The same, but it alone stays, whichever are newer: those are of a run that was resumed from
    before them."""
    final = write_snapshot(folder, snapshot, state, keep=sys.maxsize, anew=True)
    for other in _newest_first(folder):
        if other != final:
            remove(other)
    return final


def of_run(run: Path, best: bool = False) -> Path:
    """The newest good checkpoint of a run, or its best; a UserError where there is none."""
    found = newest(run / (BEST if best else CHECKPOINTS))
    if found is None:
        hint = ": --keep-best keeps one in training" if best else ": let it train on, by --resume"
        if (run / "trial.json").exists():
            hint = ": a study leaves weights with --keep-checkpoints alone"
        raise UserError(f"{run} has no {'best' if best else 'good'} checkpoint{hint}")
    return found


def _write(partial: Path, snapshot: Snapshot, state: dict[str, Any]) -> None:
    partial.mkdir()
    entries = {}
    for name in (WEIGHTS, _OPTIMIZER, _EXTRA):
        entries[name] = _put(partial / name, safetensors.torch.save(snapshot.on_host(name)))
    record = json.dumps({"state": state, "optimizer": snapshot.rest}, indent=2) + "\n"
    entries[_STATE] = _put(partial / _STATE, record.encode())
    write(partial / _MANIFEST, _manifest(entries))
    sync(partial)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are left out, and that is said."""
    for path in _newest_first(folder):
        fault = _fault(path)
        if fault is None:
            return path
        warning = printable(f"megabatch: the checkpoint {path} is left out: {fault}")
        print(warning, file=sys.stderr)
    return None


def seen(path: Path) -> int:
    """How many images the run had seen at a checkpoint."""
    return int(path.name.removeprefix("seen-"))


def load_weights(path: Path, module: nn.Module) -> None:
    with fitting(path):
        module.load_state_dict(_tensors(path, WEIGHTS))


def load_extra(path: Path) -> dict[str, Tensor]:
    with fitting(path):
        return _tensors(path, _EXTRA)


def load(path: Path, saved: Saved) -> dict[str, Any]:
    """Restore all of it; returns the state the checkpoint was saved with."""
    load_weights(path, saved.net)
    with fitting(path):
        record = json.loads(read_plain(path / _STATE, _MOST[_STATE]))
        state: dict[str, Any] = record["state"]
        joined = _join(_tensors(path, _OPTIMIZER), record["optimizer"])
        _check_optimizer(saved.optimizer, joined)
        saved.optimizer.load_state_dict(joined)
        saved.load(load_extra(path))
        if state["seen"] != seen(path):
            raise ValueError(f"it says that {state['seen']} images were seen")
    return state


@contextlib.contextmanager
def fitting(path: Path) -> Iterator[None]:
    """A good checkpoint may still be another run's, or made up: what does not fit is said so."""
    try:
        yield
    except UserError:
        raise
    except (
        OSError, SafetensorError, RecursionError, RuntimeError, ArithmeticError,
        ValueError, TypeError, LookupError, AttributeError,
    ) as error:  # fmt: skip
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"the checkpoint {path} does not fit this run ({type(error).__name__}: {words}): "
            f"give the run that it is of, with the model it was trained with, or remove it"
        ) from error


def _check_optimizer(optimizer: torch.optim.Optimizer, joined: dict[str, Any]) -> None:
    """torch takes any state of the right number of parameters: types and shapes are ours to
    check."""
    own = optimizer.state_dict()["param_groups"]
    for mine, theirs in zip(own, joined["param_groups"], strict=True):
        for name, value in mine.items():
            if _kind(theirs[name]) != _kind(value) or (name == "params" and theirs[name] != value):
                raise ValueError(f"the optimizer's {name} is {theirs[name]!r:.60}")
        if theirs.keys() != mine.keys():
            raise ValueError("the optimizer's groups have other settings")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, entries in joined["state"].items():
        for name, value in entries.items():
            if index < 0 or not (isinstance(value, Tensor) or _kind(value) in (float, bool)):
                raise ValueError(f"the optimizer's {name} of parameter {index} is {value!r:.60}")
            if isinstance(value, Tensor) and value.ndim and value.shape != weights[index].shape:
                raise ValueError(f"the optimizer's {name} of parameter {index} has another shape")


def _kind(value: Any) -> type:
    """Of JSON's kinds: a tuple comes back as a list, and 0.0 may have been 0."""
    numbers = isinstance(value, int | float) and not isinstance(value, bool)
    return float if numbers else list if isinstance(value, tuple) else type(value)


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


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Each its own: safetensors refuses tensors that share storage.
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _newest_first(folder: Path) -> Iterator[Path]:
    """Checkpoints by their names: folders, not links to some."""
    if not folder.is_dir() or folder.is_symlink():
        return
    found = [path for path in folder.iterdir() if re.fullmatch(r"seen-[0-9]{12,18}", path.name)]
    yield from sorted((p for p in found if not p.is_symlink()), key=seen, reverse=True)


def _fault(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted; None when it can."""
    try:
        written = read_plain(path / _MANIFEST, _MOST_MANIFEST)
        entries = json.loads(written)["files"]
        # Made anew from what it says, so that no byte of it goes unchecked.
        if not isinstance(entries, dict) or _manifest(entries) != written:
            return f"the checksum of {_MANIFEST} does not agree"
        if entries.keys() != _MOST.keys():
            return f"{_MANIFEST} does not name the files of a checkpoint"
        for name, most in _MOST.items():
            with open_plain(path / name, min(most, entries[name]["nbytes"])) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if {"nbytes": file.tell(), "sha256": found} != entries[name]:
                    return f"the checksum of {name} does not agree"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _put(path: Path, data: bytes) -> dict[str, Any]:
    """Write one file; returns its entry in the manifest."""
    write(path, data)
    return {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _manifest(entries: dict[str, Any]) -> bytes:
    """The entries, and their own checksum."""
    own = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    record = {"files": entries, "sha256": own}
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    open_plain(path / name, _MOST[name]).close()
    found: dict[str, Tensor] = safetensors.torch.load_file(path / name)
    return found
