"""The training pass of a ResNet by kernels of our own: a second way to run the net of resnet.py.

Convolutions are cuDNN's; all between them is megabatch/kernels. The parameters stay the net's. Each
block is one autograd function, so the gradients of its weights are there as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megabatch.errors import no_variance
from megabatch.kernels import fold, gram, stem
from megabatch.kernels.batchnorm import affine_of_slots
from megabatch.kernels.batchnorm_backward import join
from megabatch.models.fused_blocks import (
    Block,
    Convolution,
    FusedBasicBlock,
    FusedBottleneck,
    Norm,
    Pair,
)


class Handover:
    """What a block's backward pass leaves for the block before: a gradient that is masked already,
    and its column sums."""

    def __init__(self) -> None:
        self._kept: tuple[int, int] | None = None
        self._sums: Tensor | None = None

    def leave(self, gradient: Tensor, sums: Tensor) -> None:
        self._kept, self._sums = (gradient.data_ptr(), gradient._version), sums

    def take(self, gradient: Tensor, result: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """The gradient of `result`, masked, and its sums. Where `result` was used elsewhere too,
        autograd has added to the gradient, and it is masked here."""
        sums, kept = self._sums, (gradient.data_ptr(), gradient._version)
        self._sums = None
        if sums is None or kept != self._kept:
            gradient = gradient.contiguous(memory_format=torch.channels_last)
            gradient, sums = join(gradient, None, result, span)
        return gradient, sums.sum(1)


class _RunBlock(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        block: Block,
        span: int,
        statistics: Tensor,
        before: Handover,
        after: Handover,
        *_: Tensor,
    ) -> Tensor:
        ctx.block, ctx.span, ctx.before, ctx.after = block, span, before, after
        return block.forward(ctx, x, span, statistics)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        g, sums = ctx.after.take(gradient, ctx.saved_tensors[0], ctx.span)
        d_x, slots, found = ctx.block.gradients(ctx, g, sums)
        ctx.before.leave(d_x, slots)
        shaped = [_shaped(d, p) for d, p in zip(found, ctx.block.parameters(), strict=True)]
        return d_x, None, None, None, None, None, *shaped


def _shaped(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with its parameter's dtype, shape and strides. Those of dimensions of one element
    count too: what copies many tensors at once takes them singly where they differ."""
    gradient = gradient.to(parameter.dtype).view_as(parameter)
    sizes = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(own == wanted for size, own, wanted in sizes if size > 1):
        return gradient.as_strided(parameter.shape, parameter.stride())
    return torch.empty_like(parameter).copy_(gradient)


def foldable(conv: Convolution) -> bool:
    """Whether fold.py takes a convolution: 7x7 with stride 2, of at most 3 channels."""
    outputs, inputs, *kernel = conv.half.shape
    usual = kernel == [7, 7] and conv.stride == 2 and conv.padding == 3
    return usual and inputs <= 3 and outputs == 64


class _RunStem(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        images: Tensor,
        pair: Pair,
        span: int,
        statistics: Tensor,
        after: Handover,
        *_: Tensor,
    ) -> Tensor:
        conv, norm = pair
        if foldable(conv):
            images = fold.fold(images, conv.half.dtype)
            y, slots, cut = fold.convolve(images, fold.fold_weight(conv.half), span)
            columns = statistics[:, norm.columns]
            found = affine_of_slots(slots, cut, norm.weight, norm.bias, norm.eps, columns)
        else:
            images = images.to(conv.half.dtype, memory_format=torch.channels_last)
            y = conv(images)
            found = norm.affine(y, span, statistics)
        out, picked, places = stem.pool(y, found, span)
        ctx.pair, ctx.span, ctx.after, ctx.found = pair, span, after, found
        ctx.save_for_backward(out, images, y, picked, places)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        out, images, y, picked, places = ctx.saved_tensors
        g, _ = ctx.after.take(gradient, out, ctx.span)
        d_y, gamma, beta = stem.pool_backward(g, y, picked, places, ctx.found, ctx.span)
        conv = ctx.pair[0]
        if foldable(conv):
            folded = fold.weight_gradient(images, d_y)
            weight = fold.unfold_weight(folded, conv.half.shape[1]).to(conv.weight.dtype)
        else:
            _, weight = conv.gradients(d_y, images, inputs=False)
        return None, None, None, None, None, _shaped(weight, conv.weight), gamma, beta


