"""Handwritten digits: the whole system on a laptop, with no download."""

from __future__ import annotations

from megabatch.batch import Stage
from megabatch.config import Config, Data, LearningRate, OptimizerConfig


def digits() -> Config:
    """A small ResNet on scikit-learn's 8 x 8 digits, LARS, warm-up, and a batch that grows twice.

    Command:   megabatch train digits
    Hardware:  two CPU cores, four workers
    Time:      15 s
    Accuracy:  98.3 % top-1 of 359 held-out digits
    """
    return Config(
        name="digits",
        model="small",
        epochs=20,
        batch=64,
        micro=16,
        span=16,
        stages=(Stage(8, 128), Stage(14, 256)),
        rate_follows_batch=True,
        label_smoothing=0.1,
        data=Data(source="digits", size=8, channels=1, shift=1, val_share=0.2),
        lr=LearningRate(reference=64.0, per=256, warmup=2, decay="poly", power=2),
        optimizer=OptimizerConfig(
            momentum=0.9,
            weight_decay=1e-4,
            trust=0.001,
            unadapted_rate=0.1,
            momentum_correction=True,
        ),
    )
