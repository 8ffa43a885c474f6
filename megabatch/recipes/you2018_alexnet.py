"""You et al. 2018, AlexNet with batch norm under LARS at 32k (1708.03888, 1709.05011)."""

from __future__ import annotations

from megabatch.config import Config, LearningRate, OptimizerConfig
from megabatch.recipes.imagenet import crops_of_256


def you2018_alexnet() -> Config:
    """AlexNet-BN, batch 32k, LARS.

    Command:   megabatch train you2018_alexnet --data.path imagenet.arrow
    Published: 2,048 Xeon Platinum 8160 (--micro 16), 100 epochs in 11 minutes, top-1 58.6 %

    Batch and epochs are the paper's; rate, ramp and decay are those of the authors' solver file for
    this net and batch. Only `unadapted_rate` stands in: see the comment.
    """
    return Config(
        name="you2018_alexnet",
        model="alexnet_bn",
        epochs=100,
        batch=32768,
        micro=512,
        span=16,  # 32,768 images on 2,048 processors
        plan="ring",  # of the clusters' MPI
        data=crops_of_256(227),
        lr=LearningRate(
            reference=32.0,
            per=32768,
            warmup=10.23,  # 400 steps
            start=1.0,
            ramp="quadratic",
            decay="poly",
            power=2,
            # Caffe's poly counts the ramp: after it the rate goes on at 81 %.
            decay_from_start=True,
        ),
        # The authors' code adapts biases too, at 0.006 to 1.3 of the rate in the paper's table of
        # norms. Here biases do not adapt; a hundredth of the rate is at the low end of that.
        optimizer=OptimizerConfig(
            momentum=0.9, weight_decay=5e-4, trust=0.001, unadapted_rate=0.01
        ),
    )