class _RunHead(torch.autograd.Function):
    """The mean over the picture and the last layer, with a half copy of its weight; gradients of
    the weight in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        mean = x.mean(dim=(2, 3))
        ctx.save_for_backward(mean, half)
        ctx.dtype, ctx.size = weight.dtype, x.shape[2:]
        return torch.addmm(bias.to(x.dtype), mean, half.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        mean, half = ctx.saved_tensors
        height, width = ctx.size
        if gradient.is_cuda and gradient.dtype != torch.float32:
            d_weight = torch.mm(gradient.t(), mean, out_dtype=torch.float32)
        else:
            d_weight = gradient.t() @ mean
        d_bias = gradient.sum(0, dtype=torch.float32)
        d_mean = (gradient @ half).div_(height * width)
        # Written channels last at once: autograd's own way is two passes and a transposition.
        d_x = d_mean[:, None, None, :].expand(-1, height, width, -1).contiguous()
        return d_x.permute(0, 3, 1, 2), None, d_weight.to(ctx.dtype), d_bias.to(ctx.dtype)


class ResNetPass:
    """The training pass of a net such as `resnet.ResNet`, in half precision, by spans.

    `halves` maps weights to the half copies that the pass reads: whoever updates the weights writes
    them too, or calls `refresh`. Half weights are read as they are, and have none.
    """

    def __init__(
        self,
        net: nn.Module,
        dtype: torch.dtype,
        span: int,
        wide: Callable[[int], bool] = lambda width: width <= 256,
    ) -> None:
        self.span, self.dtype = span, dtype
        norms, begin = {}, 0
        for module in net.modules():
            if isinstance(module, _BatchNorm):
                norms[module] = Norm(module, begin)
                begin += 2 * module.num_features
        self._length = begin

        def pair(conv: Any, norm: Any) -> Pair:
            return Convolution(conv, dtype), norms[norm]

        self._stem = pair(net.conv1, net.bn1)
        self._blocks: list[Block] = []
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for block in stage:  # type: ignore[union-attr]
                shortcut = pair(*block.downsample) if block.downsample else None
                pairs = [pair(block.conv1, block.bn1), pair(block.conv2, block.bn2)]
                if hasattr(block, "conv3"):
                    pairs.append(pair(block.conv3, block.bn3))
                    products = [pairs[2], *([shortcut] if shortcut else [])]
                    gram_form = all(map(_applies, products)) and wide(block.conv3.in_channels)
                    self._blocks.append(FusedBottleneck(pairs, shortcut, gram_form))
                else:
                    self._blocks.append(FusedBasicBlock(pairs, shortcut))
        fc: Any = net.fc
        self._fc, self._fc_half = fc, fc.weight.detach().to(dtype)
        convolutions = [self._stem[0], *(conv for b in self._blocks for conv, _ in b.all_pairs())]
        copies = {conv.weight: conv.half for conv in convolutions}
        copies[fc.weight] = self._fc_half
        self.halves: dict[Tensor, Tensor] = {
            weight: half for weight, half in copies.items() if weight.data_ptr() != half.data_ptr()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights into their half copies."""
        if self.halves:
            torch._foreach_copy_(list(self.halves.values()), list(self.halves))

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and each span's means and unbiased variances (spans x those of all batch norms,
        in the order of the net's modules)."""
        span = min(self.span, len(images))
        spans, rest = divmod(len(images), span)
        if rest:
            raise ValueError(f"{len(images)} images are not a multiple of the span, {span}")
        statistics = torch.empty((spans, self._length), dtype=torch.float32, device=images.device)
        conv, norm = self._stem
        before = Handover()
        x = _RunStem.apply(  # type: ignore[no-untyped-call]
            images, self._stem, span, statistics, before, conv.weight, norm.weight, norm.bias
        )
        for block in self._blocks:
            after = Handover()
            x = _RunBlock.apply(  # type: ignore[no-untyped-call]
                x, block, span, statistics, before, after, *block.parameters()
            )
            before = after
        if span * x.shape[2] * x.shape[3] == 1:  # as the plain layers refuse it
            raise no_variance()
        logits: Tensor = _RunHead.apply(  # type: ignore[no-untyped-call]
            x, self._fc_half, self._fc.weight, self._fc.bias
        )
        return logits, statistics


def _applies(pair: Pair) -> bool:
    outputs, inputs = pair[0].matrix.shape
    return gram.applies(inputs, outputs)
