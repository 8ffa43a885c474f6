"""Jia et al. 2018 (1807.11205): AlexNet in four minutes, with batch norm after pool5."""

from __future__ import annotations

from megabatch.config import Config, LearningRate, OptimizerConfig
from megabatch.recipes.imagenet import crops_of_256
from megabatch.recipes.jia2018 import jia_hybrid


def jia2018_alexnet() -> Config:
    """AlexNet-BN with batch norm after pool5, batch 64k, LARS on fp32 masters of fp16 weights.

    Command:   megabatch train jia2018_alexnet --data.path imagenet.arrow
    Published: 1,024 Tesla P40 (--micro 64), 95 epochs in 4 minutes, top-1 58.7 %

    The paper's: net, batch, epochs, precision, no decay on biases and batch norm, 64 images a GPU
    as the span, fp16 on the wire, the hybrid all-reduce (fc6 and fc7 by a plain ring). Rate,
    warm-up, decay, loss scale, crops and thresholds are not known: see the comments.
    """
    return Config(
        name="jia2018_alexnet",
        model="alexnet_bn_pool5",
        epochs=95,
        batch=65536,
        micro=512,
        span=64,  # 65,536 images on 1,024 GPUs
        precision="fp16",
        half_weights=True,
        loss_scale=None,  # the paper's factor is not known: dynamic
        plan="hybrid",
        wire="fp16",
        hybrid=jia_hybrid(),
        data=crops_of_256(227),  # stand-in: Caffe's
        # Stand-ins: the solver file of LARS's authors for AlexNet-BN at 32k, the largest batch that
        # has one, the rate not raised for 64k. `unadapted_rate` is explained in you2018_alexnet.
        lr=LearningRate(
            reference=32.0,
            per=65536,
            warmup=10,
            start=1.0,
            ramp="quadratic",
            decay="poly",
            power=2,
            decay_from_start=True,
        ),
        optimizer=OptimizerConfig(
            momentum=0.9, weight_decay=5e-4, trust=0.001, unadapted_rate=0.01
        ),
    )
