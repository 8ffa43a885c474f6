"""The configuration of a run: frozen dataclasses that state the global batch and the reference
rate.

Everything else (micro-batches, accumulation, steps, the peak rate) is derived here and shown in
one table. Contradictions are refused in words before anything starts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import types
import typing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megabatch import models, schedule
from megabatch.batch import Stage, count_steps
from megabatch.errors import UserError
from megabatch.schedule import Schedule, linear_scaling
from megabatch.tree import deal


@dataclass(frozen=True)
class Data:
    source: Literal["digits", "synthetic", "folder", "pack", "own"] = "digits"
    """digits (in scikit-learn), synthetic, folder (or another data set as it is published), pack
    (made by megabatch pack), own (from Python); a path alone is enough for folder and pack"""
    path: str = ""
    """a pack (FILE.arrow), or a folder of images: train/CLASS/*, val/CLASS/*"""
    stage: str = ""
    """copy the pack into this folder of node-local storage first, once a node"""
    size: int = 8
    """side of the square images the model sees, in pixels"""
    channels: int = 1
    """1 grey, 3 colour"""
    images: int = 1024
    """how many images a synthetic set has"""
    classes: int = 10
    """how many classes a synthetic set has"""
    val_share: float = 0.1
    """share held out, chosen by hash, where the source has no val part of its own"""
    crop_area: tuple[float, float] = (1.0, 1.0)
    """random crops cover this share of the image's area, from and to"""
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """width over height of a random crop, from and to"""
    scale: tuple[int, int] = (0, 0)
    """instead of crops by area: shorter side drawn from and to (256 480), then a random square of
    size (0 0: off)"""
    flip: bool = False
    """mirror half of the images"""
    shift: int = 0
    """move images by up to so many pixels each way"""
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """strength of random brightness, contrast and saturation (0.4 0.4 0.4, say; 0: none)"""
    lighting: float = 0.0
    """strength of random light along the principal components of ImageNet's colours (0.1, say)"""
    resize: int = 0
    """for evaluation: shorter side before the centre crop (0: size * 8 / 7)"""
    threads: int = 0
    """threads or processes a worker decodes images with (0: its share of the cores)"""
    processes: Literal["auto", "always", "never"] = "auto"
    """decode in processes beside the one that trains (auto: where there is enough to read), or in
    its threads"""
    resident: Literal["auto", "always", "never"] = "auto"
    """images of one size that fit live in the GPU's memory (auto), must (always) or do not"""
    shared: Literal["auto", "always", "never"] = "auto"
    """a pack too large for a node's memory is shared out over all workers' (auto), is always, or
    never"""
    skip_bad: int = 0
    """from a folder: so many unreadable images may be left out, all of which are looked for before
    the first step; with more there is no run"""

    @property
    def kind(self) -> str:
        """What is opened: the path decides where there is one."""
        if self.path == "" or self.source == "own":
            return self.source
        packed = self.path.endswith(".arrow") or os.path.isfile(self.path)
        return "pack" if packed and ".tar" not in self.path else "folder"


@dataclass(frozen=True)
class LearningRate:
    reference: float = 0.1
    """the rate that is right for `per` images"""
    per: int | None = 256
    """images the reference is for; the peak is reference * batch / per (None: the reference
    itself)"""
    warmup: float = 5.0
    """epochs of gradual warm-up"""
    start: float = 0.0
    """rate at the first step of the warm-up"""
    ramp: Literal["linear", "quadratic"] = "linear"
    """shape of the warm-up"""
    decay: Literal["poly", "cosine", "steps", "constant"] = "poly"
    """shape of what follows the warm-up, to the end of the run"""
    power: float = 2.0
    """of the polynomial decay"""
    whole: bool = False
    """the polynomial counts from the first step of the run, as Caffe's does, not from the
    warm-up's end"""
    at: tuple[float, ...] = ()
    """epochs of the run at which `steps` lowers the rate"""
    factor: float = 0.1
    """by which `steps` multiplies the rate"""
    end: float = 0.0
    """rate at the end of a polynomial or cosine decay"""

    def over(self, batch: int, epochs: float) -> Schedule:
        """The schedule of a run of so many epochs that begins with this global batch."""
        peak = linear_scaling(self.reference, batch, self.per)
        rest = epochs - self.warmup
        decay: schedule.Piece
        if self.decay == "poly":
            skip = self.warmup if self.whole else 0.0
            decay = schedule.Poly(rest, self.power, peak, self.end, skip)
        elif self.decay == "cosine":
            decay = schedule.Cosine(rest, peak, self.end)
        elif self.decay == "steps":
            decay = schedule.Steps(tuple(at - self.warmup for at in self.at), self.factor, peak)
        else:
            decay = schedule.Constant(rest, peak)
        if self.warmup == 0:
            return decay
        return schedule.join(schedule.Warmup(self.warmup, peak, self.start, self.ramp), decay)


@dataclass(frozen=True)
class Optimizer:
    name: Literal["lars", "lamb"] = "lars"
    """lars (with trust None: SGD; with a policy: LARC) or lamb"""
    momentum: float = 0.9
    """a stage of the batch may set its own"""
    weight_decay: float = 5e-5
    """on weights of convolutions and linear layers; never on biases and batch norm"""
    trust: float | None = 0.001
    """LARS's trust coefficient (None: no adaptation, plain SGD)"""
    policy: Literal["lars", "clip", "scale"] = "lars"
    """clip and scale are LARC's: decay left out of the ratio; clip never raises the rate"""
    eps: float = 0.0
    """added to the denominator of LARS's ratio"""
    nesterov: bool = False
    """Nesterov's momentum"""
    form: Literal["paper", "pytorch"] = "paper"
    """paper: the rate inside the momentum buffer; pytorch: outside"""
    momentum_correction: bool = False
    """paper form: scale the buffer when the rate moves, as Goyal asks"""
    share: float = 1.0
    """rate of biases and batch norm, which do not adapt, as a share of the whole"""


@dataclass(frozen=True)
class Noise:
    follow: bool = False
    """the batch follows the gradient noise scale, by doubling and halving, within bounds"""
    least: int = 0
    """smallest batch (0: the config's)"""
    most: int = 0
    """largest batch (0: eight times the config's)"""
    share: float = 1.0
    """the batch aimed at, as a share of the noise scale"""
    memory: float = 0.95
    """decay a step of the two moving averages whose ratio is the noise scale"""


@dataclass(frozen=True)
class Config:
    name: str = "custom"
    """what the run is called"""
    model: str = "small"
    """one of the bundled models"""
    epochs: float = 20.0
    """passes over the training images"""
    batch: int = 256
    """global batch: the images of one step over all workers"""
    micro: int = 32
    """images in one pass; a multiple of span that divides the batch"""
    span: int = 32
    """images that share batch-norm statistics"""
    stages: tuple[Stage, ...] = ()
    """batch-size control: EPOCH:BATCH or EPOCH:BATCH:MOMENTUM, in order"""
    follow: bool = True
    """the rate grows with the batch at a stage"""
    label_smoothing: float = 0.0
    """share of the target spread evenly over all classes"""
    bn_momentum: float = 0.1
    """weight of the present step in the moving averages of batch norm (1: no moving average)"""
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """of activations; bf16 and fp16 by autocast, weights and optimizer in fp32"""
    half_weights: bool = False
    """keep weights and gradients in bf16 or fp16 too, with fp32 masters (Jia)"""
    loss_scale: float | None = None
    """fixed factor of the loss in backward (None: dynamic for fp16, 1 otherwise)"""
    ema: float = 0.0
    """evaluate and save a moving average of the weights with this decay a step (0: none)"""
    init: str = ""
    """begin from the weights in this safetensors file; a head of other classes is made anew"""
    ratio_band: tuple[float, float] = (1e-5, 100.0)
    """an alarm line is printed when a layer's trust ratio leaves this band"""
    seed: int = 0
    """of the weights, the order and the augmentation"""
    deterministic: bool = False
    """the same bits on any number of workers: one order of summation, one thread a worker"""
    eval_every: float = 1.0
    """epochs between evaluations (0: only at the end)"""
    save_every: float = 1.0
    """epochs between checkpoints (0: only at the end)"""
    keep: int = 2
    """how many checkpoints stay"""
    target_accuracy: float | None = None
    """stop when an evaluation reaches this top-1 (0 to 1)"""
    bucket_mb: float = 25.0
    """gradients leave in buckets of this many megabytes"""
    plan: str = "backend"
    """how gradients are summed over workers: backend (NCCL's or gloo's own all-reduce), ring,
    hierarchical, torus, three_phase, blueconnect, hybrid, or auto (as bench sync measured)"""
    wire: Literal["fp32", "fp16", "bf16"] = "fp32"
    """what gradients travel in, by a plan of our own"""
    data: Data = field(default_factory=Data)
    noise: Noise = field(default_factory=Noise)
    lr: LearningRate = field(default_factory=LearningRate)
    optimizer: Optimizer = field(default_factory=Optimizer)

    # --- derived -------------------------------------------------------------------------------

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return (Stage(0.0, self.batch, self.optimizer.momentum), *self.stages)

    def lr_at(self, epoch: float, batch: int | None = None) -> float:
        """The learning rate at an epoch for a step of that batch (None: the first stage's)."""
        rate = self.lr.over(self.batch, self.epochs)(epoch)
        return rate * (batch or self.batch) / self.batch if self.follow else rate

    def momentum_at(self, stage: int) -> float:
        """The momentum in a stage: the last one that a stage so far has set."""
        given = [s.momentum for s in self.all_stages[: stage + 1] if s.momentum is not None]
        return given[-1]

    def resized(self, epochs: float | None = None, batch: int | None = None) -> Config:
        """The same recipe for another length or batch: warm-up, drops and stages keep their share
        of the run, later stages their multiple of the first batch."""
        stretch = 1.0 if epochs is None else epochs / self.epochs
        grow = 1 if batch is None else batch / self.batch
        lr = replace(
            self.lr,
            warmup=self.lr.warmup * stretch,
            at=tuple(at * stretch for at in self.lr.at),
        )
        stages = tuple(
            replace(s, epoch=s.epoch * stretch, batch=round(s.batch * grow)) for s in self.stages
        )
        return replace(
            self,
            epochs=self.epochs if epochs is None else epochs,
            batch=self.batch if batch is None else batch,
            lr=lr,
            stages=stages,
        )

    def derived(self, images: int, world: int) -> list[tuple[str, str, str]]:
        """What follows from the configuration: rows of (name, value, formula)."""
        stages = self.all_stages
        steps, seen = count_steps(stages, images, self.epochs)
        peak = linear_scaling(self.lr.reference, self.batch, self.lr.per)
        shares = [last - first for first, last in deal(self.batch // self.micro, world)]
        share = f"{min(shares)} to {max(shares)}" if min(shares) < max(shares) else str(max(shares))
        warm = count_steps(stages, images, min(self.lr.warmup, self.epochs))[0]
        scaled = "reference" if self.lr.per is None else "reference * batch / per"
        rule = (
            f"{self.lr.reference:g} * {self.batch} / {self.lr.per}" if self.lr.per else f"{peak:g}"
        )
        rows = [
            ("world", str(world), "workers"),
            ("images an epoch", f"{images:,}", "training images"),
            ("global batch", f"{self.batch:,}", "images in one step"),
            ("span", str(self.span), "images that share batch-norm statistics"),
            ("micro", str(self.micro), f"{self.micro // self.span} x span: images in one pass"),
            ("micro-batches a step", str(self.batch // self.micro), f"{self.batch} / {self.micro}"),
            ("micro-batches a worker", share, f"{self.batch // self.micro} / {world}"),
            ("steps an epoch", f"{images / self.batch:.2f}", f"{images} / {self.batch}"),
            ("warm-up steps", str(warm), f"{self.lr.warmup:g} epochs from {self.lr.start:g}"),
            ("peak rate", f"{peak:g}", f"{scaled} = {rule}"),
            ("decay", self.lr.decay, f"ends at epoch {self.epochs:g}"),
        ]
        rows += [
            (
                f"batch from epoch {stage.epoch:g}",
                f"{stage.batch:,}",
                f"{stage.batch // self.micro} micro-batches, rate x "
                f"{stage.batch / self.batch if self.follow else 1:g}, "
                f"momentum {self.momentum_at(index):g}",
            )
            for index, stage in enumerate(stages)
            if index > 0
        ]
        rows.append(("steps in all", f"{steps:,}", f"until {self.epochs:g} x {images} are seen"))
        rows.append(("images in all", f"{seen:,}", "sum of the batches"))
        return rows

    # --- contradictions ------------------------------------------------------------------------

    def check(self) -> Config:
        """Refuse contradictions, each in one sentence; returns itself."""

        def need(holds: bool, sentence: str) -> None:
            if not holds:
                raise UserError(sentence)

        need(self.span >= 1, f"span is {self.span}; it must be at least 1 image")
        need(self.micro >= 1, f"micro is {self.micro}; it must be at least 1 image")
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
                batch > 0 and batch % self.micro == 0,
                f"{name} {batch} cannot be made of micro-batches of {self.micro}: "
                f"use {near}, or change --micro",
            )
        need(self.epochs > 0, f"epochs is {self.epochs:g}; it must be more than 0")
        begins = [stage.epoch for stage in self.all_stages]
        need(
            all(a < b for a, b in itertools.pairwise(begins)),
            f"the stages begin at epochs {begins}; each must begin after the one before it",
        )
        need(
            begins[-1] < self.epochs or len(begins) == 1,
            f"a stage begins at epoch {begins[-1]:g} but the run ends at epoch {self.epochs:g}: "
            f"raise --epochs or drop the stage",
        )
        need(
            0 <= self.lr.warmup <= self.epochs,
            f"the warm-up of {self.lr.warmup:g} epochs does not fit into {self.epochs:g}: "
            f"lower --lr.warmup or raise --epochs",
        )
        need(
            self.lr.per is None or self.lr.per > 0, f"lr.per is {self.lr.per}; give images or None"
        )
        need(
            self.lr.reference >= 0, f"lr.reference is {self.lr.reference:g}; it cannot be negative"
        )
        need(
            self.lr.decay != "steps" or len(self.lr.at) > 0,
            "lr.decay is steps but lr.at names no epochs: give --lr.at 30 60 80, say",
        )
        for index in range(len(self.all_stages)):
            momentum = self.momentum_at(index)
            need(0 <= momentum < 1, f"momentum is {momentum:g}; it must be at least 0 and below 1")
        need(
            not self.optimizer.momentum_correction or self.optimizer.form == "paper",
            "momentum_correction belongs to --optimizer.form paper: "
            "in the pytorch form the rate is not in the buffer and there is nothing to correct",
        )
        need(
            0 <= self.label_smoothing < 1,
            f"label_smoothing is {self.label_smoothing:g}; it must be at least 0 and below 1",
        )
        need(0 < self.bn_momentum <= 1, f"bn_momentum is {self.bn_momentum:g}; give 0 < m <= 1")
        need(self.seed >= 0, f"seed is {self.seed}; it cannot be negative")
        need(
            self.target_accuracy is None or 0 < self.target_accuracy <= 1,
            f"target_accuracy is {self.target_accuracy}; give a share between 0 and 1, 0.97 say",
        )
        for name in ("eval_every", "save_every"):
            need(
                getattr(self, name) >= 0, f"{name} is negative; give epochs, or 0 for the end only"
            )
        need(
            self.precision in ("bf16", "fp16") or not self.half_weights,
            f"half_weights needs --precision bf16 or fp16, not {self.precision}",
        )
        need(self.loss_scale is None or self.loss_scale > 0, "loss_scale must be more than 0")
        need(0 <= self.ema < 1, f"ema is {self.ema:g}; it must be at least 0 and below 1")
        need(
            not (self.noise.follow and self.stages),
            "the batch follows either its stages or the noise: drop --stages or --noise.follow",
        )
        if self.noise.follow:
            self._check_noise(need)
        need(0 <= self.noise.memory < 1, "noise.memory must be at least 0 and below 1")
        need(self.noise.share > 0, "noise.share must be more than 0")
        need(
            not self.deterministic or (self.plan == "backend" and self.wire == "fp32"),
            "a deterministic run sums along one tree in fp32: drop --plan and --wire",
        )
        need(
            self.wire == "fp32" or self.plan != "backend",
            f"--wire {self.wire} needs a plan of our own: give --plan torus, say",
        )
        need(self.keep >= 1, f"keep is {self.keep}; at least one checkpoint must stay")
        need(self.bucket_mb > 0, f"bucket_mb is {self.bucket_mb:g}; it must be more than 0")
        self._check_data(need)
        if not self.model.startswith("own "):
            try:
                models.check(self.model, self.data.size)
            except ValueError as error:
                raise UserError(str(error)) from None
        return self

    def _check_noise(self, need: typing.Callable[[bool, str], None]) -> None:
        for name in ("least", "most"):
            bound = getattr(self.noise, name)
            need(
                bound >= 0 and bound % self.micro == 0,
                f"noise.{name} {bound} cannot be made of micro-batches of {self.micro}",
            )
        need(
            self.noise.least <= self.batch <= (self.noise.most or self.batch),
            f"batch {self.batch} lies outside noise.least {self.noise.least} and "
            f"noise.most {self.noise.most}",
        )

    def _check_data(self, need: typing.Callable[[bool, str], None]) -> None:
        data = self.data
        need(
            data.stage == "" or data.kind == "pack",
            "data.stage copies packs, but the images are no pack: make one with megabatch pack",
        )
        need(data.size >= 1, f"data.size is {data.size}; it must be at least 1 pixel")
        need(
            data.channels in (1, 3),
            f"data.channels is {data.channels}; it is 1 (grey) or 3 (colour)",
        )
        need(0 < data.val_share < 1, f"data.val_share is {data.val_share:g}; give a share, 0.1 say")
        need(
            0 < data.crop_area[0] <= data.crop_area[1] <= 1,
            f"data.crop_area is {data.crop_area}; give two shares, the smaller first, 0.08 1 say",
        )
        need(
            0 < data.crop_aspect[0] <= data.crop_aspect[1],
            f"data.crop_aspect is {data.crop_aspect}; give two ratios, the smaller first, 0.75 "
            f"1.33 say",
        )
        need(
            data.scale == (0, 0) or 0 < data.size <= data.scale[0] <= data.scale[1],
            f"data.scale is {data.scale}; give two lengths of the shorter side, the smaller first "
            f"and at least data.size ({data.size}), 256 480 say, or 0 0 for none",
        )
        need(
            all(0 <= strength < 1 for strength in data.jitter),
            f"data.jitter is {data.jitter}; give three strengths of at least 0 and below 1",
        )
        need(data.lighting >= 0, f"data.lighting is {data.lighting:g}; it cannot be negative")
        need(data.skip_bad >= 0, f"data.skip_bad is {data.skip_bad}; give a number, or 0")
        need(
            data.skip_bad == 0 or data.kind == "folder",
            "data.skip_bad leaves unreadable images of a folder out; for packs megabatch pack has "
            "--skip-bad",
        )
        need(data.threads >= 0, f"data.threads is {data.threads}; give a number, or 0 for all")
        need(data.shift >= 0, f"data.shift is {data.shift}; it cannot be negative")

    # --- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Config:
        config: Config = _build(Config, json.loads(text))
        return config


def _build(kind: Any, value: Any) -> Any:
    """A value of JSON as the annotated type says: nested dataclasses and tuples of them."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(  # type: ignore[operator]
            **{name: _build(hints[name], item) for name, item in value.items()}
        )
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_build(k, item) for k, item in zip(kinds, value, strict=True))
    if origin in (types.UnionType, typing.Union) and value is not None:
        return _build(next(k for k in inner if k is not type(None)), value)
    return float(value) if kind is float else value
