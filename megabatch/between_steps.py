"""Between two steps of a run: what the host learns of the one before, and what is due now and then.

Evaluations, checkpoints, comparisons of the workers' weights and the verdict; at the end, the run
in numbers.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import torch

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import StepLoader
from megabatch.parts import Parts
from megabatch.planner.peak import share_of_peak
from megabatch.recompute import recompute_statistics
from megabatch.runs import checkpoint
from megabatch.runs.diagnosis import diagnosis, divergence
from megabatch.runs.folder import RunFolder, State
from megabatch.runs.log import Log
from megabatch.runs.memory import Memory
from megabatch.runs.verdict import Clock, Effort, Facts, no_number
from megabatch.step import DelayedNumbers, StepResult, score
from megabatch.sync.control import StepNumbers
from megabatch.sync.replicas import Comparison, Replicas, checksum

_MOST_SKIPPED = 20
_LISTED = 3
"""of the parameters that a step did not reach"""


@dataclass(frozen=True)
class Summary:
    """How a run ended. Accuracies and loss are of the last evaluation, but where it is said."""

    top1: float
    top5: float
    loss: float
    best_top1: float
    """of all evaluations, as You reports"""
    median_top1: float
    """of the last five evaluations, as Goyal reports (the median of their errors)"""
    steps: int
    seen: int
    epochs: float
    seconds: float
    images_per_second: float
    worker_seconds: float | None
    """of training, of all workers together, however many there were at each time; None where the
    run was begun before this was counted"""
    peak_share: float | None
    """of the chips' peak FLOP/s, that the net's multiplications and additions were over these
    seconds; None where they, the chip or the net are not known"""
    world: int
    """workers at the end"""
    weights_sha256: str
    out: str | None
    ended: str
    """finished, target (accuracy reached) or stopped (on request, with a checkpoint)"""


class Run:
    """A run in one world of workers: how far it is, and what is due between two steps."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        parts: Parts,
        loader: StepLoader,
        folder: RunFolder,
        log: Log,
        state: State,
        facts: Facts,
        images: int,
    ) -> None:
        self.config, self.cluster, self.parts, self.loader = config, cluster, parts, loader
        self.folder, self.log, self.state, self.facts = folder, log, state, facts
        self.images, self.ended = images, "finished"
        self.delayed = DelayedNumbers(state.pending)
        self.clock = Clock(state.seconds, state.training_seconds)
        self.replicas = Replicas(cluster, config.compare_every, parts.engine.blocked)
        self._looked = False
        """whether the first step has shown what it did not reach"""

    @property
    def epoch(self) -> float:
        return self.state.seen / self.images

    @property
    def last(self) -> bool:
        """Whether the step before was the last of the run."""
        return self.state.seen >= self.config.epochs * self.images

    @property
    def over(self) -> bool:
        return self.last or self.ended != "finished"

    def _reaches(self, found: dict[str, float]) -> bool:
        """Whether an evaluation has the accuracy that is aimed at."""
        target = self.config.target_accuracy
        return target is not None and found["top1"] >= target

    def go_on(self) -> None:
        """From where another world of workers left the run, perhaps at its target."""
        state = self.state
        if state.evaluated_at == state.seen and self._reaches(state.evaluation):
            self.ended = "target"
        if state.best_at == state.seen:  # who was to write it may be lost
            self._save(None, last=False, best=True)
            self.folder.wait()

    def memory(self, left_out: tuple[int, ...]) -> Memory:
        """What the rest of the run depends on, as it is now; an error where workers are known to
        differ, for one of them would be copied."""
        self._read_comparison()
        self._tell_time()
        self.state.pending = self.delayed.state()
        mine = None
        if self.config.compare_every > 0:
            mine = int(checksum(self.parts.replicated(buffers=False), self.cluster.device))
        return Memory.of(self.state, self.log.recent, left_out, mine, self.parts)

    def _tell_time(self) -> None:
        state, trained = self.state, self.clock.training_seconds
        if state.worker_seconds is not None:
            state.worker_seconds += self.cluster.world * (trained - state.training_seconds)
        state.seconds, state.training_seconds = self.clock.seconds, trained

    # --- after a step

    def took(self, step: Step, result: StepResult) -> None:
        """A step was taken; what the host learns now is of the one before."""
        state = self.state
        state.steps, state.seen = step.index + 1, step.seen + step.batch
        with self.parts.engine.blocked("waiting for the device"):
            numbers = self.delayed.put(step, result)
        self._learn(numbers)
        if numbers is not None and numbers.stop:
            self.ended = "stopped"
        if not self._looked:
            self._looked = True
            self._tell_unreached()
        self._read_comparison()
        if self.replicas.due(state.steps):
            self.replicas.compare(state.steps, self.parts.replicated())
        self.folder.check()

    def _tell_unreached(self) -> None:
        """It stays as it is, as torch's optimizers leave it: few mean that."""
        names = self.parts.engine.unreached()
        if names:
            listed = ", ".join(names[:_LISTED])
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            self.log.say(
                f"the loss of the first step does not depend on {listed}{more}: what no pass of a "
                f"step reaches stays as it is; freeze what is not used (requires_grad_(False))"
            )

    def _learn(self, numbers: StepNumbers | None) -> None:
        if numbers is None:
            return
        self.state.learn(numbers, self.config)
        self.log.step(numbers, self.state.noise.scale)
        if _hopeless(numbers, self.state, self.config):
            net, losses = self.parts.net, self.delayed.losses
            with self.parts.engine.blocked("the diagnosis"):
                raise diagnosis(numbers, losses, net, self.folder, self.cluster)

    def _read_comparison(self) -> None:
        if (differing := self.replicas.read()) is not None:
            self.folder.wait()
            raise divergence(differing, self.folder.path)

    # --- now and then

    def settle(self) -> None:
        """What is due after the last step, once: evaluate, save, say what was waited for."""
        state, config = self.state, self.config
        # A run that is told to stop leaves what is due to who goes on with it.
        if state.settled == state.steps or self.ended == "stopped":
            return
        before, paused, found = self.delayed.last.epoch, time.perf_counter(), None
        evaluates = self.last or self._due(before, config.eval_every)
        if evaluates or self._due(before, config.save_every):
            self.parts.check_settled()
        if evaluates:
            found = self._evaluate()
        best = found is not None and config.keep_best and state.beaten_by(found)
        over = self.last or (found is not None and self._reaches(found))
        saves = not over and self._due(before, config.save_every)
        compared = None
        if saves or best:
            compared = self.replicas.compare(state.steps, self.parts.replicated())
        # From here on nothing waits for other workers: it is done as a whole, or not at all.
        if found is not None:
            self._take_in(found)
        state.settled = state.steps
        state.best_at = state.seen if best else state.best_at
        if saves or best:
            self._save(compared, last=saves, best=best)
        if best and self.cluster.world > 1:  # others can write it, should this one be lost now
            self.folder.wait()
        self.clock.passed_over(time.perf_counter() - paused)
        if self._due(before, 1.0):
            self._judge()

    def _save(self, compared: Comparison | None, last: bool = True, best: bool = False) -> None:
        self._tell_time()
        pending = self.delayed.state_later()
        self.folder.save(self.state, self.parts, pending, compared, last=last, best=best)

    def _due(self, before: float, every: float) -> bool:
        """Whether a multiple of `every` epochs was passed since an epoch."""
        return every > 0 and int(self.epoch / every) > int(before / every)

    def _evaluate(self) -> dict[str, float]:
        state, parts, loader, cluster = self.state, self.parts, self.loader, self.cluster
        self.folder.wait()
        recompute_statistics(parts, loader, self.config.bn_recompute, cluster)
        with parts.average.in_place():
            held_out = loader.validation_images
            watched = self.log.evaluating(
                loader.validation(), held_out, cluster.world, state.steps, state.seen
            )
            waiting = parts.engine.blocked("the end of an evaluation")
            return score(parts.net, watched, held_out, self.config, cluster, waiting)

    def _take_in(self, found: dict[str, float]) -> None:
        """An evaluation, into the state and the log."""
        state = self.state
        state.evaluated(found)
        if self._reaches(found):
            self.ended = "target"
        self.log.evaluation(state.steps, state.seen, self.epoch, found, self.clock.seconds)
        self.log.layers(state.steps - 1, state.seen, self.parts.layers(), self.config.ratio_band)

    def _judge(self) -> None:
        """Where the time of an epoch went, here and on the other workers."""
        engine, loader = self.parts.engine, self.loader
        self.clock.waited_for_others(engine.exposed_seconds())
        waits = self.clock.lap(loader.waited_seconds, loader.busy_seconds, loader.core_seconds)
        own = waits.seconds - waits.communication
        effort = Effort(platform.node(), own, engine.computed_micro_batches())
        with engine.blocked("the others' effort"):
            efforts = self.cluster.gather(effort)
        self.log.verdict(self.state.steps, self.state.seen, waits, self.facts, efforts)

    # --- at the end

    def finished(self, classes: int) -> Summary:
        """The last checkpoint, and the run in numbers."""
        state, parts, folder, cluster = self.state, self.parts, self.folder, self.cluster
        parts.check_settled()
        self.log.last_verdict()
        if state.evaluated_at == state.seen and (words := no_number(state.evaluation["loss"])):
            self.log.say(words)
        self._save(self.replicas.compare(state.steps, parts.replicated()))
        self._read_comparison()
        folder.wait()
        with parts.engine.blocked("the end of the run"):
            cluster.barrier()
        self._learn(self.delayed.take())
        rate = state.seen / max(state.training_seconds, 1e-9)
        summary = Summary(
            **state.evaluation,
            best_top1=state.best_top1,
            median_top1=statistics.median(state.last_top1s or [0.0]),
            steps=state.steps,
            seen=state.seen,
            epochs=self.epoch,
            seconds=state.seconds,
            images_per_second=rate,
            worker_seconds=state.worker_seconds,
            peak_share=_peak_share(self.config, cluster, classes, state),
            world=cluster.world,
            weights_sha256=checkpoint.weights_sha256(parts.net),
            out=None if folder.path is None else str(folder.path),
            ended=self.ended,
        )
        folder.write("summary.json", asdict(summary))
        return summary


def _peak_share(config: Config, cluster: Cluster, classes: int, state: State) -> float | None:
    """Of the mean chip, over all the time that there was one."""
    if not state.worker_seconds:
        return None
    data, rate = config.data, state.seen / state.worker_seconds
    return share_of_peak(chip_of(cluster), config.model, data.size, data.channels, classes, rate)


def chip_of(cluster: Cluster) -> str:
    """A worker's, by name; of a CPU nobody knows the peak, so it has none."""
    return torch.cuda.get_device_name(cluster.device) if cluster.device.type == "cuda" else ""


def _hopeless(numbers: StepNumbers, state: State, config: Config) -> bool:
    """A loss that is no number ends the run; in fp16 it may be an overflow that a skip mends, but
    not time after time."""
    diverged = not math.isfinite(numbers.loss) and config.precision != "fp16"
    return diverged or state.skipped >= _MOST_SKIPPED
