"""A whole run on a machine under one setting: steps, stages of the batch and evaluation added up.

Efficiency is images/s over workers times what one worker of a single node does, as the papers
count it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.planner.cost import FREE, Price, price
from megabatch.planner.machine import Machine, load
from megabatch.planner.step import (
    Bucket,
    Step,
    buckets,
    expected_maximum,
    pass_seconds,
    step,
    unmeasured,
)
from megabatch.planner.workload import Images, Workload, images_of, workload_of
from megabatch.plans import PLANS, Plan
from megabatch.plans.names import plan_of

FLAT = ("ring", "ring:halving_doubling")
PLANNED: dict[str, Plan] = {
    name: plan_of(name) for name in (*FLAT, *PLANS, "torus:halving_doubling")
}
"""the plans that a search goes through, by name"""

LANES = 3  # of the trainer's engine (execute.py); buckets in them hide each other's latency

# Batch against epochs to 75.9 % of top-1: MLPerf's reference convergence points [found: S9].
EPOCHS_TO_759 = (
    (1632, 35.0), (3264, 35.2), (4096, 40.0), (8192, 42.0), (13056, 45.4), (32768, 56.0),
    (49152, 68.0), (58880, 79.9), (65536, 84.5), (67840, 85.9),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How gradients are summed: what a search chooses, or a paper did."""

    plan: str
    grid: tuple[int, int]
    """rows and columns"""
    bucket_mb: float
    wire: str = "fp32"
    lanes: int = 1
    overlap: bool = True


@dataclass(frozen=True)
class Forecast:
    """What a run will take. Times are of the mean step over the stages of the batch."""

    machine: str
    gpus: int
    setting: Setting
    step: Step
    """of the first stage, for its timeline"""
    micro: int
    """images of one pass in the first stage: what the trainer must be told to meet this"""
    step_seconds: float
    exposed_seconds: float
    jitter_seconds: float
    input_seconds: float
    efficiency: float
    images_per_second: float
    epochs: float
    train_seconds: float
    evaluation_seconds: float
    seconds_to_target: float
    interval: tuple[float, float]
    """of seconds_to_target: latencies and jitter halved and doubled"""
    gpu_hours: float
    limit: str
    notes: tuple[str, ...] = ()
    """what was not measured for this machine"""

    def row(self) -> dict[str, Any]:
        """As one row of --json."""
        fields: dict[str, Any] = asdict(self)
        setting = fields.pop("setting")
        del fields["step"]
        fields.update(setting)
        return fields


