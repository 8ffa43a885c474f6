"""Batch norm's statistics computed anew before an evaluation (Goyal 2017, on the validation curves
of large batches).

A large batch takes few steps, and moving averages lag behind the weights early on. Here each layer
gets the mean and variance of its inputs over the first N images of the training order, with the
weights as they are and normalised by spans as in training.
"""

from __future__ import annotations

import torch

from megabatch.batch import Step
from megabatch.batchnorm import InputMoments
from megabatch.cluster import Cluster
from megabatch.data.loader import StepLoader
from megabatch.parts import Parts
from megabatch.precision import autocast
from megabatch.step import key_draws
from megabatch.sync.summation import TreeSum
from megabatch.tree import deal


@torch.no_grad()
def recompute_statistics(parts: Parts, loader: StepLoader, images: int, cluster: Cluster) -> None:
    """Put the statistics over so many training images in the place of the moving averages; every
    worker calls it, and all end with the same bits, on any number of them."""
    moments = InputMoments(parts.net)
    if images == 0 or moments.length == 0:
        return
    count = images // parts.config.micro
    like = torch.empty(0, dtype=torch.float64, device=cluster.device)
    total = TreeSum(moments.length, like)
    total.begin(count, deal(count, cluster.world)[cluster.rank])
    parts.net.train()
    with moments.noted(), autocast(parts.config, cluster.device):
        for micro in loader.micro_batches(Step(index=0, seen=0, batch=images, epoch=0.0, stage=0)):
            key_draws(parts, micro)
            parts.net(micro.images)
            total.push(moments.take())
    with parts.engine.blocked("the end of batch norm's statistics"):
        mean = total.all_reduce(cluster) / count
    moments.put(mean)
