"""A recipe's flags on one screen: those most used with their values, the others by section."""

from __future__ import annotations

from typing import Any

from megabatch.config import Config

# What a first-time user asks for, in a few words; --help-all has all of them in full.
MOST_USED = {
    "workers": "local ones; 2,4: so many in each batch stage",
    "out": "the run's folder",
    "resume": "go on from the newest checkpoint in --out",
    "epochs": "passes over the images; stretches the recipe",
    "batch": "images of one step, over all workers",
    "micro": "images in one pass on a device",
    "model": "megabatch train --help lists them",
    "data.path": "a folder (train/CLASS/*) or a pack",
    "data.size": "side of what the model sees, in pixels",
    "data.channels": "1 grey, 3 colour",
    "lr.reference": "the rate that is right for lr.per images",
    "precision": "fp32, bf16, fp16 or fp64",
    "deterministic": "the same bits on any number of workers",
}
SECTIONS = {
    "data": "what is held out, crops, flips, colours, who decodes",
    "lr": "warm-up, decay, drops",
    "optimizer": "SGD, LARS, LAMB, Muon: momentum, weight decay, trust",
    "noise": "a batch that follows the gradient's noise",
}
OTHERS = ("init", "seed", "stages", "eval_every", "save_every", "keep_best", "plan", "hybrid.*")


def show_brief(words: str, launch: Any, config: Config) -> None:
    """The help of `megabatch train RECIPE`, with the recipe's values."""
    enough = "--epochs 5 --workers 2" if config.data.kind == "digits" else "--data.path FOLDER"
    print(f"example:\n  megabatch {words} {enough} --out runs/mine\n")
    print(f"usage: megabatch {words} [OPTIONS]")
    for name, says in MOST_USED.items():
        print(f"  {_flag(name) + _value(name, launch, config):24} {says}")
    print("and more, all of which --help-all explains:")
    for name, says in SECTIONS.items():
        print(f"  --{name + '.*':22} {says}")
    print("  " + " ".join(map(_flag, OTHERS)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(name: str, launch: Any, config: Config) -> str:
    holder: Any = launch if hasattr(launch, name) else config
    for part in name.split("."):
        holder = getattr(holder, part)
    bare = isinstance(holder, bool) or holder is None or holder == ""
    return "" if bare else f" {holder:g}" if isinstance(holder, float) else f" {holder}"
