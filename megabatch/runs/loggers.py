"""Who hears of a run: the Logger protocol, and our own that write metrics.jsonl and TensorBoard's.

A logger watches a run and cannot change it: it is told on the first worker alone, in copies that
are read-only, and one of a caller's that fails is heard of once and then left alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megabatch.errors import UserError

Fields = Mapping[str, Any]
_KEPT = ("train", "evaluation", "waits", "layer")
"""what metrics.jsonl holds"""


class Logger(Protocol):
    """Whoever wants to hear of a run, on its first worker. What it is given it may keep but not
    change; what takes long in it, the run waits for."""

    def begin(self, about: Fields) -> None:
        """Before the first step: config and environment, images and held_out (how many), seen and
        steps (more than 0 where the run goes on), world (workers) and out (its folder or None).
        Again where the run goes on with other workers because one was lost."""

    def write(self, kind: str, record: Fields) -> None:
        """`kind` train: a step's numbers, told a step later; evaluating: one begins; evaluation:
        its result; waits: where an epoch's time went; layer: a trust ratio. Each record has step
        and seen, the images so far."""

    def end(self, summary: Fields | None) -> None:
        """The last call: how the run ended, as train returns it; None where it failed."""


class JsonLines:
    """metrics.jsonl: an object a line, with its kind."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def begin(self, about: Fields) -> None:
        """What a run begins with stands in files of its own."""

    def write(self, kind: str, record: Fields) -> None:
        if kind in _KEPT:
            self._file.write(json.dumps({"kind": kind, **finite(record)}) + "\n")
            self._file.flush()

    def end(self, summary: Fields | None) -> None:
        self._file.close()


# Where a number stands on TensorBoard's page, by kind and name; others by their kind.
_PLACES = {
    ("train", "lr"): "schedule/rate",
    ("train", "batch"): "schedule/batch",
    ("train", "momentum"): "schedule/momentum",
    ("train", "epoch"): "schedule/epoch",
    ("train", "images_per_second"): "speed/images_per_second",
    ("train", "gradient_norm"): "gradient/norm",
    ("train", "noise_scale"): "gradient/noise_scale",
    ("train", "loss_scale"): "precision/loss_scale",
    ("train", "skipped"): "precision/skipped",
    ("evaluation", "top1"): "val/top1",
    ("evaluation", "top5"): "val/top5",
    ("evaluation", "loss"): "val/loss",
    ("layer", "ratio"): "trust_ratio",
    ("layer", "weight_norm"): "weight_norm",
    ("layer", "gradient_norm"): "gradient_norm",
}
_NOT_DRAWN = ("step", "seen", "name")
_DRAWN_EVERY = 0.5
"""seconds: a step of some milliseconds would wait for its dozen points"""


class TensorBoard:
    """TensorBoard's files, with images seen as its step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, contextlib.ExitStack()
        self._drawn = -math.inf
        self._waiting: Fields | None = None

    def begin(self, about: Fields) -> None:
        """Its page has no place for it."""

    def write(self, kind: str, record: Fields) -> None:
        if kind not in _KEPT or (kind == "evaluation" and not record):
            return
        if kind == "train" and time.monotonic() - self._drawn < _DRAWN_EVERY:
            self._waiting = record
        else:
            self._draw(kind, record)

    def _draw(self, kind: str, record: Fields) -> None:
        if kind == "train":
            self._drawn, self._waiting = time.monotonic(), None
        for name, value in finite(record).items():
            if name in _NOT_DRAWN or value is None or (kind, name) == ("evaluation", "epoch"):
                continue
            place = _PLACES.get((kind, name), f"{kind}/{name}")
            tag = f"{place}/{record['name']}" if "name" in record else place
            self._board.add_scalar(tag, value, record["seen"])

    @functools.cached_property
    def _board(self) -> Any:
        """Loaded when there is something to draw: it would hold up the first step."""
        from torch.utils.tensorboard import SummaryWriter

        self._open.enter_context(_failures_said_once())
        board = SummaryWriter(self._folder)
        self._open.callback(board.close)
        return board

    def end(self, summary: Fields | None) -> None:
        with self._open:
            if self._waiting is not None:
                self._draw("train", self._waiting)


@contextlib.contextmanager
def _failures_said_once() -> Iterator[None]:
    """A disk that fails TensorBoard's thread is said where the thread is next given something, or
    closed: as a traceback of its own it need not be."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        theirs = type(failed.thread).__module__.startswith("tensorboard.")
        if not (theirs and isinstance(failed.exc_value, OSError)):
            before(failed)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:
            threading.excepthook = before


def finite(record: Fields) -> dict[str, Any]:
    """A copy with None for infinities and nan, which JSON has no word for."""
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return finite(value)
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Theirs:
    """A caller's logger: given copies, and left alone from its first failure on."""

    def __init__(self, logger: Logger, say: Callable[[str], None]) -> None:
        self._logger, self._say = logger, say
        self._well, self._begun = True, False

    def begin(self, about: Fields) -> None:
        self._begun = True
        self._tell("begin", lambda: self._logger.begin(_frozen(about)))

    def write(self, kind: str, record: Fields) -> None:
        self._tell("write", lambda: self._logger.write(kind, _frozen(record)))

    def end(self, summary: Fields | None) -> None:
        if not self._begun:  # not on the first worker, or nothing came of the run
            return
        self._tell("end", lambda: self._logger.end(None if summary is None else _frozen(summary)))

    def _tell(self, call: str, tell: Callable[[], None]) -> None:
        if not self._well:
            return
        try:
            tell()
        except Exception as error:
            self._well = False
            words = " ".join(str(error).split())[:200]
            self._say(
                f"the logger {type(self._logger).__name__} failed in {call} "
                f"({type(error).__name__}: {words}): it hears no more, and the run goes on"
            )


def check_loggers(loggers: Iterable[Any]) -> list[Logger]:
    """The loggers; what is none is refused before anything is begun."""
    if not isinstance(loggers, Iterable):
        raise UserError(f"loggers is a {type(loggers).__name__}: give a list, loggers=[...]")
    given = list(loggers)
    for one in given:
        if isinstance(one, type):
            raise UserError(f"the logger {one.__name__} is a class: give {one.__name__}()")
        for method in ("begin", "write", "end"):
            if not callable(getattr(one, method, None)):
                raise UserError(
                    f"the logger {type(one).__name__} has no method {method}: a logger has begin, "
                    f"write and end"
                )
    return given


def _frozen(record: Fields) -> Fields:
    return MappingProxyType(copy.deepcopy(dict(record)))
