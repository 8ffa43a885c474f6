"""A whole run on a machine under one setting: steps, stages of the batch, evaluation and the pauses
around it added up, with the interval that what is assumed leaves open.

Efficiency is images/s over workers times what one worker of a single node does, as the papers
count it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil, exp, log, sqrt
from typing import Any

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.planner.cost import FREE, BySize, Price, price
from megabatch.planner.doubt import CERTAIN, Doubt, assumed_ranges, shifted
from megabatch.planner.length import epochs_to_target, stretches
from megabatch.planner.machine import Machine
from megabatch.planner.machine_file import load
from megabatch.planner.pace import (
    Pace,
    expected_maximum,
    largest_micro,
    pace,
    unmeasured,
)
from megabatch.planner.settings import FLAT, HYBRID_PLAN, Setting, ways
from megabatch.planner.step import FORWARD, WIRES, SentBucket, StepForecast, arrival, buckets, step
from megabatch.planner.workload import Images, Workload, images_of, workload_of
from megabatch.plans import Plan

# Times that a byte of the gradients goes through a GPU's memory: copied into a bucket (2), added to
# what arrives (3), copied back (2).
TOUCHED = 7

# What 60 MLPerf logs spend beside training steps [found: S8]; docs/planner.md has the ranges.
EVALUATED = 0.5  # time of an image that is evaluated, in times of one that is trained on
PAUSE_STEPS = 5  # that go by around an evaluation: pipelines run empty and fill again


@dataclass(frozen=True)
class Forecast:
    """What a run will take. Times are of the mean step over the stages of the batch."""

    machine: str
    gpus: int
    setting: Setting
    stages: tuple[tuple[int, int, StepForecast], ...]
    """batch, steps and one step of each"""
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
    """from the first step to the end"""
    interval: tuple[float, float]
    """of seconds_to_target: where nine of ten runs should end"""
    start_seconds: float
    """before the first step"""
    gpu_hours: float
    """from the start of the workers on"""
    dollars: float | None
    kwh: float | None
    limit: str
    notes: tuple[str, ...] = ()
    """what was not measured for this machine"""
    parted: tuple[tuple[str, int], ...] = ()
    """of a hybrid: its plans, and how many buckets go by each"""

    def row(self) -> dict[str, Any]:
        """As one row of --json."""
        fields: dict[str, Any] = asdict(self)
        setting = fields.pop("setting")
        fields["stages"] = [
            {"batch": batch, "steps": steps, "step_seconds": one.seconds}
            for batch, steps, one in self.stages
        ]
        fields.update(setting)
        return fields


class Stretch:
    """A stage of the batch on one number of workers: how many steps, of which passes."""

    def __init__(self, job: Job, batch: int, steps: int):
        self.batch, self.steps = batch, steps
        images_per_gpu = ceil(batch / job.gpus)  # the worker with the most images sets the pace
        self.passes = ceil(images_per_gpu / job.largest)
        self.micro = ceil(images_per_gpu / self.passes)
        self.pass_seconds = job.doubt.speed * job.pace.seconds(self.micro)
        nodes = max(1, job.gpus // job.machine.workers_per_node)
        rate = job.machine.input_images_per_second
        self.input_seconds = batch / nodes / rate if rate else 0.0

    @property
    def compute_seconds(self) -> float:
        return self.passes * self.pass_seconds


class Job:
    """A config on a number of workers of a machine, ready to be priced under many settings."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        gpus: int,
        workload: Workload,
        images: Images,
        doubt: Doubt = CERTAIN,
        like: Job | None = None,
    ) -> None:
        """`like`: a job of the same workload and machine, whose pace and buckets are taken over."""
        machine.check_world(gpus)
        smallest = min(stage.batch for stage in config.all_stages)
        if smallest < gpus:
            raise UserError(
                f"a batch of {smallest} leaves some of {gpus} GPUs without an image: "
                f"give at most {smallest} GPUs or a larger batch"
            )
        self.config, self.gpus, self.doubt = config, gpus, doubt
        self.workload, self.images = workload, images
        self.machine = machine
        self.pace: Pace = like.pace if like else pace(machine, workload, doubt.curve)
        self.largest: int = like.largest if like else largest_micro(machine, workload)
        self.wires: Machine = like.wires if like else shifted(machine, doubt)
        self.epochs = epochs_to_target(config, workload, images)
        self.stretches = [
            Stretch(self, batch, steps)
            for batch, steps in stretches(config, images.train, self.epochs)
        ]
        self.slowest = doubt.jitter * machine.jitter * expected_maximum(gpus)
        self._buckets: dict[tuple[float, str], list[SentBucket]] = like._buckets if like else {}
        self._prices: dict[tuple[str, tuple[int, int]], Price | BySize] = {}

    @classmethod
    def of(
        cls, config: Config, machine: str | Machine, gpus: int, workload: Workload | None = None
    ) -> Job:
        place = load(machine) if isinstance(machine, str) else machine
        return cls(config, place, gpus, workload or workload_of(config), images_of(config))

    def on(self, gpus: int) -> Job:
        """The same job on another number of workers."""
        return Job(
            self.config, self.machine, gpus, self.workload, self.images, self.doubt, like=self
        )

    def if_so(self, doubt: Doubt) -> Job:
        """The same job if something assumed is otherwise."""
        return Job(self.config, self.machine, self.gpus, self.workload, self.images, doubt)

    def buckets(self, bucket_mb: float, wire: str) -> list[SentBucket]:
        key = (bucket_mb, wire)
        if key not in self._buckets:
            self._buckets[key] = buckets(self.workload, *key)
        return self._buckets[key]

    def steps(self, setting: Setting) -> list[StepForecast]:
        """One step of each stretch of the run."""
        full = self.buckets(setting.bucket_mb, setting.wire) if self.gpus > 1 else ()
        return [
            step(
                stretch.pass_seconds,
                stretch.passes,
                full,
                self.price(setting),
                slowest=self.slowest,
                lanes=setting.lanes,
                overlap=setting.overlap,
                input_seconds=stretch.input_seconds,
                sending_share=self.machine.sending_share,
            )
            for stretch in self.stretches
        ]

    def price(self, setting: Setting) -> Price | BySize:
        key = (setting.plan, setting.grid)
        if key not in self._prices:
            rows = tuple(
                (limit, self._price(plan, setting.grid))
                for limit, plan in ways(setting.plan, self.config.hybrid)
            )
            self._prices[key] = rows[0][1] if len(rows) == 1 else BySize(rows)
        return self._prices[key]

    def _price(self, plan: Plan, grid: tuple[int, int]) -> Price:
        if self.gpus == 1:
            return FREE
        cost = price(plan, *grid, self.wires)
        touched = cost.seconds_per_byte + self.touching_seconds_per_byte
        return cost._replace(seconds_per_byte=touched)

    @property
    def touching_seconds_per_byte(self) -> float:
        """Seconds a byte for which a GPU's memory is at work on what it sends and gets. Cores have
        `sending` for it."""
        chip = self.machine.generation
        if self.machine.sending is not None or chip.name in ("cpu", "unknown"):
            return 0.0
        return TOUCHED / chip.memory_bytes_per_second

    def train_seconds(self, setting: Setting, cost: Price | None = None) -> float:
        """`cost`: another price than the setting has."""
        found = cost or self.price(setting)
        if isinstance(found, BySize) or found.works or not setting.overlap or self.gpus == 1:
            made = self.steps(setting)
            return sum(
                stretch.steps * one.seconds
                for stretch, one in zip(self.stretches, made, strict=True)
            )
        full = self.buckets(setting.bucket_mb, setting.wire)
        total = 0.0
        for stretch in self.stretches:
            compute = stretch.compute_seconds
            backward = (1 - FORWARD) * stretch.pass_seconds
            arrived, under_way = arrival(full, found, compute - backward, backward, setting.lanes)
            held = compute + self.machine.sending_share * min(under_way, backward)
            busy = compute * self.slowest + max(held, arrived)
            total += stretch.steps * max(busy, stretch.input_seconds)
        return total

    def nbytes(self, wire: str) -> float:
        """Of all gradients."""
        return float(WIRES[wire] * self.workload.parameters)

    def training_within(self, seconds: float) -> float:
        """Training that leaves a run of so many seconds time for the rest."""
        count = sum(stretch.steps for stretch in self.stretches)
        paused = 1 + self.doubt.rest * self.evaluations * PAUSE_STEPS / count
        return (seconds / self.doubt.total - self.evaluations * self._one_evaluation()) / paused

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
        total = self.seconds(setting)
        parts = {
            "computation": mean("forward_seconds") + mean("backward_seconds"),
            "communication": mean("exposed_seconds"),
            "waiting for the slowest worker": mean("jitter_seconds"),
            "input": mean("input_seconds"),
        }
        machine = self.machine
        hours = (total + machine.start_seconds) * self.gpus / 3600
        dollars, watts = machine.price_per_gpu_hour, machine.watts_per_gpu
        return Forecast(
            machine=machine.name,
            gpus=self.gpus,
            setting=setting,
            stages=tuple(
                (stretch.batch, stretch.steps, one)
                for stretch, one in zip(self.stretches, made, strict=True)
            ),
            micro=self.stretches[0].micro,
            step_seconds=mean("seconds"),
            exposed_seconds=mean("exposed_seconds"),
            jitter_seconds=mean("jitter_seconds"),
            input_seconds=mean("input_seconds"),
            efficiency=seen / train / self.gpus / self._node_rate(setting, reference_batch),
            images_per_second=seen / train,
            epochs=self.epochs,
            train_seconds=train,
            evaluation_seconds=total - train,
            seconds_to_target=total,
            interval=self.interval(setting),
            start_seconds=machine.start_seconds,
            gpu_hours=hours,
            dollars=None if dollars is None else dollars * hours,
            kwh=None if watts is None else watts * hours / 1000,
            limit=self._limit(parts),
            notes=tuple(unmeasured(machine, self.workload)),
            parted=self._parted(setting),
        )

    def _parted(self, setting: Setting) -> tuple[tuple[str, int], ...]:
        if setting.plan != HYBRID_PLAN:
            return ()
        choice = self.config.hybrid
        (limit, _), _ = ways(HYBRID_PLAN, choice)
        full = self.buckets(setting.bucket_mb, setting.wire)
        small = sum(bucket.nbytes <= limit for bucket in full)
        return (choice.small, small), (choice.large, len(full) - small)

    @property
    def evaluations(self) -> int:
        every = self.config.eval_every
        return max(1, int(self.epochs / every)) if every else 1

    def _one_evaluation(self) -> float:
        images_per_gpu = ceil(self.images.validation / self.gpus)
        size = max(1, min(images_per_gpu, self.largest))
        passes = ceil(images_per_gpu / size)
        return self.doubt.rest * EVALUATED * passes * self.pace.seconds(size)

    def seconds(self, setting: Setting) -> float:
        """Of the whole run: training, evaluations and the pauses around them."""
        return self.whole_run(self.train_seconds(setting))

    def whole_run(self, train: float) -> float:
        mean_step = train / sum(stretch.steps for stretch in self.stretches)
        pause = self.doubt.rest * PAUSE_STEPS * mean_step
        return self.doubt.total * (train + self.evaluations * (self._one_evaluation() + pause))

    def interval(self, setting: Setting) -> tuple[float, float]:
        """Where nine of ten runs should end: each doubt's own effect, added as independent ones
        are (by squares)."""
        middle = self.seconds(setting)
        less = more = 0.0
        for low, high in assumed_ranges(self.machine, self.workload, self.gpus):
            ends = [log(self.if_so(doubt).seconds(setting) / middle) for doubt in (low, high)]
            less += min(0.0, *ends) ** 2
            more += max(0.0, *ends) ** 2
        return middle * exp(-sqrt(less)), middle * exp(sqrt(more))

    def _node_rate(self, setting: Setting, batch: int | None) -> float:
        """Images/s of one worker of a single node."""
        world = min(self.gpus, self.machine.workers_per_node)
        config = self.config if batch is None else replace(self.config, batch=batch, stages=())
        node = Job(config, self.machine, world, self.workload, self.images, like=self)
        seen = sum(stretch.steps * stretch.batch for stretch in node.stretches)
        flat = (replace(setting, plan=plan, grid=(1, world)) for plan in FLAT)
        return seen / min(node.train_seconds(alone) for alone in flat) / world

    def _limit(self, parts: dict[str, float]) -> str:
        """What the time beside computation goes to, or that a pass is too small."""
        rest = {name: seconds for name, seconds in parts.items() if name != "computation"}
        worst = max(rest, key=lambda name: rest[name])
        images_per_gpu = ceil(self.stretches[0].batch / self.gpus)
        full = images_per_gpu * self.pace.seconds(self.largest) / self.largest
        small = self.stretches[0].compute_seconds - full
        if small > rest[worst] and small > 0.1 * parts["computation"]:
            few = (
                "1 image a GPU is" if images_per_gpu == 1 else f"{images_per_gpu} images a GPU are"
            )
            return f"{few} too few to fill it"
        if rest[worst] < 0.1 * parts["computation"]:
            return "computation"
        return worst
