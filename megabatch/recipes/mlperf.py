"""MLPerf's ResNet-50 by batch: the reference convergence points of its training rounds 1.0 to 4.0.

Each row was run 10 times and more to 75.9 % by its submitter; all of them are LARS.
"""

from __future__ import annotations

from typing import NamedTuple

from megabatch.config import Config, LearningRate, OptimizerConfig
from megabatch.recipes.by_batch import fitted, proportional_batch, row_at
from megabatch.recipes.imagenet import IMAGES, crops_by_area

TARGET = 0.759


class ImagenetRow(NamedTuple):
    batch: int
    rate: float
    warmup: float
    momentum: float
    weight_decay: float
    epochs: float
    """of warm-up and decay together"""
    span: int


# Published are steps of decay. In the rows of 8,192 and 65,536 they are counted from the end of the
# warm-up (counted from the start, the rate would be 0 before the mean epoch of the target, 42 and
# 84.5), in the others from the start of the run.
ROWS = (
    ImagenetRow(1632, 7.4, 2, 0.9, 5e-5, 35, 204),
    ImagenetRow(3264, 10.5, 2, 0.9, 5e-5, 37, 204),
    ImagenetRow(4096, 10.0, 5, 0.9, 2e-4, 42, 64),
    ImagenetRow(8192, 17.0, 5, 0.9, 2e-4, 43.97, 64),
    ImagenetRow(13056, 12.8, 9, 0.9, 2.5e-5, 48, 204),
    ImagenetRow(32768, 21.2, 16, 0.94, 2.5e-5, 58, 128),
    ImagenetRow(49152, 19.405, 24, 0.951807, 1e-4, 70.82, 256),
    ImagenetRow(58880, 23.246, 29, 0.951807, 1e-4, 82.03, 230),
    ImagenetRow(65536, 24.699, 31, 0.951807, 1e-4, 88.96, 128),
)


def mlperf(batch: int = 3264, images: int | None = None) -> Config:
    """ResNet-50 to 75.9 %, LARS, with MLPerf's settings for a batch of 1.6k to 64k.

    Command:   megabatch train mlperf --data.path imagenet.arrow --batch 32768
    Published: 3,264 on 8 A100, 75.9 % after 35 epochs in 28.7 minutes;
               32,768 on 4,096 TPU v4, after 60 epochs in 11.4 seconds (both round 2.0)

    The rows are those of 1632, 3264, 4096, 8192, 13056, 32768, 49152, 58880 and 65536. Between them
    rate, warm-up and epochs go with the logarithm of the batch. On a data set of another size
    (`images`) a batch has the settings of the one that is the same share of ImageNet. Two published
    rows are left out, whose files leave a setting in doubt: 2048 its decay, 67840 its length.
    """
    row = row_at(ROWS, proportional_batch(batch, images, IMAGES))
    config = Config(
        name="mlperf",
        model="resnet50",
        epochs=row.epochs,
        batch=batch,
        micro=max(256, row.span),
        span=row.span,
        label_smoothing=0.1,
        precision="fp16",
        eval_every=4,
        target_accuracy=TARGET if images in (None, IMAGES) else None,
        data=crops_by_area(0.05),
        lr=LearningRate(
            reference=row.rate, per=batch, warmup=row.warmup, decay="poly", power=2, end=1e-4
        ),
        optimizer=OptimizerConfig(
            momentum=row.momentum,
            weight_decay=row.weight_decay,
            trust=0.001,
            momentum_correction=True,
        ),
    )
    return fitted(config)
