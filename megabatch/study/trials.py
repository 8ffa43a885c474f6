"""The runs of a study: which there are, what each is called, and what their folders tell.

Every run has a folder of its own inside the study's, so that a study grows by being run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.durable import is_plain, read_plain, write_whole
from megabatch.errors import UserError

RECIPE = "recipe"
"""the arm that changes nothing"""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Trial:
    """One run: the recipe at a batch, with one thing changed or nothing, from one seed."""

    arm: str
    batch: int
    config: Config

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        arm = "" if self.arm == RECIPE else f"{self.arm}-"
        return f"{self.batch}-{arm}s{self.seed}"

    def label(self) -> dict[str, Any]:
        """What its folder says of it beside the config."""
        return {"arm": self.arm, "batch": self.batch, "seed": self.seed}


def trials(configs: Mapping[tuple[str, int], Config], seeds: Sequence[int]) -> list[Trial]:
    """A run for each arm and batch from each seed; all batches from one seed before the next, so
    that a study that is stopped has some of everything."""
    return [
        Trial(arm, batch, replace(config, seed=seed))
        for seed in seeds
        for (arm, batch), config in configs.items()
    ]


def fitted(config: Config) -> Config:
    """The config with passes that its batches are made of: micro at most as it is, by whole
    spans."""
    batches = [stage.batch for stage in config.all_stages]
    for spans in range(max(1, config.micro // config.span), 0, -1):
        micro = spans * config.span
        if all(batch % micro == 0 for batch in batches):
            return replace(config, micro=micro)
    return config


# --- what folders tell ---------------------------------------------------------------------------


def write_label(folder: Path, trial: Trial, failure: str | None = None) -> None:
    record = trial.label() | ({"failure": failure} if failure is not None else {})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "trial.json", (json.dumps(record, indent=2) + "\n").encode())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none."""
    if not is_plain(path):
        return {}
    try:
        found = json.loads(read_plain(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def state(folder: Path, trial: Trial) -> str:
    """new, begun, finished or failed; an error where the folder holds another run."""
    written = folder / "config.json"
    if not is_plain(written):
        return "failed" if "failure" in read_object(folder / "trial.json") else "new"
    difference = Config.read(written).resume_difference(trial.config)
    if difference is not None:
        raise UserError(
            f"{folder} was begun with {difference}: give the same settings, or name another --out"
        )
    if read_object(folder / "summary.json").get("ended") in ("finished", "target"):
        return "finished"
    return "failed" if "failure" in read_object(folder / "trial.json") else "begun"


def folders(study: Path) -> Iterator[Path]:
    """The folders of a study's runs."""
    for path in sorted(study.iterdir()) if study.is_dir() else ():
        if is_plain(path / "trial.json"):
            yield path


def total_images(some: Iterable[Trial], images: int) -> float:
    return sum(trial.config.epochs * images for trial in some)
