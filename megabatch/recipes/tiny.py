"""Tiny ImageNet (100,000 images of 64 px, 200 classes): large batches on one GPU, in minutes.

A batch is a larger share of these images than of ImageNet: 4,096 here is what 52k is there.
"""

from __future__ import annotations

from typing import NamedTuple

from megabatch.config import Config, Data, LearningRate, OptimizerConfig
from megabatch.recipes.by_batch import fitted, proportional_batch, row_at

IMAGES = 100_000


class TinyRow(NamedTuple):
    batch: int
    epochs: float
    optimizer: str
    """sgd or muon"""
    rate: float
    """of muon times a trust coefficient of 0.001"""
    warmup: float
    """epochs"""
    momentum: float
    weight_decay: float
    unadapted_rate: float
    """of biases, batch norm and, with Muon, the last layer, as a share of the rate"""
    tried: bool = True
    """runs of it are known"""


# All numbers that were chosen for these images, by the length of the run. At 1,024 those between
# what is best for Muon at 4,096 and, over 30 epochs, at 256 (24, the last layer at 0.4).
LONG = (
    TinyRow(256, 90, "sgd", 0.2, 2, 0.9, 5e-4, 1.0),
    TinyRow(1024, 90, "muon", 48.0, 3.5, 0.9, 5e-4, 0.0292, tried=False),
    TinyRow(4096, 90, "muon", 72.0, 5, 0.9, 5e-4, 0.0333),
    TinyRow(8192, 90, "muon", 96.0, 5, 0.9, 5e-4, 0.0375),
)
SHORT = (
    TinyRow(256, 30, "sgd", 0.4, 2, 0.9, 1e-4, 1.0),
    TinyRow(1024, 30, "muon", 48.0, 3.5, 0.9, 5e-5, 0.0292, tried=False),
    TinyRow(4096, 30, "muon", 72.0, 5, 0.9, 5e-5, 0.0333),
    TinyRow(8192, 30, "muon", 96.0, 8, 0.9, 5e-5, 0.025),
)


def tiny(batch: int = 4096, images: int | None = None) -> Config:
    """ResNet-50 on Tiny ImageNet at 64 px, 90 epochs, with the settings of its batch.

    Command:   megabatch train tiny --data.path tiny.arrow --batch 4096
    Hardware:  one GPU; megabatch pack FOLDER tiny.arrow --raw --size 64 makes the pack
    """
    return _tiny("tiny", LONG, batch, images)


def tiny30(batch: int = 4096, images: int | None = None) -> Config:
    """ResNet-50 on Tiny ImageNet at 64 px, 30 epochs: few steps, the hard case of a large batch.

    Command:   megabatch train tiny30 --data.path tiny.arrow --batch 4096
    Hardware:  one GPU; megabatch pack FOLDER tiny.arrow --raw --size 64 makes the pack
    """
    return _tiny("tiny30", SHORT, batch, images)


def _tiny(name: str, rows: tuple[TinyRow, ...], batch: int, images: int | None) -> Config:
    row = row_at(rows, proportional_batch(batch, images, IMAGES))
    config = Config(
        name=name,
        model="resnet50",
        epochs=row.epochs,
        batch=batch,
        micro=1024,
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
            resize=64,  # whole images: they have no margin to cut off
        ),
        lr=LearningRate(reference=row.rate, per=batch, warmup=row.warmup, decay="poly", power=2),
        optimizer=OptimizerConfig(
            name="muon" if row.optimizer == "muon" else "lars",
            momentum=row.momentum,
            weight_decay=row.weight_decay,
            trust=None if row.optimizer == "sgd" else 0.001,
            form="paper" if row.optimizer == "muon" else "pytorch",
            unadapted_rate=row.unadapted_rate,
        ),
    )
    return fitted(config)
