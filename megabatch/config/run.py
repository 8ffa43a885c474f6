"""The config of a run: the global batch, the reference rate, and all that follows from them.

Everything else (micro-batches, accumulation, steps, the peak rate) is derived here and shown in
one table. A value that could never be right is refused where it is set; whether the settings fit
each other is checked when a run begins, since one may be changed after another.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from megabatch import models
from megabatch.batch import Stage, count_steps
from megabatch.config import written
from megabatch.config.sections import (
    EPOCHS,
    IMAGES,
    PIXELS,
    Data,
    Hybrid,
    LearningRate,
    Noise,
    OptimizerConfig,
)
from megabatch.config.settings import (
    Rule,
    check_setting,
    check_settings,
    check_value,
    need,
    setting,
    settings_of,
    shown,
)
from megabatch.errors import UserError
from megabatch.models.zoo import PRETRAINED, is_foreign
from megabatch.plans import names
from megabatch.schedule import scaled
from megabatch.tree import deal

# What a stage of the batch may be: as epochs, batch and momentum of the whole run.
_STAGE = (
    ("epoch", float, Rule(above=0, most=EPOCHS)),
    ("batch", int, Rule(least=1, most=IMAGES)),
    ("momentum", float | None, Rule(least=0, below=1)),
)


@dataclass(frozen=True)
class Config:
    """Every setting of a run. One is not set but replaced: `dataclasses.replace(config, seed=1)`
    is another config, `config.resized(epochs=30, batch=1024)` a whole recipe cut to size."""

    name: str = setting("custom")
    """what the run is called"""
    model: str = setting("small")
    """one of the bundled models, which megabatch train --help lists, or timm:NAME or
    torchvision:NAME where those are installed"""
    epochs: float = setting(20.0, above=0, most=EPOCHS)
    """passes over the training images"""
    batch: int = setting(256, least=1, most=IMAGES)
    """global batch: the images of one step over all workers"""
    micro: int = setting(32, least=1, most=IMAGES)
    """images in one pass; a multiple of span that divides the batch"""
    span: int = setting(32, least=1, most=IMAGES)
    """images that share batch-norm statistics"""
    stages: tuple[Stage, ...] = setting(())
    """batch-size control: EPOCH:BATCH or EPOCH:BATCH:MOMENTUM, in order"""
    rate_follows_batch: bool = setting(True)
    """the rate grows with the batch at a stage"""
    label_smoothing: float = setting(0.0, least=0, below=1)
    """share of the target spread evenly over all classes"""
    zero_gamma: bool = setting(True)
    """a residual block's last batch norm begins with gamma 0, so that the block begins as its
    shortcut (Goyal); otherwise with 1"""
    bn_momentum: float = setting(0.1, above=0, most=1)
    """weight of the present step in the moving averages of batch norm (1: no moving average)"""
    bn_recompute: int = setting(0, least=0, most=IMAGES)
    """before an evaluation, compute batch norm's statistics anew over so many training images, more
    than an epoch's by other crops of them (0: evaluate with the moving averages)"""
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = setting("fp32")
    """of activations; bf16 and fp16 by autocast, weights and optimizer in fp32"""
    half_weights: bool = setting(False)
    """keep weights and gradients in bf16 or fp16 too, with fp32 masters (Jia)"""
    loss_scale: float | None = setting(None, above=0, most=1e9)
    """fixed factor of the loss in backward (None: dynamic for fp16, 1 otherwise)"""
    ema: float = setting(0.0, least=0, below=1)
    """evaluate and save a moving average of the weights with this decay a step (0: none)"""
    init: str = setting("")
    """begin from the weights in this file (safetensors, or torch's .pth), or "pretrained": those
    that timm or torchvision has for its model; a head of other classes is made anew"""
    ratio_band: tuple[float, float] = setting((1e-5, 100.0), least=0, most=1e9, may_change=True)
    """an alarm line is printed when a layer's trust ratio leaves this band"""
    seed: int = setting(0, least=0, below=2**53)
    """of the weights, the order and the augmentation"""
    deterministic: bool = setting(False)
    """the same bits on any number of workers: one order of summation, one thread a worker"""
    eval_every: float = setting(1.0, least=0, most=EPOCHS, may_change=True)
    """epochs between evaluations (0: only at the end)"""
    save_every: float = setting(1.0, least=0, most=EPOCHS, may_change=True)
    """epochs between checkpoints (0: only at the end)"""
    keep: int = setting(2, least=1, most=1e6, may_change=True)
    """how many checkpoints stay"""
    compare_every: int = setting(100, least=0, most=1e9, may_change=True)
    """steps between comparisons of the workers' weights, bit for bit; they are compared before each
    checkpoint too (0: never)"""
    patience: float = setting(60.0, least=0, most=86_400, may_change=True)
    """seconds that a worker may be silent, dead or stopped, before the others name it and end, or a
    local one is ended and replaced; one that lives may let them wait ten times as long (0: they
    wait for ever)"""
    keep_best: bool = setting(False, may_change=True)
    """keep the checkpoint of the best top-1 too, beside the last ones: --best names it"""
    target_accuracy: float | None = setting(
        None, above=0, most=1, may_change=True, hint="give a share, 0.97 say"
    )
    """stop when an evaluation reaches this top-1 (0 to 1)"""
    compile: Literal["auto", "always", "never"] = setting("auto", may_change=True)
    """run the net by kernels of our own where there are some, or compiled by torch (auto: on a GPU,
    never: the net as it is)"""
    graphs: Literal["auto", "always", "never"] = setting("auto", may_change=True)
    """replay passes as a CUDA graph (auto: where they are small, and by kernels of our own on one
    worker too, but no model of somebody else's: what it does in Python would be done once)"""
    bucket_mb: float = setting(25.0, above=0, most=1e6, may_change=True)
    """gradients leave in buckets of this many megabytes"""
    plan: str = setting("backend", may_change=True)
    """how gradients are summed over workers: backend (NCCL's or gloo's own all-reduce), ring,
    hierarchical, torus, three_phase, blueconnect (each also as torus:halving_doubling), hybrid, or
    auto (as bench sync measured)"""
    wire: Literal["fp32", "fp16", "bf16"] = setting("fp32", may_change=True)
    """what gradients travel in, by a plan of our own"""
    hybrid: Hybrid = field(default_factory=Hybrid)
    data: Data = field(default_factory=Data)
    noise: Noise = field(default_factory=Noise)
    lr: LearningRate = field(default_factory=LearningRate)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        """Refuse at once what could never be right, whatever the other settings are."""
        check_settings(self)
        need(
            re.fullmatch(r"\w[\w .+-]{0,99}", self.name) is not None,
            f"the name {self.name!r} cannot be a folder's: take letters, digits and .+-_, at most "
            f"100",
        )
        names.check(self.plan)
        for index, stage in enumerate(self.stages):
            for name, kind, rule in _STAGE:
                check_value(getattr(stage, name), kind, rule, f"the {name} of stage {index + 1}")
        for name, every in (("eval_every", self.eval_every), ("save_every", self.save_every)):
            need(
                every == 0 or every >= 1e-6,
                f"{name} is {every:g}; give epochs, or 0 for the end only",
            )
        need(
            self.ratio_band[0] <= self.ratio_band[1],
            f"ratio_band is {shown(self.ratio_band)}; give two ratios, the smaller first",
        )

    # --- derived -------------------------------------------------------------------------------

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return (Stage(0.0, self.batch, self.optimizer.momentum), *self.stages)

    def lr_at(self, epoch: float, batch: int | None = None) -> float:
        """The learning rate at an epoch for a step of that batch (None: the first stage's)."""
        rate = self.lr.over(self.batch, self.epochs)(epoch)
        return rate if batch is None else self._at_batch(rate, batch)

    def _at_batch(self, rate: float, batch: int) -> float:
        """A rate of the first stage's batch, at another stage's."""
        rule = self.lr.scaling if self.rate_follows_batch else "none"
        return scaled(rate, batch, self.batch, rule)

    def momentum_at(self, stage: int) -> float:
        """The momentum in a stage: the last one that a stage so far has set."""
        given = [s.momentum for s in self.all_stages[: stage + 1] if s.momentum is not None]
        return given[-1]

    def resized(self, epochs: float | None = None, batch: int | None = None) -> Config:
        """The same recipe for another length or batch: warm-up, drops and stages keep their share
        of the run, later stages their multiple of the first batch."""
        epochs = self.epochs if epochs is None else epochs
        batch = self.batch if batch is None else batch
        check_setting(Config, "epochs", epochs)
        check_setting(Config, "batch", batch)
        stretch, grow = epochs / self.epochs, batch / self.batch
        stages = tuple(
            replace(s, epoch=s.epoch * stretch, batch=round(s.batch * grow)) for s in self.stages
        )
        lr = self.lr.stretched(stretch)
        return replace(self, epochs=epochs, batch=batch, lr=lr, stages=stages)

    def in_words(self) -> str:
        """What a batch is trained with, in one line."""
        batches = ", then ".join(f"{stage.batch:,}" for stage in self.all_stages)
        warm = f" after {self.lr.warmup:g} epochs of warm-up" if self.lr.warmup else ""
        return (
            f"a batch of {batches}, {self.epochs:g} epochs: {self.optimizer.title} at a rate of "
            f"{self.lr.peak(self.batch):g}{warm}, {self.optimizer.in_words()}"
        )

    def derived(
        self, images: int, world: int, grid: tuple[int, int] | None = None
    ) -> list[tuple[str, str, str]]:
        """What follows from the configuration: rows of (name, value, formula)."""
        stages = self.all_stages
        steps, seen = count_steps(stages, images, self.epochs)
        peak = self.lr.peak(self.batch)
        counts = [last - first for first, last in deal(self.batch // self.micro, world)]
        least, most = min(counts), max(counts)
        per_worker = f"{least} to {most}" if least < most else str(most)
        warm = count_steps(stages, images, min(self.lr.warmup, self.epochs))[0]
        shape = {"linear": "{} * {} / {}", "sqrt": "{} * sqrt({} / {})", "none": "{}"}
        formula = shape["none" if self.lr.per is None else self.lr.scaling]
        how = formula.format("reference", "batch", "per")
        rule = formula.format(f"{self.lr.reference:g}", self.batch, self.lr.per)
        until = "at" if self.lr.ramp == "constant" else "from"
        first = self.lr.first(self.batch)
        rows = [
            ("world", str(world), "workers"),
            ("images an epoch", f"{images:,}", "training images"),
            ("global batch", f"{self.batch:,}", "images in one step"),
            ("span", str(self.span), "images that share batch-norm statistics"),
            ("micro", str(self.micro), f"{self.micro // self.span} x span: images in one pass"),
            ("micro-batches a step", str(self.batch // self.micro), f"{self.batch} / {self.micro}"),
            ("micro-batches a worker", per_worker, f"{self.batch // self.micro} / {world}"),
            ("steps an epoch", f"{images / self.batch:.2f}", f"{images} / {self.batch}"),
            ("warm-up steps", str(warm), f"{self.lr.warmup:g} epochs {until} {first:g}"),
            ("peak rate", f"{peak:g}", f"{how} = {rule}"),
            ("decay", self.lr.decay, f"ends at epoch {self.epochs:g}"),
            ("optimizer", self.optimizer.title, self.optimizer.in_words()),
        ]
        rows += [
            (
                f"batch from epoch {stage.epoch:g}",
                f"{stage.batch:,}",
                f"{stage.batch // self.micro} micro-batches, rate x "
                f"{self._at_batch(1, stage.batch):g}, "
                f"momentum {self.momentum_at(index):g}",
            )
            for index, stage in enumerate(stages)
            if index > 0
        ]
        rows.append(("steps in all", f"{steps:,}", f"until {self.epochs:g} x {images} are seen"))
        rows.append(("images in all", f"{seen:,}", "sum of the batches"))
        rows.append(("evaluation sees", *self.data.evaluation_sees()))
        return rows + self.summed(world, grid)

    def summed(self, world: int, grid: tuple[int, int] | None) -> list[tuple[str, str, str]]:
        """How a plan sums gradients over workers, or why it gives way; no row without a plan."""
        if self.plan == "backend":
            return []
        given_way = ""
        if world == 1:
            given_way = "one worker has nothing to sum"
        elif self.deterministic:
            given_way = "a deterministic run sums along one tree in fp32"
        if given_way:
            return [("plan", "none", f"{self.plan} in {self.wire} gives way: {given_way}")]
        how = f"in {self.wire}, buckets of {self.bucket_mb:g} MB"
        if self.plan == "hybrid":
            choice = self.hybrid
            how += f"; {choice.small} up to {choice.threshold_mb:g} MB, then {choice.large}"
        if grid is not None and not self.plan.startswith("ring"):
            how += f"; on a grid of {grid[0]} x {grid[1]}"
            how += ", one row: --grid makes more" if grid[0] == 1 else ""
        return [("plan", self.plan, how)]

    # --- contradictions ------------------------------------------------------------------------

    def check(self) -> Config:
        """Refuse settings that contradict each other, in one sentence; returns itself."""
        self._check_model()
        self._check_batches()
        self._check_length()
        need(
            not (self.noise.follow and self.stages),
            "the batch follows either its stages or the noise: drop --stages or --noise.follow",
        )
        self.noise.check_for(self.batch, self.micro)
        need(
            self.optimizer.name != "lamb" or all(s.momentum is None for s in self.stages),
            "lamb has no momentum for a stage to set: write its stages EPOCH:BATCH",
        )
        need(
            self.precision in ("bf16", "fp16") or not self.half_weights,
            f"half_weights needs --precision bf16 or fp16, not {self.precision}",
        )
        need(
            self.bn_recompute % self.micro == 0,
            f"bn_recompute {self.bn_recompute} is not a multiple of micro {self.micro}: use "
            f"{-(-self.bn_recompute // self.micro) * self.micro}",
        )
        need(
            self.bn_recompute == 0 or self.ema == 0,
            "a moving average of the weights has averaged statistics: drop --ema or --bn-recompute",
        )
        need(
            self.wire == "fp32" or self.plan != "backend",
            f"--wire {self.wire} needs a plan of our own: give --plan torus, say, or --wire fp32",
        )
        return self

    def _check_model(self) -> None:
        if not self.model.startswith("own "):
            models.check(self.model, self.data.size)
        need(
            self.init != PRETRAINED or is_foreign(self.model),
            f"model {self.model!r} comes without weights: give --init FILE, or a model of timm's "
            f"or torchvision's",
        )
        need(
            self.zero_gamma or not self.model.startswith("own "),
            "a module of your own begins with the gammas that it has: leave zero_gamma as it is",
        )

    def _check_batches(self) -> None:
        need(
            self.micro % self.span == 0,
            f"micro {self.micro} is not a multiple of span {self.span}: "
            f"set --micro to {max(1, round(self.micro / self.span)) * self.span} or change --span",
        )
        for name, batch in [("batch", self.batch)] + [
            (f"the batch of the stage at epoch {s.epoch:g},", s.batch) for s in self.stages
        ]:
            lower = batch // self.micro * self.micro
            near = f"{lower} or {lower + self.micro}" if lower > 0 else str(self.micro)
            need(
                batch % self.micro == 0,
                f"{name} {batch} cannot be made of micro-batches of {self.micro}: "
                f"use {near}, or change --micro",
            )

        self._check_pixels()

    def _check_pixels(self) -> None:
        """No file may ask for memory without bound."""
        a_picture = self.data.size**2 * self.data.channels
        made = self.data.images if self.data.kind == "synthetic" else 0
        for what, images in (("one pass", self.micro), ("a synthetic set", made)):
            need(
                images * a_picture <= PIXELS,
                f"{what} of {images:,} images of {self.data.size} x {self.data.size} has more than "
                f"{PIXELS:,} values: take fewer images, or smaller ones",
            )

    def _check_length(self) -> None:
        """What lies at an epoch of the run must lie inside it."""
        from_python = (
            f"from Python, config.resized(epochs={self.epochs:g}) shortens the whole recipe"
        )
        begins = [stage.epoch for stage in self.all_stages]
        need(
            all(a < b for a, b in itertools.pairwise(begins)),
            f"the stages begin at epochs {shown(tuple(begins))}; each must begin after the one "
            f"before it",
        )
        need(
            begins[-1] < self.epochs or len(begins) == 1,
            f"a stage begins at epoch {begins[-1]:g} but the run ends at epoch {self.epochs:g}: "
            f"raise --epochs or drop the stage; {from_python}",
        )
        need(
            self.lr.warmup <= self.epochs,
            f"the warm-up of {self.lr.warmup:g} epochs does not fit into {self.epochs:g}: "
            f"lower --lr.warmup or raise --epochs; {from_python}",
        )
        need(
            self.lr.decay != "steps" or self.lr.drop_at[-1] < self.epochs,
            f"the rate drops at epoch {max(self.lr.drop_at, default=0):g} but the run ends at "
            f"epoch {self.epochs:g}: raise --epochs or change --lr.drop-at; {from_python}",
        )

    def resume_difference(self, asked: Config) -> str | None:
        """What `asked` would change of a run begun with this config, in words; None where it is
        the same run, because only settings differ that do not shape its result."""
        for (name, rule, before), (_, _, now) in zip(
            settings_of(self), settings_of(asked), strict=True
        ):
            if before != now and not rule.may_change:
                return f"{name} {shown(before)} but {shown(now)} is asked for now"
        return None

    # --- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        return written.to_json(self)

    @staticmethod
    def from_json(text: str) -> Config:
        """The config of that text, its settings not yet held against each other."""
        config: Config = written.from_json(Config, text)
        return config

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Config:
        """The config that a run has written."""
        try:
            return Config.from_json(written.read_text(path)).check()
        except UserError as error:
            raise UserError(f"{path} is not the config of a run: {error}") from None
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"the config {path} cannot be read: {reason}") from None
