"""Arms: what a study switches, one thing at a time. Each is a change of the config, with a sentence
that says what it shows.

`NAME=FLAGS` on the command line makes an arm of any flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megabatch.config import Config

Change = Callable[[Config], Config]


@dataclass(frozen=True)
class Arm:
    change: Change
    says: str


def _lr(config: Config, **changed: object) -> Config:
    return replace(config, lr=replace(config.lr, **changed))  # type: ignore[arg-type]


def _optimizer(config: Config, **changed: object) -> Config:
    return replace(config, optimizer=replace(config.optimizer, **changed))  # type: ignore[arg-type]


ARMS: dict[str, Arm] = {
    "no_warmup": Arm(lambda c: _lr(c, warmup=0.0), "the full rate from the first step (Goyal)"),
    "no_smoothing": Arm(lambda c: replace(c, label_smoothing=0.0), "labels as they are"),
}
