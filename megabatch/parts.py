"""The parts of a run that hold state: module, masters, optimizer, engine, loss scale, average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import models
from megabatch.batchnorm import statistics_length, use_spans
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.ema import WeightAverage
from megabatch.finetune import load_initial
from megabatch.keyed import key_dropout
from megabatch.optim import Layerwise, build, parameter_groups
from megabatch.precision import LossScale, Masters, full_dtype
from megabatch.sync.buckets import GradientSum

# The control vector after its reserved entries: loss sum, top-1 count, top-5 count, then batch
# norm's.
COUNTS = 3


@dataclass(frozen=True)
class Parts:
    net: nn.Module
    masters: Masters
    optimizer: Layerwise
    engine: GradientSum
    scale: LossScale
    average: WeightAverage

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beyond weights and the optimizer's state."""
        return {
            **self.masters.tensors(),
            **self.scale.tensors(),
            **self.average.tensors(),
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        for part in (self.masters, self.scale, self.average):
            part.load(tensors)

    def layers(self) -> dict[str, tuple[float, float, float]]:
        """Trust ratio, weight norm and gradient norm of each adapted layer in the last step."""
        names: dict[Tensor, str] = {
            self.masters.of(p): name for name, p in self.net.named_parameters()
        }
        return {
            names[weight]: (float(seen.ratio), float(seen.weight_norm), float(seen.gradient_norm))
            for weight, seen in self.optimizer.ratios.items()
        }


def prepare(
    config: Config, cluster: Cluster, classes: int, model: nn.Module | None = None
) -> nn.Module:
    """The module of a run: the same weights on every worker, batch norm by spans, dropout keyed."""
    torch.manual_seed(config.seed)
    net = model
    if net is None:
        net = models.build(config.model, classes, config.data.channels, config.data.size)
    if config.init:
        load_initial(net, config.init)
    use_spans(net, config.span)
    key_dropout(net, config.seed)
    net.to(cluster.device, full_dtype(config))
    if cluster.world > 1:
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
    return net


def assemble(
    config: Config, cluster: Cluster, classes: int, model: nn.Module | None = None
) -> Parts:
    net = prepare(config, cluster, classes, model)
    settings = config.optimizer
    groups = parameter_groups(net, settings.weight_decay, share=settings.unadapted_rate)
    masters = Masters(net, config)
    groups = masters.groups(groups)
    optimizer = build(settings, groups)
    engine = GradientSum(
        net,
        cluster,
        COUNTS + statistics_length(net),
        tree=config.deterministic,
        bucket_bytes=config.bucket_mb * 1e6,
        masters=masters.twins,
        plan=None if config.plan == "backend" else config.plan,
        wire=config.wire,
    )
    scale = LossScale(config, cluster.device)
    average = WeightAverage(net, config, masters)
    return Parts(net, masters, optimizer, engine, scale, average)
