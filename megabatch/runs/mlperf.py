"""A run as MLPerf's log lines, which its compliance checker accepts for ResNet in the open division
(rules 4.0 of training, the last that have an image classifier)."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLPerf:
    """A Logger. One file is one session of a run: MLPerf knows no resuming."""

    def __init__(self, path: Path, org: str = "unknown") -> None:
        self._path, self._org = path, org
        self._file: Any = None
        self._made = _now()
        self._block = 0.0
        self._every = 1.0
        self._target: float | None = None

    def begin(self, about: Mapping[str, Any]) -> None:
        if self._file is not None:  # the run goes on with other workers
            return
        config, environment = about["config"], about["environment"]
        self._file = self._path.open("w")
        self._every = config["eval_every"] or config["epochs"]
        self._target = config["target_accuracy"]
        chip = environment.get("gpu") or platform.machine()
        # Nobody here clears the system's caches, and the line must say whether.
        self._line(_POINT, "cache_clear", False)
        self._line(_START, "init_start", None, at=self._made)
        for name, value in {
            "submission_benchmark": "resnet",
            "submission_org": self._org,
            "submission_division": "open",
            "submission_status": "research",
            "submission_platform": f"{about['world']} x {chip}",
            "seed": config["seed"],
            "global_batch_size": config["batch"],
            "train_samples": about["images"],
            "eval_samples": about["held_out"],
            "opt_name": config["optimizer"]["name"],
            "opt_base_learning_rate": config["lr"]["reference"],
            "opt_learning_rate_warmup_epochs": config["lr"]["warmup"],
            "opt_weight_decay": config["optimizer"]["weight_decay"],
        }.items():
            self._line(_POINT, name, value)
        self._line(_END, "init_stop")
        self._line(_START, "run_start")
        self._begin_block(about["seen"] / about["images"])

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        if kind == "evaluating":
            self._line(_END, "block_stop", first_epoch_num=self._block)
            self._line(_START, "eval_start", epoch_num=record["epoch"])
        elif kind == "evaluation":
            epoch = record["epoch"]
            self._line(_POINT, "eval_accuracy", record["top1"], epoch_num=epoch)
            self._line(_END, "eval_stop", epoch_num=epoch)
            self._begin_block(epoch)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if self._file is None:
            return
        self._line(_END, "block_stop", first_epoch_num=self._block)
        self._line(_END, "run_stop", status="success" if self._reached(summary) else "aborted")
        self._file.close()

    def _reached(self, summary: Mapping[str, Any] | None) -> bool:
        if summary is None or summary["ended"] == "stopped":
            return False
        return self._target is None or summary["ended"] == "target"

    def _begin_block(self, epoch: float) -> None:
        self._block = epoch
        self._line(_START, "block_start", first_epoch_num=epoch, epoch_count=self._every)

    def _line(
        self, event: str, key: str, value: Any = None, at: int | None = None, **metadata: Any
    ) -> None:
        record = {
            "namespace": "",
            "time_ms": _now() if at is None else at,
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": {"file": "megabatch", "lineno": 0, **metadata},
        }
        self._file.write(f":::MLLOG {json.dumps(record)}\n")
        self._file.flush()


def _now() -> int:
    return int(time.time() * 1000)
