"""The blocks of a ResNet by kernels of our own: few passes between cuDNN's convolutions.

A block keeps what its gradients need, and leaves the gradient of its input masked by the ReLU of
the block before and summed by column, as that block's batch norm wants it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megabatch.kernels import gram, pointwise
from megabatch.kernels.batchnorm import Affine, affine, apply
from megabatch.kernels.batchnorm_backward import backward, join
from megabatch.kernels.gram_backward import expand_backward


class Convolution:
    """A convolution's weight as the pass reads it: in half precision, channels last."""

    def __init__(self, layer: nn.Conv2d, dtype: torch.dtype) -> None:
        self.weight = layer.weight
        self.stride, self.padding = layer.stride[0], int(layer.padding[0])
        last = torch.channels_last
        self.half = self.weight.detach().to(dtype).contiguous(memory_format=last)
        if self.weight.dtype == dtype and self.half.data_ptr() != self.weight.data_ptr():
            self.weight.data = self.half  # half weights: one tensor, not two

    @property
    def matrix(self) -> Tensor:
        return self.half.flatten(1)

    def __call__(self, x: Tensor, stride: int | None = None) -> Tensor:
        return nn.functional.conv2d(x, self.half, None, stride or self.stride, self.padding)

    def gradients(
        self, d_y: Tensor, x: Tensor, stride: int | None = None, inputs: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight."""
        step, pad = [stride or self.stride] * 2, [self.padding] * 2
        d_x, d_weight, _ = torch.ops.aten.convolution_backward(
            d_y, x, self.half, None, step, pad, [1, 1], False, [0, 0], 1, [inputs, True, False]
        )
        return d_x, d_weight.to(self.weight.dtype)


class Norm:
    """A batch norm's parameters and its place in the vector of statistics."""

    def __init__(self, layer: _BatchNorm, begin: int) -> None:
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.columns = slice(begin, begin + 2 * layer.num_features)

    def affine(self, y: Tensor, span: int, statistics: Tensor) -> Affine:
        columns = statistics[:, self.columns]
        return affine(y, self.weight, self.bias, span, self.eps, columns)

    def expansion(
        self, z: Tensor, slots: Tensor, weight: Tensor, span: int, statistics: Tensor
    ) -> gram.Expansion:
        rows = span * z.shape[2] * z.shape[3]
        return gram.expansion(
            gram.gram(z, span), slots.sum(1), weight, self.weight, self.bias, rows, self.eps,
            statistics[:, self.columns],
        )  # fmt: skip


# Up to here a program of pointwise.descend keeps its weight; beyond, cuDNN and a pass are faster.
_DEEPEST = 256

# A convolution and the batch norm behind it.
Pair = tuple[Convolution, Norm]


class Block:
    """Convolutions with their batch norms, in a row, and those of the shortcut, if it has some."""

    def __init__(self, pairs: list[Pair], shortcut: Pair | None) -> None:
        self.pairs, self.shortcut = pairs, shortcut

    def all_pairs(self) -> list[Pair]:
        return [*self.pairs, *([self.shortcut] if self.shortcut else [])]

    def parameters(self) -> list[Tensor]:
        return [p for conv, norm in self.all_pairs() for p in (conv.weight, norm.weight, norm.bias)]

    def forward(self, ctx: Any, x: Tensor, span: int, statistics: Tensor) -> Tensor:
        """The block's output; what the way back needs is kept in ctx, the output first."""
        raise NotImplementedError

    def gradients(self, ctx: Any, g: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The masked gradient of the block's input, its column sums by part, and the gradients of
        `parameters`; from the masked gradient of its output and that one's sums."""
        raise NotImplementedError


class FusedBottleneck(Block):
    """1x1, 3x3, 1x1 and the shortcut. Where `wide`, the last batch norm and the shortcut's are
    taken from Gram matrices."""

    def __init__(self, pairs: list[Pair], shortcut: Pair | None, wide: bool) -> None:
        super().__init__(pairs, shortcut)
        self.wide = wide

    def forward(self, ctx: Any, x: Tensor, span: int, statistics: Tensor) -> Tensor:
        (conv1, norm1), (conv2, norm2), (conv3, norm3) = self.pairs
        y1 = conv1(x)
        f1 = norm1.affine(y1, span, statistics)
        z1, _ = apply(y1, f1, span, True)
        y2 = conv2(z1)
        f2 = norm2.affine(y2, span, statistics)
        z2, slots = apply(y2, f2, span, True, sums=self.wide)
        kept = [x, y1, z1, y2, z2]
        ctx.norms = [f1, f2]
        if self.shortcut:
            conv, norm = self.shortcut
            few, few_slots = pointwise.pick(x, span, conv.stride)
            kept.append(few)
        if self.wide:
            assert slots is not None
            e3 = norm3.expansion(z2, slots, conv3.matrix, span, statistics)
            ctx.norms.append(e3)
            if self.shortcut:
                e = norm.expansion(few, few_slots, conv.matrix, span, statistics)
                ctx.norms.append(e)
                both = (few, conv.matrix, e)
                out = gram.expand(z2, conv3.matrix, e3, span, shortcut=both)
            else:
                out = gram.expand(z2, conv3.matrix, e3, span, x)
        else:
            y3 = conv3(z2)
            f3 = norm3.affine(y3, span, statistics)
            ctx.norms.append(f3)
            kept.append(y3)
            if self.shortcut:
                y = conv(few, 1)
                f = norm.affine(y, span, statistics)
                ctx.norms.append(f)
                kept.append(y)
                out, _ = apply(y3, f3, span, True, y, f)
            else:
                out, _ = apply(y3, f3, span, True, x)
        ctx.save_for_backward(out, *kept)
        return out

    def gradients(self, ctx: Any, g: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        (conv1, _), (conv2, _), (conv3, _) = self.pairs
        _, x, y1, z1, y2, z2, *rest = ctx.saved_tensors
        f1, f2, n3, *n = ctx.norms
        span, added, stride = ctx.span, g, 1
        others: list[Tensor] = []
        if self.wide:
            d_z2, w3, gamma, beta = expand_backward(g, sums, z2, conv3.matrix, n3, span)
            if self.shortcut:
                conv, _ = self.shortcut
                added, *others = expand_backward(g, sums, rest[0], conv.matrix, n[0], span)
        else:
            d_y3, gamma, beta = backward(g, rest[-1 - len(n)], n3, span, False)
            d_z2, w3 = conv3.gradients(d_y3, z2)
            del d_y3
            if self.shortcut:
                conv, _ = self.shortcut
                d_y, *vectors = backward(g, rest[2], n[0], span, False)
                added, w = conv.gradients(d_y, rest[0], 1)
                others = [w, *vectors]
        if self.shortcut:
            stride = self.shortcut[0].stride
        d_y2, gamma2, beta2 = backward(d_z2, y2, f2, span, True, out=d_z2)
        d_z1, w2 = conv2.gradients(d_y2, z1)
        d_y1, gamma1, beta1 = backward(d_z1, y1, f1, span, True, out=d_z1)
        width, inputs = conv1.matrix.shape
        if gram.applies(width, inputs) and (width <= _DEEPEST or stride > 1):
            _, w1 = conv1.gradients(d_y1, x, inputs=False)
            d_x, slots = pointwise.descend(d_y1, conv1.matrix, x, span, added, stride)
        else:
            d_x, w1 = conv1.gradients(d_y1, x)
            if stride > 1:
                d_x[:, :, ::stride, ::stride] += added
            d_x, slots = join(d_x, added if stride == 1 else None, x, span)
        found = [w1, gamma1, beta1, w2, gamma2, beta2, w3, gamma, beta, *others]
        return d_x, slots, found


class FusedBasicBlock(Block):
    """Two 3x3 convolutions and the shortcut."""

    def forward(self, ctx: Any, x: Tensor, span: int, statistics: Tensor) -> Tensor:
        (conv1, norm1), (conv2, norm2) = self.pairs
        y1 = conv1(x)
        f1 = norm1.affine(y1, span, statistics)
        z1, _ = apply(y1, f1, span, True)
        y2 = conv2(z1)
        f2 = norm2.affine(y2, span, statistics)
        ctx.norms, kept = [f1, f2], [x, y1, z1, y2]
        if self.shortcut:
            conv, norm = self.shortcut
            few, _ = pointwise.pick(x, span, conv.stride)
            y = conv(few, 1)
            f = norm.affine(y, span, statistics)
            ctx.norms.append(f)
            kept += [few, y]
            out, _ = apply(y2, f2, span, True, y, f)
        else:
            out, _ = apply(y2, f2, span, True, x)
        ctx.save_for_backward(out, *kept)
        return out

    def gradients(self, ctx: Any, g: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        (conv1, _), (conv2, _) = self.pairs
        _, x, y1, z1, y2, *rest = ctx.saved_tensors
        f1, f2, *n = ctx.norms
        span = ctx.span
        d_y2, gamma2, beta2 = backward(g, y2, f2, span, False)
        d_z1, w2 = conv2.gradients(d_y2, z1)
        d_y1, gamma1, beta1 = backward(d_z1, y1, f1, span, True, out=d_z1)
        d_x, w1 = conv1.gradients(d_y1, x)
        found = [w1, gamma1, beta1, w2, gamma2, beta2]
        if self.shortcut:
            conv, _ = self.shortcut
            d_y, *vectors = backward(g, rest[1], n[0], span, False)
            d_few, w = conv.gradients(d_y, rest[0], 1)
            d_x[:, :, :: conv.stride, :: conv.stride] += d_few
            found += [w, *vectors]
            d_x, slots = join(d_x, None, x, span)
        else:
            d_x, slots = join(d_x, g, x, span)
        return d_x, slots, found
