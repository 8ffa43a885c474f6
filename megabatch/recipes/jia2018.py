"""Jia et al. 2018 (1807.11205), ImageNet in four minutes: half precision with LARS in fp32."""

from __future__ import annotations

from megabatch.config import Config, Hybrid, LearningRate, OptimizerConfig
from megabatch.recipes.imagenet import crops_by_area


def jia_hybrid() -> Hybrid:
    """The paper's two ways. Its thresholds are not known: both are the default size of a bucket, so
    that all that is fused goes one way and a tensor too large to be fused the other."""
    return Hybrid(small="hierarchical", large="ring", threshold_mb=25.0)


def jia2018() -> Config:
    """ResNet-50, batch 64k, LARS on fp32 masters of fp16 weights.

    Command:   megabatch train jia2018 --data.path imagenet.arrow
    Published: 2,048 Tesla P40 (--micro 32), 90 epochs in 6.6 minutes, top-1 75.8 %

    The paper's: batch, epochs, precision, no decay on biases and batch norm, 32 images a GPU as the
    span, fp16 on the wire, and the hybrid all-reduce: hierarchical for small and fused tensors, a
    plain ring for large ones. Rate, warm-up, momentum, decay, loss scale, crops and both thresholds
    are not known: see the comments.
    """
    return Config(
        name="jia2018",
        model="resnet50",
        epochs=90,
        batch=65536,
        micro=256,
        span=32,  # 65,536 images on 2,048 GPUs
        precision="fp16",
        half_weights=True,
        loss_scale=None,  # the paper's factor is not known: dynamic
        plan="hybrid",
        wire="fp16",
        hybrid=jia_hybrid(),
        data=crops_by_area(0.08),  # stand-in: Goyal's
        # Stand-ins: MLPerf's reference for 65,536, which decays to epoch 89.
        lr=LearningRate(reference=24.699, per=65536, warmup=31, decay="poly", power=2, end=1e-4),
        optimizer=OptimizerConfig(
            momentum=0.951807, weight_decay=1e-4, trust=0.001, momentum_correction=True
        ),
    )
