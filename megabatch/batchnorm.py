"""Batch norm by spans: statistics over groups of `span` images inside a micro-batch.

Goyal 2017 and Mikami 2018 keep the number of images behind a statistic fixed whatever the batch.
The moving averages move once a step, from the mean of all micro-batches' statistics, so that every
worker holds the same buffers always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megabatch import kernels
from megabatch.errors import no_variance
from megabatch.layers import replace_layers


class SpanBatchNorm(_BatchNorm):
    """Takes the place of a batch-norm layer: the same parameters and buffers under the same names.

    Layers inside it, such as the activation of timm's, work on what it has normalised."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: _BatchNorm, span: int) -> None:
        super().__init__(layer.num_features, layer.eps, affine=False, track_running_stats=False)
        self.span = span
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name, inner in layer.named_children():
            self.add_module(name, inner)
        self.training = layer.training
        # A list, and tensors that stay: to set a module's attribute, or to make a tensor, in each
        # layer and pass takes longer than a small net's sums.
        self._found: list[Tensor] = []
        self._place: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def statistics(self) -> Tensor | None:
        """Means and variances of the last micro-batch since take(), averaged over its spans."""
        return self._found[0] if self._found else None

    def take(self) -> Tensor:
        """The statistics, once: the next pass writes over them. A layer in evaluation mode, or one
        that was not reached, gives its moving averages: they stay."""
        if self.training and self._found:
            return self._found.pop().flatten()
        return torch.cat([self.running_mean, self.running_var])

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions: one class serves 1d, 2d and 3d."""

    def forward(self, x: Tensor) -> Tensor:
        x = self._normalised(x)
        for inner in self._modules.values():
            x = x if inner is None else inner(x)
        return x

    def _normalised(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        span = min(self.span, len(x))
        groups, rest = divmod(len(x), span)
        if rest:
            raise ValueError(f"{len(x)} images are not a multiple of the span, {span}")
        if span * x.numel() == x.shape[0] * x.shape[1]:
            raise no_variance()
        if _at_once(x):
            by_rows = _normalise_on(x.device)
            x = x.contiguous(memory_format=torch.channels_last)
            weight, bias = self.weight, self.bias
            if weight is None:
                weight, bias = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
            normal, found = by_rows(x, weight, bias, span, self.eps, relu=False)
            self._found[:] = [found.mean(0)]
            return normal
        # With momentum 1 the "moving averages" that a call updates are the batch's own statistics.
        dtype = _statistics_dtype(x)
        if groups == 1:
            found, mean, var = self._place_for(x, dtype)
            self._found[:] = [found]
            return self._one_span(x, mean, var, self.weight, self.bias)
        found = x.new_zeros(2, groups, self.num_features, dtype=dtype)
        # A part of the images is a view of them, in any memory layout; their gradients are summed
        # over spans at once.
        rows = [
            [None] * groups if t is None else t.expand(groups, -1).unbind()
            for t in (self.weight, self.bias)
        ]
        spans = zip(x.split(span), *found, *rows, strict=True)
        parts = [self._one_span(*those) for those in spans]
        self._found[:] = [found.mean(1)]
        return torch.cat(parts)

    def _place_for(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Where one span's means and variances are written, both and each: always the same place,
        but for a compiler, which plans its own memory."""
        place, compiling = self._place, torch.compiler.is_compiling()
        if compiling or place is None or place[0].dtype != dtype or place[0].device != x.device:
            both = x.new_zeros(2, self.num_features, dtype=dtype)
            mean, var = both.unbind()
            place = both, mean, var
            if not compiling:
                self._place = place
        else:
            # What was there counts 0 times, and that of an overflow is no number. By .data: where
            # a layer is called twice, backward of the first call asks whether it was changed.
            place[0].data.zero_()
        return place

    def _one_span(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        # As nn.functional has it, without its checks, which cost a small net as much as the sums.
        return torch.batch_norm(
            x, weight, bias, mean, var, True, 1.0, self.eps, torch.backends.cudnn.enabled
        )


def _at_once(x: Tensor) -> bool:
    """Whether all spans of these features are normalised by one call."""
    return x.is_cuda and x.dim() == 4 and x.dtype != torch.float64


def _normalise_on(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Batch norm by spans of channels-last images on a GPU."""
    if torch.compiler.is_compiling() or not kernels.available(device):
        return normalise  # the compiler makes kernels of it
    from megabatch.kernels import span_norm

    return span_norm.normalise


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    span: int,
    eps: float = 1e-5,
    relu: bool = True,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """relu(batch norm of x by spans + residual), and each span's means and unbiased variances
    (spans x 2 channels): a view of channels-last images, no copies. The plain twin of the one in
    kernels/span_norm.py."""
    images, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).reshape(images // span, span * height * width, channels)
    rows = rows.to(_statistics_dtype(x))
    var, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
    y = (rows - mean) * torch.rsqrt(var + eps) * weight + bias
    y = y.view(images, height, width, channels).permute(0, 3, 1, 2)
    y = y if residual is None else y + residual
    count = rows.shape[1]
    statistics = torch.cat([mean, var * (count / max(count - 1, 1))], 2).detach()[:, 0]
    return (y.relu() if relu else y).to(x.dtype), statistics


def use_spans(module: nn.Module, span: int) -> Callable[[], None]:
    """Replace each batch-norm layer inside a module by one that works by spans; returns what undoes
    it."""

    def by_spans(layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, SpanBatchNorm) or not isinstance(layer, _BatchNorm):
            return None
        return SpanBatchNorm(layer, span)

    return replace_layers(module, by_spans)


def _averaging(module: nn.Module) -> list[SpanBatchNorm]:
    """The layers of a module that work by spans and keep moving averages."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, SpanBatchNorm) and layer.running_mean is not None
    ]


class MovingAverages:
    """The moving averages of all layers of a module that work by spans and keep some: they move
    together, once a step."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = _averaging(module)
        pairs = [(layer.running_mean, layer.running_var) for layer in self._layers]
        self._buffers = [buffer for pair in pairs for buffer in pair]
        self._counters = [
            layer.num_batches_tracked
            for layer in self._layers
            if layer.num_batches_tracked is not None
        ]
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.length = sum(self._sizes)

    def tensors(self) -> list[Tensor]:
        """All that move."""
        return [*self._buffers, *self._counters]

    def statistics(self, like: Tensor) -> Tensor:
        """Means and variances of the last micro-batch, of all layers, in one vector."""
        found = [layer.take() for layer in self._layers]
        return torch.cat(found).to(like) if found else like.new_empty(0)

    @torch.no_grad()
    def move(self, mean_statistics: Tensor, momentum: float, good: Tensor | None = None) -> None:
        """Move once, towards the mean of all micro-batches' statistics.

        Where `good`, a boolean on the device, is false they stay.
        """
        if not self._buffers:
            return
        aim = mean_statistics.to(self._buffers[0])
        if good is not None:
            aim = torch.where(good, aim, torch.cat(self._buffers))
        torch._foreach_lerp_(self._buffers, aim.split(self._sizes), momentum)
        if self._counters:
            torch._foreach_add_(self._counters, 1)


class InputMoments:
    """Mean and mean square of what comes into each layer of a module that keeps moving averages.

    Averaged over equal micro-batches they are those of all the images, exactly, as averages of
    variances would not be. In float64: the variance is a difference of the two.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = _averaging(module)
        self._found: dict[SpanBatchNorm, Tensor] = {}
        self.length = 2 * sum(layer.num_features for layer in self._layers)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While this lasts, each layer's inputs are looked at."""
        hooks = [layer.register_forward_pre_hook(self._note) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self._layers:
                layer.take()

    def _note(self, layer: SpanBatchNorm, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        others = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(x.to(_statistics_dtype(x)), others, correction=0)
        self._found[layer] = _moments(mean, var)

    def take(self) -> Tensor:
        """Of the last micro-batch, all layers' in one vector; a layer that was not reached gives
        its moving averages."""
        vectors = [
            self._found.pop(layer, _moments(layer.running_mean, layer.running_var)).flatten()
            for layer in self._layers
        ]
        return torch.cat(vectors)

    @torch.no_grad()
    def put(self, moments: Tensor) -> None:
        """In place of the moving averages, mean and variance of these moments."""
        sizes = [2 * layer.num_features for layer in self._layers]
        for layer, both in zip(self._layers, moments.split(sizes), strict=True):
            mean, square = both.view(2, -1)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_((square - mean * mean).clamp_min(0))


def _moments(mean: Tensor, var: Tensor) -> Tensor:
    mean, var = mean.double(), var.double()
    return torch.stack([mean, var + mean * mean])
