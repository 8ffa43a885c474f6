"""The folder of a run: config.json, environment.json, metrics.jsonl, checkpoints, summary.json.

Without a folder nothing is written. All workers read it; only the first writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.noise import NoiseScale, following_batch
from megabatch.runs import checkpoint
from megabatch.runs.alive import mark
from megabatch.runs.checkpoint import Saved
from megabatch.runs.loggers import drop_after, environment
from megabatch.sync.control import StepNumbers


@dataclass
class State:
    """Where a run stands; with the parts' tensors, all that the rest of it depends on."""

    seen: int = 0
    steps: int = 0
    batch: int | None = None
    """the present batch, where it follows the noise"""
    proposed: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    pending: list[Any] = field(default_factory=list)
    """numbers of the last step, not yet read"""
    evaluation: dict[str, float] = field(
        default_factory=lambda: {"top1": 0.0, "top5": 0.0, "loss": float("nan")}
    )
    best_top1: float = 0.0
    last_top1s: list[float] = field(default_factory=list)
    """of the last evaluations, five at most"""
    seconds: float = 0.0
    skipped: int = 0
    """steps in a row, up to the last one read, that did not count"""

    def learn(self, numbers: StepNumbers, config: Config) -> None:
        """Take in a step's numbers: whether it counted, the noise scale, the batch that follows
        it."""
        self.skipped = self.skipped + 1 if numbers.skipped else 0
        batch, micro = numbers.step.batch, config.micro
        self.noise.update(
            numbers.squares, numbers.gradient_square, batch // micro, micro, config.noise.memory
        )
        if config.noise.follow:
            self.batch = numbers.batch or batch
            self.proposed = following_batch(config, self.batch, self.noise.scale)

    def evaluated(self, evaluation: dict[str, float]) -> None:
        """Take in an evaluation: the last, perhaps the best, one of the last five."""
        self.evaluation = evaluation
        self.best_top1 = max(self.best_top1, evaluation["top1"])
        self.last_top1s = [*self.last_top1s, evaluation["top1"]][-5:]

    @staticmethod
    def of(saved: dict[str, Any]) -> State:
        return State(**{**saved, "noise": NoiseScale(**saved["noise"])})


class RunFolder:
    def __init__(self, path: Path | None, config: Config, cluster: Cluster) -> None:
        self.path, self._config, self._cluster = path, config, cluster
        self._writes = path is not None and cluster.first

    def begin(self, resume: bool, saved: Saved) -> State:
        """The state a run begins with: nothing seen, or the newest good checkpoint's."""
        if self.path is None:
            if resume:
                raise UserError("resume was asked for but no run folder was named: give out")
            return State()
        found = self._cluster.agree(lambda: self._open(resume))
        state = State()
        if found is not None:
            state = State.of(checkpoint.load(found, saved))
        if self._writes:
            drop_after(self.path / "metrics.jsonl", state.seen, state.steps - len(state.pending))
        return state

    def _open(self, resume: bool) -> Path | None:
        assert self.path is not None
        written = self.path / "config.json"
        if written.exists() and not resume:
            raise UserError(
                f"{self.path} holds a run already: add --resume to go on with it, "
                f"or name another --out"
            )
        if written.exists():
            self._same_run(Config.read(written))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            written.write_text(self._config.to_json())
            _write_json(self.path / "environment.json", {**environment(), "process": mark()})
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be written: {error.strerror}"
            ) from error
        return checkpoint.newest(self.path / "checkpoints")

    def _same_run(self, before: Config) -> None:
        difference = before.resume_difference(self._config)
        if difference is not None:
            raise UserError(
                f"{self.path} was begun with {difference}: resume with the same settings, or name "
                f"another --out"
            )

    def save(self, state: State, saved: Saved, seconds: float) -> None:
        """Write a checkpoint; `seconds` is how long the run has taken so far."""
        state.seconds = seconds
        if self._writes:
            assert self.path is not None
            checkpoint.save(self.path / "checkpoints", saved, asdict(state), self._config.keep)

    def write(self, name: str, record: dict[str, Any]) -> None:
        if self._writes:
            assert self.path is not None
            _write_json(self.path / name, record)

    @property
    def for_log(self) -> Path | None:
        return self.path if self._writes else None


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
