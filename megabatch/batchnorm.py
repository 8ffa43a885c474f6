"""Batch norm by spans: statistics over groups of `span` images inside a micro-batch.

Goyal 2017 and Mikami 2018 keep the number of images behind a statistic fixed whatever the batch.
The moving averages move once a step, from the mean of all micro-batches' statistics, so that every
worker holds the same buffers always.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SpanBatchNorm(_BatchNorm):
    """Takes the place of a batch-norm layer: the same parameters and buffers under the same
    names."""

    running_mean: Tensor
    running_var: Tensor
    statistics: Tensor

    def __init__(self, layer: _BatchNorm, span: int) -> None:
        super().__init__(layer.num_features, layer.eps, affine=False, track_running_stats=False)
        self.span = span
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.training = layer.training

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions: one class serves 1d, 2d and 3d."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        span = min(self.span, len(x))
        groups, rest = divmod(len(x), span)
        if rest:
            raise ValueError(f"{len(x)} images are not a multiple of the span, {span}")
        # Groups become channels, so that one call normalises each group by itself.
        folded = x if groups == 1 else x.unflatten(0, (groups, span)).transpose(0, 1).flatten(1, 2)
        mean = x.new_zeros(groups * self.num_features, dtype=_statistics_dtype(x))
        var = torch.zeros_like(mean)
        weight, bias = (t if t is None else t.repeat(groups) for t in (self.weight, self.bias))
        # With momentum 1 the "moving averages" that the call updates are the batch's own
        # statistics.
        out = nn.functional.batch_norm(folded, mean, var, weight, bias, True, 1.0, self.eps)
        self.statistics = torch.stack([mean, var]).view(2, groups, -1).mean(1)
        if groups == 1:
            return out
        return out.unflatten(1, (groups, self.num_features)).transpose(0, 1).flatten(0, 1)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def use_spans(module: nn.Module, span: int) -> None:
    """Replace each batch-norm layer inside a module by one that works by spans."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, SpanBatchNorm):
                setattr(parent, name, SpanBatchNorm(child, span))


def _moving(module: nn.Module) -> list[SpanBatchNorm]:
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, SpanBatchNorm) and layer.running_mean is not None
    ]


def statistics_length(module: nn.Module) -> int:
    return sum(2 * layer.num_features for layer in _moving(module))


def statistics(module: nn.Module, like: Tensor) -> Tensor:
    """Means and variances of the last micro-batch, of all layers, in one vector.

    A layer in evaluation mode, or one that was not reached, gives its moving averages: they stay.
    """
    found = []
    for layer in _moving(module):
        if layer.training and hasattr(layer, "statistics"):
            found.append(layer.statistics.flatten())
            del layer.statistics
        else:
            found += [layer.running_mean, layer.running_var]
    return torch.cat(found).to(like) if found else like.new_empty(0)


def move_averages(
    module: nn.Module, mean_statistics: Tensor, momentum: float, good: Tensor | None = None
) -> None:
    """Move the moving averages once, towards the mean of all micro-batches' statistics.

    Where `good`, a boolean on the device, is false they stay.
    """
    layers = _moving(module)
    parts = mean_statistics.split([2 * layer.num_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        mean, var = part.to(layer.running_mean).chunk(2)
        if good is not None:
            mean = torch.where(good, mean, layer.running_mean)
            var = torch.where(good, var, layer.running_var)
        layer.running_mean.lerp_(mean, momentum)
        layer.running_var.lerp_(var, momentum)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked += 1
