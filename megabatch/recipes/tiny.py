"""Tiny ImageNet (100,000 images of 64 px, 200 classes): large batches on one GPU, in minutes.

A batch is a larger share of these images than of ImageNet: 4,096 here is what 52k is there.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

from megabatch.config import Config, Data, LearningRate, OptimizerConfig

IMAGES = 100_000


class Row(NamedTuple):
    batch: int
    trust: float | None
    """LARS's coefficient; None: SGD"""
    rate: float
    warmup: float
    """epochs"""
    momentum: float
    weight_decay: float
    unadapted_rate: float
    """of biases and batch norm, as a share of the rate"""


# All numbers that are this data set's own. Between two rows, rate and warm-up go with the logarithm
# of the batch; what else a batch needs is its nearest row's.
ROWS = {
    90: (
        Row(256, None, 0.1, 5, 0.9, 1e-4, 1.0),
        Row(1024, 0.001, 10.0, 5, 0.9, 5e-5, 0.1),
        Row(4096, 0.001, 24.0, 5, 0.9, 5e-5, 0.1),
        Row(8192, 0.001, 36.0, 5, 0.9, 5e-5, 0.1),
    ),
    30: (
        Row(256, None, 0.1, 2, 0.9, 1e-4, 1.0),
        Row(1024, 0.001, 10.0, 5, 0.9, 5e-5, 0.1),
        Row(4096, 0.001, 24.0, 5, 0.9, 5e-5, 0.1),
        Row(8192, 0.001, 36.0, 5, 0.9, 5e-5, 0.1),
    ),
}


def tiny(batch: int = 4096) -> Config:
    """ResNet-50 on Tiny ImageNet at 64 px, 90 epochs, with the settings of its batch.

    Command:   megabatch train tiny --data.path tiny.arrow --batch 4096
    Hardware:  one GPU; tiny.arrow is made by megabatch pack FOLDER tiny.arrow --raw --size 64
    """
    return _tiny("tiny", batch, 90)


def tiny30(batch: int = 4096) -> Config:
    """ResNet-50 on Tiny ImageNet at 64 px, 30 epochs: few steps, the hard case of a large batch.

    Command:   megabatch train tiny30 --data.path tiny.arrow --batch 4096
    Hardware:  one GPU; tiny.arrow is made by megabatch pack FOLDER tiny.arrow --raw --size 64
    """
    return _tiny("tiny30", batch, 30)


def _tiny(name: str, batch: int, epochs: int) -> Config:
    row = min(ROWS[epochs], key=lambda row: abs(log(row.batch / batch)))
    return Config(
        name=name,
        model="resnet50",
        epochs=epochs,
        batch=batch,
        micro=1024 if batch % 1024 == 0 else 64,
        span=64,
        precision="bf16",
        label_smoothing=0.1,
        data=Data(
            source="folder",
            size=64,
            channels=3,
            classes=200,
            crop_area=(0.08, 1.0),
            crop_aspect=(3 / 4, 4 / 3),
            flip=True,
            resize=64,
        ),
        lr=LearningRate(
            reference=row.rate * batch / row.batch,
            per=batch,
            warmup=row.warmup,
            decay="poly",
            power=2,
        ),
        optimizer=OptimizerConfig(
            momentum=row.momentum,
            weight_decay=row.weight_decay,
            trust=row.trust,
            form="pytorch",
            unadapted_rate=row.unadapted_rate,
        ),
    )
