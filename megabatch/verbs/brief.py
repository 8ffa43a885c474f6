"""A recipe's flags on one screen: those most used with their values, the others by name."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from megabatch.config import Config
from megabatch.verbs.examples import show_examples

# What a first-time user asks for, in a few words; --help-all has all of them in full.
MOST_USED = {
    "workers": "local; 2,4: by batch stage, the last for the rest",
    "out": "the run's folder",
    "resume": "go on from the newest checkpoint in --out",
    "epochs": "passes over the images; stretches the recipe",
    "batch": "images of one step, over all workers",
    "micro": "images in one pass on a device",
    "model": "megabatch train --help lists them",
    "init": "first weights: a file, or pretrained",
    "data.path": "a folder (train/CLASS/*) or a pack",
    "data.size": "side of what the model sees, in pixels",
    "data.channels": "1 grey, 3 colour",
    "lr.reference": "the rate that is right for lr.per images",
    "precision": "fp32, bf16, fp16 or fp64",
    "deterministic": "the same bits on any number of workers",
}
_WIDE = 80


def show_brief(words: str, launch: Any, config: Config) -> None:
    """The help of `megabatch train RECIPE`, with the recipe's values."""
    show_examples("train")
    print(f"usage: megabatch {words} [OPTIONS]   (--help-all explains them)\n")
    for name, says in MOST_USED.items():
        print(f"  {_flag(name) + _value(name, launch, config):29} {says}"[:_WIDE].rstrip())
    print("\nthe others, by section:")
    sections = [one.name for one in dataclasses.fields(config) if _is_section(config, one.name)]
    _show("", [*_rest(launch), *(n for n in _rest(config) if n not in sections)])
    for section in sections:
        names = _rest(getattr(config, section), f"{section}.")
        _show(f"{section}.", [name.removeprefix(f"{section}.") for name in names])


def _is_section(config: Config, name: str) -> bool:
    return dataclasses.is_dataclass(getattr(config, name))


def _rest(section: Any, prefix: str = "") -> list[str]:
    names = (f"{prefix}{one.name}" for one in dataclasses.fields(section))
    return [name for name in names if name not in MOST_USED]


def _show(prefix: str, names: list[str]) -> None:
    words = " ".join(name.replace("_", "-") for name in names)
    lines = f"  --{prefix}*  {words}"
    print(textwrap.fill(lines, _WIDE, subsequent_indent=" " * 6, break_on_hyphens=False))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(name: str, launch: Any, config: Config) -> str:
    holder: Any = launch if hasattr(launch, name) else config
    for part in name.split("."):
        holder = getattr(holder, part)
    bare = isinstance(holder, bool) or holder is None or holder == ""
    return "" if bare else f" {holder}"
