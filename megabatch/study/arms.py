"""Arms: what a study switches, one thing at a time, each a change of the config with a sentence.

`NAME=FLAGS` on the command line makes an arm of any flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megabatch.batch import Stage
from megabatch.config import Config

_SGD_RATE, _SGD_PER = 0.1, 256
"""Goyal's reference for linear scaling"""
_LAMB_RATE, _LAMB_PER = 0.04, 32768
"""of LAMB's authors for ResNet-50, by the square root of the batch (from memory)"""

_LARS_RATE, _LARS_PER, _LARS_UNADAPTED = 24.0, 4096, 0.1
"""the best on Tiny ImageNet, by the square root of the batch"""
_MUON_RATE, _MUON_UNADAPTED = 48.0, 0.05
"""for any batch; at 4,096 and 8,192 of those images 72 and 96 end higher, which their recipe has.
What does not adapt has the rate of LARS's"""
_TRUST = 0.001
_NOISE_PASSES = 8
"""of the least batch that follows the noise: with two, the estimate is wild"""


@dataclass(frozen=True)
class Arm:
    change: Callable[[Config], Config]
    says: str
    own_rate: bool = False
    """it has a learning rate of its own"""


def _set(**changed: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, **changed)


def _rate(**changed: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, lr=replace(config.lr, **changed))


def _constant_warmup(config: Config) -> Config:
    """The reference rate for as long as the warm-up takes, where that is lower than the peak."""
    low = config.lr.start or config.lr.reference
    if not config.lr.warmup or low >= config.lr.peak(config.batch):
        return config
    return _rate(ramp="constant", start=low)(config)


def _scaling(rule: str) -> Callable[[Config], Config]:
    """The reference rate carried to the batch by another rule, where that gives another rate."""

    def change(config: Config) -> Config:
        changed = _rate(scaling=rule)(config)
        same = changed.lr.peak(config.batch) == config.lr.peak(config.batch)
        return config if same else changed

    return change


def _optimizer(**changed: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, optimizer=replace(config.optimizer, **changed))


def _layerwise(name: str, **changed: Any) -> Callable[[Config], Config]:
    """Another optimizer, without what belongs to the one that was."""
    usual = {"trust": _TRUST, "policy": "lars", "form": "paper", "momentum_correction": False}
    return _optimizer(name=name, **(usual | changed))


def _sgd(config: Config) -> Config:
    if config.optimizer.trust is None:
        return config
    plain = _layerwise("lars", trust=None, form="pytorch", unadapted_rate=1.0)
    return _linear(plain(config))


def _lars(config: Config) -> Config:
    if config.optimizer.name == "lars" and config.optimizer.trust is not None:
        return config
    changed = _layerwise("lars", form="pytorch", unadapted_rate=_LARS_UNADAPTED)(config)
    return _rate(reference=_LARS_RATE, per=_LARS_PER, scaling="sqrt")(changed)


def _larc(config: Config) -> Config:
    """Its ratio bounds the rate that SGD would have, and what does not adapt has that rate."""
    clip = _optimizer(name="lars", trust=0.002, policy="clip", unadapted_rate=1.0)
    return _linear(clip(config))


def _linear(config: Config) -> Config:
    return _rate(reference=_SGD_RATE, per=_SGD_PER, scaling="linear")(config)


def _lamb(config: Config) -> Config:
    changed = _layerwise("lamb", weight_decay=1e-2, nesterov=False, unadapted_rate=1.0)(config)
    return _rate(reference=_LAMB_RATE, per=_LAMB_PER, scaling="sqrt")(changed)


def _muon(config: Config) -> Config:
    if config.optimizer.name == "muon":
        return config
    changed = _layerwise("muon", eps=0.0, unadapted_rate=_MUON_UNADAPTED)(config)
    return _rate(reference=_MUON_RATE, per=config.batch)(changed)


