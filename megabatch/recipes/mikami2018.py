"""Mikami et al. 2018 (1811.05233), ImageNet in a flash: batch-size control."""

from __future__ import annotations

from megabatch.batch import Stage
from megabatch.config import Config, LearningRate, OptimizerConfig
from megabatch.recipes.imagenet import crops_by_area


def mikami2018() -> Config:
    """ResNet-50, batch 34k that grows to 68k, LARS, smoothed labels.

    Command:   megabatch train mikami2018 --data.path imagenet.arrow
    Published: 2,176 Tesla V100 (--micro 16), 34k then 68k, 90 epochs in 224 seconds, top-1 75.03 %
               (first version); 122 seconds on 3,456 at 54k (second version; smoothed labels)

    The paper's: both batches, epochs, smoothed labels, batch norm without moving averages, 16
    images a GPU as the span. Rate, warm-up, momentum, decay, crops and the epoch at which the batch
    grows are not known: see the comments.
    """
    return Config(
        name="mikami2018",
        model="resnet50",
        epochs=90,
        batch=34816,
        micro=256,
        span=16,  # 34,816 images on 2,176 GPUs
        # Stand-in: a third of the run. Where it grows is free; the rate does not grow with it, as
        # MLPerf's rates for 32k and 64k are nearly the same.
        stages=(Stage(30, 69632),),
        rate_follows_batch=False,
        label_smoothing=0.1,
        bn_momentum=1.0,
        precision="fp16",
        loss_scale=256,  # of the authors' library's ImageNet example
        data=crops_by_area(0.08),  # stand-in: Goyal's
        # Stand-ins: MLPerf's reference for 32,768; eps is the default of the authors' library.
        lr=LearningRate(reference=21.2, per=32768, warmup=16, decay="poly", power=2, end=1e-4),
        optimizer=OptimizerConfig(
            momentum=0.94, weight_decay=2.5e-5, trust=0.001, eps=1e-6, momentum_correction=True
        ),
    )