class Stretch:
    """A stage of the batch on one number of workers: how many steps, of which passes."""

    def __init__(self, machine: Machine, workload: Workload, batch: int, steps: int, gpus: int):
        self.batch, self.steps = batch, steps
        share = ceil(batch / gpus)  # the worker with the most images sets the pace
        self.passes = ceil(share / machine.largest_micro)
        self.micro = ceil(share / self.passes)
        self.pass_seconds = pass_seconds(machine, workload, self.micro)
        nodes = max(1, gpus // machine.workers_per_node)
        rate = machine.input_images_per_second
        self.input_seconds = batch / nodes / rate if rate else 0.0


class Job:
    """A config on a number of workers of a machine, ready to be priced under many settings."""

    def __init__(
        self, config: Config, machine: Machine, gpus: int, workload: Workload, images: Images
    ) -> None:
        machine.check_world(gpus)
        smallest = min(stage.batch for stage in config.all_stages)
        if smallest < gpus:
            raise UserError(
                f"a batch of {smallest} leaves some of {gpus} GPUs without an image: "
                f"give at most {smallest} GPUs or a larger batch"
            )
        self.config, self.machine, self.gpus = config, machine, gpus
        self.workload, self.images = workload, images
        self.epochs = epochs_to_target(config, images)
        self.stretches = [
            Stretch(machine, workload, batch, steps, gpus)
            for batch, steps in stretches(config, images.train, self.epochs)
        ]
        self.slowest = machine.jitter * expected_maximum(gpus)
        self._buckets: dict[tuple[float, str], list[Bucket]] = {}
        self._prices: dict[tuple[str, tuple[int, int]], Price] = {}

    @classmethod
    def of(
        cls, config: Config, machine: str | Machine, gpus: int, workload: Workload | None = None
    ) -> Job:
        place = load(machine) if isinstance(machine, str) else machine
        return cls(config, place, gpus, workload or workload_of(config), images_of(config))

    def steps(self, setting: Setting) -> list[Step]:
        """One step of each stretch of the run."""
        key = (setting.bucket_mb, setting.wire)
        if key not in self._buckets:
            self._buckets[key] = buckets(self.workload, *key)
        return [
            step(
                stretch.pass_seconds,
                stretch.passes,
                self._buckets[key] if self.gpus > 1 else (),
                self.price(setting),
                slowest=self.slowest,
                lanes=setting.lanes,
                overlap=setting.overlap,
                input_seconds=stretch.input_seconds,
            )
            for stretch in self.stretches
        ]

    def price(self, setting: Setting) -> Price:
        key = (setting.plan, setting.grid)
        if key not in self._prices:
            plan = plan_of(setting.plan)
            self._prices[key] = price(plan, *setting.grid, self.machine) if self.gpus > 1 else FREE
        return self._prices[key]

    def train_seconds(self, setting: Setting) -> float:
        made = self.steps(setting)
        return sum(
            stretch.steps * one.seconds for stretch, one in zip(self.stretches, made, strict=True)
        )

    def best(self, settings: Iterable[Setting]) -> Forecast:
        """The forecast of the fastest; of those within 1 % of it, the one least at risk.

        Risk is the time with latencies and jitter doubled: of equals, small buckets lose.
        """
        timed = [(self.train_seconds(setting), setting) for setting in settings]
        limit = 1.01 * min(seconds for seconds, _ in timed)
        near = [setting for seconds, setting in timed if seconds <= limit]
        worse = self._shifted(2.0)
        return self.forecast(min(near, key=worse.train_seconds))

    def forecast(self, setting: Setting, reference_batch: int | None = None) -> Forecast:
        """`reference_batch`: what the single node trains with (None: the same batch)."""
        made = self.steps(setting)
        count = sum(stretch.steps for stretch in self.stretches)

        def mean(name: str) -> float:
            total = sum(
                stretch.steps * getattr(one, name)
                for stretch, one in zip(self.stretches, made, strict=True)
            )
            return float(total / count)

        train = count * mean("seconds")
        seen = sum(stretch.steps * stretch.batch for stretch in self.stretches)
        evaluation = self.evaluation_seconds()
        total = train + evaluation
        parts = {
            "computation": mean("forward_seconds") + mean("backward_seconds"),
            "communication": mean("exposed_seconds"),
            "waiting for the slowest worker": mean("jitter_seconds"),
            "input": mean("input_seconds"),
        }
        return Forecast(
            machine=self.machine.name,
            gpus=self.gpus,
            setting=setting,
            step=made[0],
            micro=self.stretches[0].micro,
            step_seconds=mean("seconds"),
            exposed_seconds=mean("exposed_seconds"),
            jitter_seconds=mean("jitter_seconds"),
            input_seconds=mean("input_seconds"),
            efficiency=seen / train / self.gpus / self._node_rate(setting, reference_batch),
            images_per_second=seen / train,
            epochs=self.epochs,
            train_seconds=train,
            evaluation_seconds=evaluation,
            seconds_to_target=total,
            interval=(
                self._shifted(0.5).train_seconds(setting) + evaluation,
                self._shifted(2.0).train_seconds(setting) + evaluation,
            ),
            gpu_hours=total * self.gpus / 3600,
            limit=self._limit(parts),
            notes=tuple(unmeasured(self.machine, self.workload)),
        )

    def evaluation_seconds(self) -> float:
        """Forward passes over the validation images, after the run and as often as the config
        asks."""
        every = self.config.eval_every
        times = max(1, int(self.epochs / every)) if every else 1
        share = ceil(self.images.validation / self.gpus)
        size = min(share, self.machine.largest_micro)
        one_pass = pass_seconds(self.machine, self.workload, size) / 3
        return times * one_pass * ceil(share / size)

    def _node_rate(self, setting: Setting, batch: int | None) -> float:
        """Images/s of one worker of a single node."""
        world = min(self.gpus, self.machine.workers_per_node)
        config = self.config if batch is None else replace(self.config, batch=batch, stages=())
        node = Job(config, self.machine, world, self.workload, self.images)
        seen = sum(stretch.steps * stretch.batch for stretch in node.stretches)
        flat = (replace(setting, plan=plan, grid=(1, world)) for plan in FLAT)
        return seen / min(node.train_seconds(alone) for alone in flat) / world

    def _shifted(self, factor: float) -> Job:
        """The same job where latencies and jitter are so many times as large."""
        machine = self.machine
        slower = {
            level: replace(link, latency_seconds=link.latency_seconds * factor)
            for level in ("node", "network", "spine")
            if (link := getattr(machine, level)) is not None
        }
        shifted = Job(
            self.config, replace(machine, **slower), self.gpus, self.workload, self.images
        )
        shifted.slowest *= factor
        return shifted

    def _limit(self, parts: dict[str, float]) -> str:
        """What the time beside computation goes to, or that a pass is too small."""
        rest = {name: seconds for name, seconds in parts.items() if name != "computation"}
        worst = max(rest, key=lambda name: rest[name])
        share = ceil(self.stretches[0].batch / self.gpus)
        best = pass_seconds(self.machine, self.workload, self.machine.largest_micro)
        full = share * best / self.machine.largest_micro
        small = sum(s.passes * s.pass_seconds for s in self.stretches[:1]) - full
        if small > rest[worst] and small > 0.05 * parts["computation"]:
            few = "1 image a GPU is" if share == 1 else f"{share} images a GPU are"
            return f"{few} too few to fill it"
        if rest[worst] < 0.1 * parts["computation"]:
            return "computation"
        return worst


def stretches(config: Config, images: int, epochs: float) -> list[tuple[int, int]]:
    """(batch, steps) of each stage, as the trainer counts them, without walking through the
    steps."""
    found, seen = [], 0
    begins = [stage.epoch for stage in config.all_stages[1:]] + [epochs]
    for stage, until in zip(config.all_stages, begins, strict=True):
        count = max(0, ceil((min(until, epochs) * images - seen) / stage.batch))
        if count:
            found.append((stage.batch, count))
            seen += count * stage.batch
    return found


def epochs_to_target(config: Config, images: Images) -> float:
    """The config's epochs; fewer if it stops at a top-1 that MLPerf's ResNet-50 runs reach
    sooner."""
    target = config.target_accuracy
    if target is None or config.model != "resnet50" or images.classes != 1000 or target > 0.759:
        return config.epochs
    batch = max(stage.batch for stage in config.all_stages)
    (low, first), *rest = EPOCHS_TO_759
    if batch <= low:
        return min(first, config.epochs)
    for high, last in rest:
        if batch <= high:
            known = first + (last - first) * (batch - low) / (high - low)
            return min(known, config.epochs)
        low, first = high, last
    return config.epochs
