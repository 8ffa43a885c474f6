"""Mikami et al. 2018 (1811.05233), ImageNet in a flash: batch-size control and the 2D torus.

Its first version grew the batch; the second smoothed the labels. The number of workers may change
where the batch does: --workers 4,8, or stop there and resume on as many as are wanted.
"""

from __future__ import annotations

from dataclasses import replace

from megabatch.batch import Stage
from megabatch.config import Config
from megabatch.recipes.imagenet import crops_by_area
from megabatch.recipes.mlperf import mlperf


def mikami2018() -> Config:
    """ResNet-50, batch 34k that grows to 68k, LARS, summed over a 2D torus.

    Command:   megabatch train mikami2018 --data.path imagenet.arrow
    Published: 2,176 Tesla V100 (--micro 16), 34k then 68k, 90 epochs in 224 seconds, top-1 75.03 %

    The paper's, in its first version: both batches, epochs, batch norm without moving averages, 16
    images a GPU as the span, the torus, fp16 on the wire. Its grid is not known: --grid gives one
    (64 34, say), without it a row is a host. Rate, warm-up, momentum, decay, crops and the epoch at
    which the batch grows are not known: see the comments.
    """
    return replace(
        _with_settings_of(32768),
        name="mikami2018",
        batch=34816,
        span=16,  # 34,816 images on 2,176 GPUs
        # Stand-in: a third of the run. Where it grows is free; the rate does not grow with it, as
        # MLPerf's rates for 32k and 64k are nearly the same.
        stages=(Stage(30, 69632),),
        rate_follows_batch=False,
    )


def mikami2018_54k() -> Config:
    """ResNet-50, batch 54k, LARS, smoothed labels, summed over a 2D torus.

    Command:   megabatch train mikami2018_54k --data.path imagenet.arrow
    Published: 3,456 Tesla V100 (--micro 16), 90 epochs in 122 seconds, top-1 75.29 % (accuracy from
               memory)

    The paper's, in its second version: batch, smoothed labels, torus and precision as in the first.
    How strongly labels are smoothed is from memory. Rate, warm-up, momentum and decay stand in:
    MLPerf's for 58,880, the nearest batch it has, the rate in proportion.
    """
    return replace(
        _with_settings_of(58880),
        name="mikami2018_54k",
        batch=55296,
        span=16,  # 55,296 images on 3,456 GPUs
        label_smoothing=0.1,
    )


def mikami2018_119k() -> Config:
    """ResNet-50, batch 60k that grows to 119k, the largest the paper shows, over a 2D torus.

    Command:   megabatch train mikami2018_119k --data.path imagenet.arrow
    Published: 119k was reached (121,856 is 32 images on 3,808 GPUs); time and accuracy not known

    Only the largest batch is the paper's. That it is reached from half of it, as in the first
    record, and where, stands in, and so do the settings: MLPerf's for 65,536, its largest batch.
    """
    return replace(
        _with_settings_of(65536),
        name="mikami2018_119k",
        batch=60928,
        span=16,
        stages=(Stage(45, 121856),),
        rate_follows_batch=False,
        label_smoothing=0.1,
    )


def _with_settings_of(batch: int) -> Config:
    """What the three have in common, with MLPerf's rate, warm-up, momentum and decay for a batch as
    stand-ins."""
    row = mlperf(batch)
    return Config(
        model="resnet50",
        epochs=90,
        micro=256,
        bn_momentum=1.0,
        precision="fp16",
        loss_scale=256,  # of the authors' library's ImageNet example
        plan="torus",
        wire="fp16",
        data=crops_by_area(0.08),  # stand-in: Goyal's
        lr=row.lr,
        # eps is the default of the authors' library.
        optimizer=replace(row.optimizer, eps=1e-6),
    )
