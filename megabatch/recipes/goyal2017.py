"""Goyal et al. 2017 (1706.02677), ImageNet in one hour: linear scaling and gradual warm-up."""

from __future__ import annotations

from dataclasses import replace

from megabatch.config import Config, LearningRate, OptimizerConfig
from megabatch.recipes.imagenet import crops_by_area


def goyal2017() -> Config:
    """ResNet-50, batch 8k, SGD: linear scaling and gradual warm-up.

    Command:   megabatch train goyal2017 --data.path imagenet.arrow
    Published: 256 Tesla P100 (--micro 32), 90 epochs in 1 hour, top-1 76.26 % +- 0.09

    Every number is the paper's. It names no colour jitter, so there is none. Zero gamma in each
    block's last batch norm is the model's, no decay on batch norm the parameter groups'. Gradients
    are summed in the paper's three phases, halving-doubling between servers (a row of the grid is
    a server). What it holds itself against: --lr.ramp constant, --lr.warmup 0, --lr.scaling sqrt
    or none.
    """
    return Config(
        name="goyal2017",
        model="resnet50",
        epochs=90,
        batch=8192,
        micro=256,
        span=32,
        bn_momentum=0.1,
        plan="three_phase",
        data=crops_by_area(0.08),
        lr=LearningRate(
            reference=0.1,
            per=256,
            warmup=5,
            start=0.1,
            decay="steps",
            drop_at=(30, 60, 80),
            drop_factor=0.1,
        ),
        # The rate is outside the buffer: the paper's reference form, which needs no correction.
        optimizer=OptimizerConfig(
            momentum=0.9, weight_decay=1e-4, trust=None, nesterov=True, form="pytorch"
        ),
    )


def goyal2017_resnet101() -> Config:
    """ResNet-101, batch 8k, SGD: the same settings for a deeper net.

    Command:   megabatch train goyal2017_resnet101 --data.path imagenet.arrow
    Published: 256 Tesla P100 (--micro 32), 90 epochs in 92.5 minutes, top-1 77.64 % +- 0.09

    Nothing but the net differs from goyal2017, as in the paper.
    """
    return replace(goyal2017(), name="goyal2017_resnet101", model="resnet101")
