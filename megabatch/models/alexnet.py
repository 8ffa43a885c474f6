"""AlexNet of the large-batch records: with LRN or batch norm (You 2018), and as Jia 2018 has it.

Layers have the names, order and groups of Caffe's model, and its fillers are the initialisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODELS = {"alexnet": 227, "alexnet_bn": 227, "alexnet_bn_pool5": 227}

IMAGE_SIZE = 227

# Our images are standardised. Caffe's were pixels of 0 to 255 less their mean (AlexNet), or a 256th
# of that (AlexNet-BN). Times the deviation of ImageNet's pixels, ours are what its fillers were set
# for; without it LRN would do nothing and biases of 0.1 would drown the plain net's signal.
PIXEL_DEVIATION = 57.6

# Caffe's fillers for conv1 to conv5, then fc6 to fc8: weights are N(0, deviation), biases constant.
WEIGHT_DEVIATIONS = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
PLAIN_BIASES = (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0)
BN_BIASES = (0.01, 0.01, 0.01, 0.01, 0.01, 0.1, 0.1, 0.01)

# Where AlexNet-BN has its batch norms, and their channels.
BN_AFTER = {"pool1": 96, "pool2": 256, "relu3": 384, "relu4": 384}


def alexnet(num_classes: int = 1000, channels: int = 3) -> AlexNet:
    """Caffe's AlexNet, with local response normalisation before its first two pools."""
    norms = {"relu1": LocalResponseNorm(), "relu2": LocalResponseNorm()}
    return AlexNet(num_classes, channels, norms, PLAIN_BIASES, PIXEL_DEVIATION)


def alexnet_bn(num_classes: int = 1000, channels: int = 3) -> AlexNet:
    """AlexNet-BN of the LARS papers: batch norm before conv2 to conv5, none after pool5.

    It has no gamma and beta, as in the authors' model: the next convolution can do their work.
    """
    norms = {name: _batch_norm(width, affine=False) for name, width in BN_AFTER.items()}
    return AlexNet(num_classes, channels, norms, BN_BIASES, PIXEL_DEVIATION / 256)


def alexnet_bn_pool5(num_classes: int = 1000, channels: int = 3) -> AlexNet:
    """Jia 2018: AlexNet-BN with one more batch norm, between pool5 and fc6.

    Convolutions, groups, dropout and the other four batch norms are where AlexNet-BN has them. All
    five have gamma and beta, since the paper measures what decaying these costs. Its initialisation
    and the scale of its images were not published: both are AlexNet-BN's here.
    """
    widths = BN_AFTER | {"pool5": 256}
    norms = {name: _batch_norm(width, affine=True) for name, width in widths.items()}
    return AlexNet(num_classes, channels, norms, BN_BIASES, PIXEL_DEVIATION / 256)


class AlexNet(nn.Sequential):
    """The layers in order, with each of `norms` set in after the layer it is filed under."""

    def __init__(
        self,
        num_classes: int,
        channels: int,
        norms: Mapping[str, nn.Module],
        biases: Sequence[float],
        pixel_scale: float,
    ):
        super().__init__()
        self.pixel_scale = pixel_scale
        for name, layer in _layers(num_classes, channels).items():
            self.add_module(name, layer)
            if name in norms:
                self.add_module(f"norm{name[-1]}", norms[name])
        weighted = (layer for layer in self if isinstance(layer, nn.Conv2d | nn.Linear))
        for layer, deviation, bias in zip(weighted, WEIGHT_DEVIATIONS, biases, strict=True):
            nn.init.normal_(layer.weight, std=deviation)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, bias)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            height, width = images.shape[-2:]
            raise ValueError(f"AlexNet takes images of 227 x 227 px, not {height} x {width}")
        x = images * self.pixel_scale
        for layer in self:
            x = layer(x)
        return x


class LocalResponseNorm(nn.Module):
    """x / (1 + alpha * mean of x^2 over `size` neighbouring channels) ** beta.

    It squares in fp32 at least, as fp16 cannot hold the square of 256. nn.LocalResponseNorm does
    not, and its avg_pool3d has no deterministic backward pass on CUDA.
    """

    def __init__(self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75):
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        reach = self.size // 2
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = F.pad(wide.square(), (0, 0, 0, 0, reach, reach))
        neighbours = [squares.narrow(1, shift, x.shape[1]) for shift in range(self.size)]
        mean = sum(neighbours[1:], start=neighbours[0]) / self.size
        return (wide / (1 + self.alpha * mean).pow(self.beta)).to(x.dtype)


class FoldedConv2d(nn.Conv2d):
    """A convolution whose kernel is wider than its stride. On a GPU the pixels of a stride's square
    are channels first: what is left is a convolution without stride that reads more channels, for
    which the libraries have fast kernels, where for three channels they have slow ones.

    It is the same sum, of the same products and of zeros for a kernel that is brought to whole
    squares; in another order, so a CPU keeps to the plain way and its bits.
    """

    fold = True

    def forward(self, x: Tensor) -> Tensor:
        return self.folded(x) if self.fold and x.is_cuda else super().forward(x)

    def folded(self, x: Tensor) -> Tensor:
        (stride, _), (width, _) = self.stride, self.kernel_size
        squares = -(-width // stride)
        sides = [((side - width) // stride + squares) * stride for side in x.shape[-2:]]
        # Pixels that no window reaches are cut off: there the padding is negative.
        images = F.pad(x, (0, sides[1] - x.shape[-1], 0, sides[0] - x.shape[-2]))
        kernel = F.pad(self.weight, (0, squares * stride - width) * 2)
        return F.conv2d(_fold(images, stride), _fold(kernel, stride), self.bias)


def _fold(x: Tensor, stride: int) -> Tensor:
    """Squares of pixels as channels, which lie last in memory."""
    count, channels, height, width = x.shape
    split = x.reshape(count, channels, height // stride, stride, width // stride, stride)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).permute(0, 3, 1, 2)


def _layers(num_classes: int, channels: int) -> dict[str, nn.Module]:
    return {
        "conv1": FoldedConv2d(channels, 96, 11, stride=4),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, stride=2),
        "conv2": nn.Conv2d(96, 256, 5, padding=2, groups=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(3, stride=2),
        "conv3": nn.Conv2d(256, 384, 3, padding=1),
        "relu3": nn.ReLU(),
        "conv4": nn.Conv2d(384, 384, 3, padding=1, groups=2),
        "relu4": nn.ReLU(),
        "conv5": nn.Conv2d(384, 256, 3, padding=1, groups=2),
        "relu5": nn.ReLU(),
        "pool5": nn.MaxPool2d(3, stride=2),
        "flatten": nn.Flatten(),
        "fc6": nn.Linear(256 * 6 * 6, 4096),
        "relu6": nn.ReLU(),
        "drop6": nn.Dropout(0.5),
        "fc7": nn.Linear(4096, 4096),
        "relu7": nn.ReLU(),
        "drop7": nn.Dropout(0.5),
        "fc8": nn.Linear(4096, num_classes),
    }


def _batch_norm(width: int, affine: bool) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-4, momentum=0.1, affine=affine)
