"""The folder of a run: config.json, environment.json, metrics.jsonl, checkpoints, summary.json.

Without a folder nothing is written. All workers read it; only the first writes, and it holds the
folder's lock while it does. Checkpoints are written beside the run, one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.errors import RunFailed, UserError
from megabatch.host.durable import is_plain, lock, read_plain, write_whole
from megabatch.noise import NoiseScale, following_batch
from megabatch.own import whose
from megabatch.runs import checkpoint
from megabatch.runs.alive import mark
from megabatch.runs.background import Background
from megabatch.runs.begun import check_classes, check_place, written_classes
from megabatch.runs.checkpoint import Saved, Snapshot
from megabatch.runs.log import drop_after, environment
from megabatch.runs.loggers import finite
from megabatch.sync.control import StepNumbers
from megabatch.sync.replicas import Comparison


@dataclass
class State:
    """Where a run stands; with the parts' tensors, all that the rest of it depends on."""

    seen: int = 0
    steps: int = 0
    images: int | None = None
    """that are trained on: the clock and the order count them; None: the run was begun before this
    was kept"""
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
    evaluated_at: int = -1
    """images seen at the last evaluation in this world of workers or one before; -1: none"""
    settled: int = 0
    """steps after which all that was due (evaluation, checkpoint) is done"""
    best_at: int = -1
    """images seen at the evaluation whose checkpoint is kept as the best; -1: none"""
    seconds: float = 0.0
    training_seconds: float = 0.0
    """of these, without evaluations and checkpoints"""
    worker_seconds: float | None = 0.0
    """the same for all workers together, however many there were at each time; None: the run was
    begun before this was counted"""
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
            # What was proposed last: this step's batch is from before it, and two proposals in
            # turn, one for every other step, would each wait for the scale to reach an edge.
            self.proposed = following_batch(config, self.proposed or self.batch, self.noise.scale)

    def beaten_by(self, evaluation: dict[str, float]) -> bool:
        """Whether it is the best so far; the first one is, also with nothing right."""
        return not self.last_top1s or evaluation["top1"] > self.best_top1

    def evaluated(self, evaluation: dict[str, float]) -> None:
        """Take in an evaluation: the last, perhaps the best, one of the last five."""
        self.evaluation, self.evaluated_at = evaluation, self.seen
        self.best_top1 = max(self.best_top1, evaluation["top1"])
        self.last_top1s = [*self.last_top1s, evaluation["top1"]][-5:]

    @staticmethod
    def of(saved: dict[str, Any], stages: int) -> State:
        """What a checkpoint of a run with so many stages holds; an error where that can be no
        run's."""
        # A checkpoint was always made when all that was due was done, also before it said so; nor
        # did it always say how long training alone had taken, and on how many workers.
        since: dict[str, Any] = {"settled": saved["steps"], "worker_seconds": None}
        since["training_seconds"] = saved.get("seconds", 0.0)
        state = State(**{**since, **saved, "noise": NoiseScale(**saved["noise"])})
        counts = [state.seen, state.steps, state.settled, state.proposed, state.skipped]
        counts += [state.batch or 0, state.images or 0]
        seconds = state.seconds, state.training_seconds, state.worker_seconds or 0.0
        numbers = (*asdict(state.noise).values(), *seconds, *state.evaluation.values())
        numbers = (*numbers, state.best_top1, *state.last_top1s)
        steps = [Step(**step) for step, _ in state.pending]
        pending = [number for _, row in state.pending for number in row]
        if not (
            all(type(count) is int and count >= 0 for count in counts)
            and all(type(at) is int and at >= -1 for at in (state.evaluated_at, state.best_at))
            and all(type(number) in (int, float) for number in (*numbers, *pending))
            and all(map(math.isfinite, (*seconds, state.best_top1, *state.last_top1s)))
            and state.evaluation.keys() == State().evaluation.keys()
            and all(len(row) == len(fields(StepNumbers)) - 1 for _, row in state.pending)
            and all(row[_SCALE] > 0 for _, row in state.pending)
            and all(type(n) is int and n >= 0 for s in steps for n in (s.index, s.seen, s.stage))
            and all(type(s.batch) is int and s.batch > 0 and s.stage < stages for s in steps)
            and all(type(s.epoch) in (int, float) for s in steps)
        ):
            raise ValueError("its state has values that no run has")
        return state