def _grow(config: Config) -> Config:
    """Two thirds of the batch for a third of the run, then twice that: as many steps, at the same
    rate."""
    unit = max(1, config.micro // 8 // config.span) * config.span  # or passes would be tiny
    first = max(1, round(2 / 3 * config.batch / unit)) * unit
    kept = _rate(reference=config.lr.peak(config.batch), per=None)(config)
    stages = (Stage(config.epochs / 3, 2 * first),)
    return replace(kept, batch=first, stages=stages, rate_follows_batch=False)


def _follow_noise(config: Config) -> Config:
    """From a quarter of the batch up to twice the batch; the rate goes with it, but for Muon's,
    which is a share of the weights at any batch. A step of one pass tells no noise, so the least
    batch is of eight, or of as many as it has spans."""
    first = max(2, config.batch // 4 // config.span) * config.span
    if first > config.batch:
        return config
    most = first << max(0, (2 * config.batch // first).bit_length() - 1)
    micro = max(1, min(config.micro, first // _NOISE_PASSES) // config.span) * config.span
    follows = config.optimizer.name != "muon"
    scale = first / config.batch if follows else 1.0
    kept = _rate(reference=config.lr.peak(config.batch) * scale, per=None)(config)
    noise = replace(config.noise, follow=True, least=first, most=most)
    return replace(kept, batch=first, micro=micro, noise=noise, rate_follows_batch=follows)


def _span(images: int) -> Callable[[Config], Config]:
    """Where the batch is made of such spans."""

    def change(config: Config) -> Config:
        if config.batch % images:
            return config
        micro = max(images, config.micro // images * images)
        return replace(config, span=images, micro=micro)

    return change


def _recompute(config: Config) -> Config:
    images = max(1, 8192 // config.micro) * config.micro
    return replace(config, bn_recompute=images, ema=0.0)


ARMS: dict[str, Arm] = {
    "no_warmup": Arm(_rate(warmup=0.0), "the full rate from the first step on (Goyal)"),
    "constant_warmup": Arm(_constant_warmup, "the reference rate during the warm-up (Goyal)"),
    "fixed_rate": Arm(_scaling("none"), "the reference rate, whatever the batch (Goyal)"),
    "sqrt_rate": Arm(_scaling("sqrt"), "the rate by the square root of the batch (Goyal)"),
    "sgd": Arm(_sgd, "SGD, at 0.1 times the batch over 256 (Goyal, You)", True),
    "lars": Arm(_lars, "LARS, its rate by the square root of the batch (You)", True),
    "larc": Arm(_larc, "LARC, which bounds SGD's linearly scaled rate layer by layer", True),
    "lamb": Arm(_lamb, "LAMB, its authors' rate by the square root of the batch", True),
    "muon": Arm(_muon, "Muon: orthogonal steps, each a share of its weight", True),
    "no_smoothing": Arm(_set(label_smoothing=0.0), "labels as they are (Mikami)"),
    "decay_all": Arm(_optimizer(decay_all=True), "decay on biases and batch norm too (Jia)"),
    "gamma_one": Arm(_set(zero_gamma=False), "gamma 1 in each block's last batch norm (Goyal)"),
    "moving_average": Arm(
        _set(bn_momentum=0.1, bn_recompute=0), "evaluation by batch norm's moving averages"
    ),
    "last_step": Arm(
        _set(bn_momentum=1.0, bn_recompute=0), "evaluation by the last step's statistics (Mikami)"
    ),
    "recompute": Arm(_recompute, "evaluation by statistics computed anew over 8,192 images"),
    "grow": Arm(_grow, "a batch that doubles after a third, in about as many steps (Mikami)"),
    "follow_noise": Arm(
        _follow_noise, "a batch that follows the noise, a quarter to twice as large"
    ),
    "span32": Arm(_span(32), "batch-norm statistics over 32 images"),
    "span64": Arm(_span(64), "batch-norm statistics over 64 images"),
    "span256": Arm(_span(256), "batch-norm statistics over 256 images"),
    "fp32": Arm(_set(precision="fp32", half_weights=False), "single precision"),
    "bf16": Arm(_set(precision="bf16", half_weights=False), "bf16 activations"),
    "fp16": Arm(_set(precision="fp16", half_weights=False), "fp16 activations"),
    "fp16_masters": Arm(
        _set(precision="fp16", half_weights=True), "fp16 weights too, with fp32 masters (Jia)"
    ),
    "share_1": Arm(_optimizer(unadapted_rate=1.0), "biases and batch norm at the full rate"),
    "share_10th": Arm(_optimizer(unadapted_rate=0.1), "biases and batch norm at a tenth of it"),
    "share_50th": Arm(_optimizer(unadapted_rate=0.02), "biases and batch norm at a fiftieth"),
    "pytorch_form": Arm(
        _optimizer(form="pytorch", momentum_correction=False), "the rate outside the buffer"
    ),
    "paper_form": Arm(
        _optimizer(form="paper", momentum_correction=False),
        "the rate inside the buffer, as the papers have it, uncorrected",
    ),
    "correction": Arm(
        _optimizer(form="paper", momentum_correction=True),
        "the rate inside the buffer, with momentum correction (Goyal)",
    ),
    "average": Arm(_set(ema=0.9, bn_recompute=0), "an average of the last 10 steps' weights"),
    "average_long": Arm(_set(ema=0.99, bn_recompute=0), "an average of the last 100 steps'"),
}
