"""The sections of the config: data, learning rate, optimizer and noise, each checking itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from dataclasses import dataclass
from typing import Literal

from megabatch import optim, schedule
from megabatch.config.settings import check_settings, need, setting, shown
from megabatch.errors import nearest
from megabatch.plans import names
from megabatch.schedule import Schedule, scaled

EPOCHS = 1e9
"""the longest run, in epochs"""
IMAGES = 10**9
"""the most images of a batch or of a synthetic set"""
PIXELS = 4 * 10**9
"""the most values of images that are in memory at once"""


@dataclass(frozen=True)
class Data:
    source: Literal["digits", "synthetic", "folder", "pack", "own"] = setting("digits")
    """digits (in scikit-learn), synthetic, folder (or another data set as it is published), pack
    (made by megabatch pack), own (from Python); a path alone is enough for folder and pack"""
    path: str = setting("", may_change=True)
    """a pack (FILE.arrow), or a folder of images: train/CLASS/*, val/CLASS/*"""
    local_copy: str = setting("", may_change=True)
    """copy the pack into this folder of node-local storage first, once a node"""
    size: int = setting(8, least=1, most=10_000)
    """side of the square images the model sees, in pixels"""
    channels: int = setting(1, least=1, most=3)
    """1 grey, 3 colour"""
    images: int = setting(1024, least=2, most=IMAGES)
    """how many images a synthetic set has"""
    classes: int = setting(10, least=1, most=1e6)
    """how many classes a synthetic set has"""
    val_share: float = setting(0.1, above=0, below=1, hint="give a share, 0.1 say")
    """share held out, chosen by hash, where the source has no val part of its own"""
    tuning_share: float = setting(0.0, least=0, below=1)
    """to choose settings by: hold this share of the training images out, by hash, and evaluate on
    them in place of the validation images (0: train on all)"""
    crop_area: tuple[float, float] = setting((1.0, 1.0), above=0, most=1)
    """random crops cover this share of the image's area, from and to"""
    crop_aspect: tuple[float, float] = setting((3 / 4, 4 / 3), least=0.01, most=100)
    """width over height of a random crop, from and to"""
    scale: tuple[int, int] = setting((0, 0), least=0, most=100_000)
    """instead of crops by area: shorter side drawn from and to (256 480), then a random square of
    size (0 0: off)"""
    flip: bool = setting(False)
    """mirror half of the images"""
    shift: int = setting(0, least=0, most=10_000)
    """move images by up to so many pixels each way"""
    jitter: tuple[float, float, float] = setting((0.0, 0.0, 0.0), least=0, below=1)
    """strength of random brightness, contrast and saturation (0.4 0.4 0.4, say; 0: none)"""
    lighting: float = setting(0.0, least=0, most=10)
    """strength of random light along the principal components of ImageNet's colours (0.1, say)"""
    resize: int = setting(0, least=0, most=100_000)
    """for evaluation: shorter side before the centre crop (0: whole images where training sees
    whole images, otherwise size * 8 / 7)"""
    threads: int = setting(0, least=0, most=1024, may_change=True)
    """threads or processes a worker decodes images with (0: its share of the cores)"""
    processes: Literal["auto", "always", "never"] = setting("auto", may_change=True)
    """decode in processes beside the one that trains (auto: where there is enough to read), or in
    its threads"""
    resident: Literal["auto", "always", "never"] = setting("auto", may_change=True)
    """images of one size that fit live in the GPU's memory (auto), must (always) or do not"""
    shared: Literal["auto", "always", "never"] = setting("auto", may_change=True)
    """a pack too large for a node's memory is shared out over all workers' (auto), is always, or
    never"""
    skip_bad: int = setting(0, least=0, most=IMAGES)
    """from a folder: so many unreadable images may be left out, all of which are looked for before
    the first step; with more there is no run"""

    @property
    def kind(self) -> str:
        """What is opened: the path decides where there is one."""
        if self.path == "" or self.source == "own":
            return self.source
        packed = self.path.endswith(".arrow") or os.path.isfile(self.path)
        return "pack" if packed and ".tar" not in self.path else "folder"

    @property
    def evaluation_share(self) -> float | None:
        """Of the shorter side, the square in the middle that evaluation sees; None: whole images,
        as training does."""
        if self.resize:
            return min(1.0, self.size / self.resize)
        uncropped = self.crop_area[0] == 1 and self.scale == (0, 0)
        return None if uncropped else 7 / 8

    def evaluation_sees(self) -> tuple[str, str]:
        """How much of an image, and why so much, in words."""
        fraction = self.evaluation_share if self.kind in ("pack", "folder") else None
        if fraction is None:
            return "all", "whole images, as training does"
        how = f"{self.size} / {self.resize}" if self.resize else "7 / 8, for training crops"
        return f"{100 * fraction:.3g} %", f"of the shorter side, in the middle: {how}"

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        check_settings(self, "data.")
        need(
            self.channels in (1, 3),
            f"data.channels is {self.channels}; it is 1 (grey) or 3 (colour)",
        )
        need(
            self.crop_area[0] <= self.crop_area[1],
            f"data.crop_area is {shown(self.crop_area)}; give two shares, the smaller first, 0.08 "
            f"1 say",
        )
        need(
            self.crop_aspect[0] <= self.crop_aspect[1],
            f"data.crop_aspect is {shown(self.crop_aspect)}; give two ratios, the smaller first, "
            f"0.75 1.33 say",
        )
        need(
            self.scale == (0, 0) or self.size <= self.scale[0] <= self.scale[1],
            f"data.scale is {shown(self.scale)}; give two lengths of the shorter side, the smaller "
            f"first and at least data.size ({self.size}), 256 480 say, or 0 0 for none",
        )


@dataclass(frozen=True)
class LearningRate:
    reference: float = setting(0.1, least=0, most=1e6)
    """the rate that is right for `per` images"""
    per: int | None = setting(256, least=1, most=IMAGES)
    """images the reference is for; the peak is reference * batch / per (None: the reference
    itself)"""
    scaling: Literal["linear", "sqrt", "none"] = setting("linear")
    """how the rate grows with the batch: linear, sqrt (of batch / per), none"""
    warmup: float = setting(5.0, least=0, most=EPOCHS)
    """epochs of warm-up"""
    start: float = setting(0.0, least=0, most=1e6)
    """rate at the first step of the warm-up, where the peak is higher (else it is the peak)"""
    ramp: Literal["linear", "quadratic", "constant"] = setting("linear")
    """shape of the warm-up; constant: the starting rate for all of it, then the peak at once"""
    decay: Literal["poly", "cosine", "steps", "constant"] = setting("poly")
    """shape of what follows the warm-up, to the end of the run"""
    power: float = setting(2.0, above=0, most=100)
    """of the polynomial decay"""
    decay_from_start: bool = setting(False)
    """the polynomial counts from the first step of the run, as Caffe's does, not from the
    warm-up's end"""
    drop_at: tuple[float, ...] = setting((), above=0, most=EPOCHS)
    """epochs of the run at which `steps` lowers the rate"""
    drop_factor: float = setting(0.1, above=0, most=1)
    """by which `steps` multiplies the rate"""
    end: float = setting(0.0, least=0, most=1e6)
    """rate at the end of a polynomial or cosine decay"""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        check_settings(self, "lr.")
        need(
            self.decay != "steps" or len(self.drop_at) > 0,
            "lr.decay is steps but lr.drop_at names no epochs: give --lr.drop-at 30 60 80, say",
        )
        need(
            all(a < b for a, b in itertools.pairwise((self.warmup, *self.drop_at)))
            or self.decay != "steps",
            f"lr.drop_at is {shown(self.drop_at)}; give epochs after the warm-up "
            f"({self.warmup:g}), each later than the one before it",
        )

        need(
            self.ramp != "constant" or self.start > 0 or self.warmup == 0,
            "lr.ramp is constant and lr.start is 0, so that nothing would be learnt until the "
            "warm-up's end: give --lr.start, the rate of a small batch",
        )

    def stretched(self, by: float) -> LearningRate:
        """The same shape for a run so many times as long."""
        return dataclasses.replace(
            self, warmup=self.warmup * by, drop_at=tuple(epoch * by for epoch in self.drop_at)
        )

    def peak(self, batch: int) -> float:
        """The rate that a run of this global batch warms up to."""
        return scaled(self.reference, batch, self.per, self.scaling)

    def first(self, batch: int) -> float:
        """The rate that the warm-up begins at: never above the peak, since Goyal's batches below
        256 have their own small rate from the first step on."""
        return min(self.start, self.peak(batch))

    def over(self, batch: int, epochs: float) -> Schedule:
        """The schedule of a run of so many epochs that begins with this global batch."""
        return _schedule(self, batch, epochs)


@functools.lru_cache  # asked for at each step
def _schedule(lr: LearningRate, batch: int, epochs: float) -> Schedule:
    peak = lr.peak(batch)
    rest = epochs - lr.warmup
    decay: schedule.Piece
    if lr.decay == "poly":
        skip = lr.warmup if lr.decay_from_start else 0.0
        decay = schedule.Poly(rest, lr.power, peak, lr.end, skip)
    elif lr.decay == "cosine":
        decay = schedule.Cosine(rest, peak, lr.end)
    elif lr.decay == "steps":
        drops = tuple(epoch - lr.warmup for epoch in lr.drop_at)
        decay = schedule.StepDecay(drops, lr.drop_factor, peak)
    else:
        decay = schedule.Constant(rest, peak)
    if lr.warmup == 0:
        return decay
    return schedule.join(schedule.Warmup(lr.warmup, peak, lr.first(batch), lr.ramp), decay)


_NOT_OF = {
    "lamb": ("trust", "policy", "nesterov", "form", "momentum_correction"),
    "muon": ("policy", "eps", "form", "momentum_correction"),
}
"""settings that an optimiser does not have"""


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = setting("lars")
    """lars (with trust None: SGD; with a policy: LARC), lamb or muon"""
    momentum: float = setting(0.9, least=0, below=1)
    """a stage of the batch may set its own"""
    weight_decay: float = setting(5e-5, least=0, most=1e3)
    """on weights of convolutions and linear layers; with Muon on the last layer's"""
    decay_all: bool = setting(False)
    """weight decay on biases and batch norm too, which Goyal and Jia spare"""
    trust: float | None = setting(0.001, least=0, most=1e3)
    """LARS's trust coefficient (None: no adaptation, plain SGD)"""
    policy: Literal["lars", "clip", "scale"] = setting("lars")
    """clip and scale are LARC's: decay left out of the ratio; clip never raises the rate"""
    eps: float = setting(0.0, least=0, most=1e3)
    """added to the denominator of LARS's ratio"""
    nesterov: bool = setting(False)
    """Nesterov's momentum"""
    form: Literal["paper", "pytorch"] = setting("paper")
    """paper: the rate inside the momentum buffer; pytorch: outside"""
    momentum_correction: bool = setting(False)
    """paper form: scale the buffer when the rate moves, as Goyal asks"""
    unadapted_rate: float = setting(1.0, least=0, most=1e3)
    """rate of biases, batch norm and what else does not adapt, as a multiple of the others'"""
    adapt_head: bool = setting(True)
    """the last layer adapts (no: it takes SGD's step, at unadapted_rate; with Muon always)"""

    def __post_init__(self) -> None:
        self.check()

    @property
    def title(self) -> str:
        """SGD, LARS, LARC, LAMB or Muon: what one name stands for depends on other settings."""
        if self.name == "lars":
            return ("LARS" if self.policy == "lars" else "LARC") if self.trust else "SGD"
        return {"lamb": "LAMB", "muon": "Muon"}.get(self.name, self.name)

    def in_words(self) -> str:
        """Its numbers, as far as it has them."""
        words = f"momentum {self.momentum:g}, weight decay {self.weight_decay:g}"
        if self.trust and self.name != "lamb":
            words += f", trust {self.trust:g}"
        if self.unadapted_rate != 1:
            words += f"; {self.unadapted_rate:g} of the rate for what does not adapt"
        return words

    @property
    def head_adapts(self) -> bool:
        """Whether the last layer does; with Muon never: its weights keep their lengths, and logits
        must be able to grow."""
        return self.adapt_head and self.name != "muon"

    def check(self) -> None:
        check_settings(self, "optimizer.")
        need(
            self.name in optim.names(),
            f"there is no optimizer {self.name!r}: {nearest(self.name, optim.names())}",
        )
        need(
            not self.momentum_correction or self.form == "paper",
            "momentum_correction belongs to --optimizer.form paper: "
            "in the pytorch form the rate is not in the buffer and there is nothing to correct",
        )
        need(
            not self.nesterov or self.momentum > 0,
            "nesterov needs a momentum above 0: give one, or --optimizer.no-nesterov",
        )
        need(
            self.name != "muon" or (self.trust or 0) > 0,
            "muon needs --optimizer.trust, the share of a weight that a step at rate 1 is long",
        )
        for one in dataclasses.fields(self):  # what belongs to LARS alone would be ignored
            if one.name not in _NOT_OF.get(self.name, ()):
                continue
            value, usual = getattr(self, one.name), one.default
            flag = one.name.replace("_", "-")
            remedy = f"no-{flag}" if usual is False else f"{flag} {usual}"
            need(
                value == usual,
                f"{self.name} has no {one.name}, which is {shown(value)} here: leave it away, or "
                f"give --optimizer.{remedy}",
            )


@dataclass(frozen=True)
class Hybrid:
    """Jia's choice by size. Buckets are never larger than bucket_mb but for a tensor that is so by
    itself: from bucket_mb up, the threshold parts fused tensors from large ones."""

    small: str = setting("three_phase:halving_doubling", may_change=True)
    """plan hybrid: how small tensors and fused ones are summed"""
    large: str = setting("torus", may_change=True)
    """plan hybrid: how those above the threshold are"""
    threshold_mb: float = setting(0.262144, above=0, most=1e6, may_change=True)
    """plan hybrid: the largest small one, in megabytes on the wire"""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        check_settings(self, "hybrid.")
        for name in (self.small, self.large):
            names.plan_of(name)

    @property
    def thresholds(self) -> tuple[tuple[int | None, str], ...]:
        """Up to so many bytes, that plan; None: all that is larger."""
        return ((round(self.threshold_mb * 1e6), self.small), (None, self.large))


@dataclass(frozen=True)
class Noise:
    follow: bool = setting(False)
    """the batch follows the gradient noise scale, by doubling and halving, within bounds"""
    least: int = setting(0, least=0, most=IMAGES)
    """smallest batch (0: the config's)"""
    most: int = setting(0, least=0, most=IMAGES)
    """largest batch (0: eight times the config's)"""
    multiple: float = setting(1.0, above=0, most=1e6)
    """the batch aimed at, as a multiple of the noise scale"""
    memory: float = setting(0.95, least=0, below=1)
    """decay a step of the two moving averages whose ratio is the noise scale"""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        check_settings(self, "noise.")

    def check_for(self, batch: int, micro: int) -> None:
        """Refuse bounds that a run which begins with this batch cannot keep."""
        if not self.follow:
            return
        for name, bound in (("least", self.least), ("most", self.most)):
            need(
                bound % micro == 0,
                f"noise.{name} {bound} cannot be made of micro-batches of {micro}",
            )
        need(
            self.least <= batch <= (self.most or batch),
            f"batch {batch} lies outside noise.least {self.least} and noise.most {self.most}",
        )