_SCALE = [one.name for one in fields(StepNumbers)].index("loss_scale") - 1
"""where the loss scale stands in a waiting step's numbers"""
_OTHERS_SECONDS = 5.0
"""the workers of a run that was killed need a moment to end"""


class RunFolder:
    """A context: whoever leaves it lets go of the folder, and a disk that fails is said so."""

    def __init__(self, path: Path | None, config: Config, cluster: Cluster) -> None:
        self.path, self._config, self._cluster = path, config, cluster
        self._writes = path is not None and cluster.first
        self._lock: FileIO | None = None
        self._background = Background()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self._background.close()
        finally:
            if self._lock is not None:
                self._lock.close()
        if self._writes and isinstance(error, OSError) and self._is_ours(error):
            raise self._cannot(error) from error

    def _is_ours(self, error: OSError) -> bool:
        """Whether it is this folder that cannot be written, and not something else read."""
        # Only writing fails of these.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
        named, place = error.filename, os.fspath(self.path or "")
        return full or (isinstance(named, str | bytes) and os.fsdecode(named).startswith(place))

    def begin(
        self,
        resume: bool,
        saved: Saved,
        held: State | None = None,
        begun: Callable[[], object] = lambda: None,
        *,
        images: int | None = None,
        classes: Sequence[str] = (),
    ) -> State:
        """The state a run begins with: nothing seen, or the newest good checkpoint's, or what its
        workers hold of it. `begun` is called before the folder is first written to. A run goes on
        with as many `images` to train on as it began with, of the same `classes`, where they have
        names."""
        if self.path is None:
            if resume:
                raise UserError("resume was asked for but no run folder was named: give out")
            begun()
            return held or State(images=images)
        found = self._cluster.agree(lambda: self._open(resume, begun, classes))
        state = held or State()
        if found is not None and held is None:
            with checkpoint.fitting(found):
                state = State.of(checkpoint.load(found, saved), len(self._config.all_stages))
        if None not in (state.images, images) and state.images != images:
            raise UserError(
                f"{self.path} was begun with {state.images:,} images to train on, and there are "
                f"{images:,} now: their order and the run's length follow from how many they are; "
                f"bring back those it had, or name another --out"
            )
        state.images = images
        if self._writes:
            # What is due after the last step will be done again.
            evaluated = state.seen if state.settled == state.steps else state.seen - 1
            drop_after(self.path / "metrics.jsonl", evaluated, state.steps - len(state.pending))
        return state

    def _open(
        self, resume: bool, begun: Callable[[], object], classes: Sequence[str]
    ) -> Path | None:
        assert self.path is not None
        written, config = self.path / "config.json", self._config.to_json()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            check_place(self.path, self._config, resume or self._relaunched())
            metrics = self.path / "metrics.jsonl"
            if metrics.exists() and not is_plain(metrics):
                raise UserError(f"{metrics} is not a plain file: remove it")
            found = checkpoint.newest(self.path / "checkpoints")
            # A run that has not learnt anything yet may begin with others.
            known = written_classes(self.path) if found is not None and classes else None
            if known is not None:
                check_classes(self.path, known, list(classes), whose(self._config))
            begun()
            if not written.exists() or written.read_text() != config:
                write_whole(written, config.encode())
            environs = {**environment(), "world": self._cluster.world, "process": mark()}
            environs["launch"] = _launch()
            _write_json(self.path / "environment.json", environs)
            if classes:
                _write_json(self.path / "classes.json", list(classes))
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be written: {error.strerror or error}"
            ) from error
        return found

    def _relaunched(self) -> bool:
        """Whether torchrun has started these workers anew, for the run that is here: one failed, or
        a host came or went."""
        assert self.path is not None
        launch = _launch()
        try:
            found = json.loads(read_plain(self.path / "environment.json", 1 << 20))
            return launch is not None and bool(found["launch"] == launch)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return False

    def _take(self) -> None:
        """Hold the folder's lock; it ends with this process, however that ends."""
        assert self.path is not None
        place = self.path / "lock"
        deadline = time.monotonic() + _OTHERS_SECONDS
        while True:
            try:
                self._lock = lock(place, lambda: json.dumps(_owner()) + "\n")
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                return  # a file system without locks
            if self._lock is not None:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self.path} is being written by {_named_owner(place)}: wait for its end, or "
                    f"name another --out"
                )
            time.sleep(0.05)

    def save(
        self,
        state: State,
        saved: Saved,
        pending: Callable[[], list[Any]] = list,
        comparison: Comparison | None = None,
        *,
        last: bool = True,
        best: bool = False,
    ) -> None:
        """Begin to write a checkpoint of what is held now, when the one before is there: as the
        last one, as the best, or both.

        `pending` tells the numbers of the last step that are still on their way. Where workers
        differ by the `comparison` nothing is written: the run ends of it.
        """
        if not self._writes or not (last or best):
            return
        assert self.path is not None
        path, keep, snapshot, record = self.path, self._config.keep, Snapshot(saved), asdict(state)

        def write() -> None:
            self._check_in_place()
            if comparison is not None and comparison.differing():
                return
            with_pending = {**record, "pending": pending()}
            if best:
                checkpoint.write_alone(path / checkpoint.BEST, snapshot, with_pending)
            if last:
                checkpoint.write_snapshot(
                    path / checkpoint.CHECKPOINTS, snapshot, with_pending, keep
                )

        with self._in_words():
            self._background.begin(write)

    def check(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known already."""
        with self._in_words():
            self._background.check()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk."""
        with self._in_words():
            self._background.wait()

    def write(self, name: str, record: dict[str, Any] | list[str]) -> None:
        if self._writes:
            assert self.path is not None
            with self._in_words():
                self._check_in_place()
                _write_json(self.path / name, record)

    def _check_in_place(self) -> None:
        """What is written where the folder was begins no second one there."""
        if not self._in_place:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    @property
    def _in_place(self) -> bool:
        assert self.path is not None
        return (self.path / "config.json").exists()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> RunFailed:
        assert self.path is not None
        if (saved := checkpoint.newest(self.path / "checkpoints")) is not None:
            rest = f"{saved.name} is safe, --resume goes on from it"
        elif self._in_place:
            rest = "nothing was saved"
        else:
            rest = "it was moved or removed; --resume goes on where it is now"
        return RunFailed(
            f"the run folder {self.path} cannot be written: {error.strerror or error}; {rest}"
        )

    @property
    def for_log(self) -> Path | None:
        return self.path if self._writes else None


def _owner() -> dict[str, Any]:
    return {**mark(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _named_owner(place: Path) -> str:
    """Who holds the lock, as far as its note tells."""
    try:
        note = json.loads(read_plain(place, 1 << 16))
        return f"process {note['pid']:d} on {note['host']!s:.100}, since {note['since']!s:.40}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "another process"


def _write_json(path: Path, record: dict[str, Any] | list[str]) -> None:
    known = finite(record) if isinstance(record, dict) else record
    write_whole(path, (json.dumps(known, indent=2) + "\n").encode())


def _launch() -> Any:
    """What all rounds of one torchrun have in common, and no other: the name it was given, or the
    agent that starts this host's workers. None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name in (None, "", "none"):  # it was given no name
        return None if name is None else mark(os.getppid())
    return name
