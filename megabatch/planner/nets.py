"""The bundled models by formula, layer by layer, without torch (a test holds them to the real
ones, or to the sizes that are published).

Each builder takes the side of an image in pixels, its channels and the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Layer:
    """Parameters as the number of elements of each tensor; for one image's forward pass,
    multiply-adds and elements that come out."""

    name: str
    parameters: tuple[int, ...]
    multiply_adds: int = 0
    outputs: int = 0


Builder = Callable[[int, int, int], Iterator[Layer]]


def convolution(
    name: str,
    inputs: int,
    outputs: int,
    kernel: int,
    side: int,
    groups: int = 1,
    bias: bool = False,
) -> Layer:
    """`side` is that of the layer's output."""
    weights = outputs * inputs // groups * kernel * kernel
    positions = side * side
    tensors = (weights, outputs) if bias else (weights,)
    return Layer(name, tensors, weights * positions, outputs * positions)


def norm(name: str, width: int, positions: int) -> Layer:
    return Layer(name, (width, width), 0, width * positions)


def linear(name: str, inputs: int, outputs: int, positions: int = 1, bias: bool = True) -> Layer:
    weights = inputs * outputs
    tensors = (weights, outputs) if bias else (weights,)
    return Layer(name, tensors, weights * positions, outputs * positions)


def halved(side: int) -> int:
    """The side after a padded convolution or pool of stride 2."""
    return (side + 1) // 2


# --- ResNet and the small nets -----------------------------------------------------------------


def _block(
    name: str, inputs: int, width: int, stride: int, side: int, bottleneck: bool
) -> Iterator[Layer]:
    after = halved(side) if stride == 2 else side
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        kernels = [(inputs, width, 1, side), (width, width, 3, after), (width, outputs, 1, after)]
    else:
        kernels = [(inputs, width, 3, after), (width, width, 3, after)]
    for number, (before, behind, kernel, out) in enumerate(kernels, 1):
        yield convolution(f"{name}.conv{number}", before, behind, kernel, out)
        yield norm(f"{name}.bn{number}", behind, out * out)
    if stride != 1 or inputs != outputs:
        yield convolution(f"{name}.downsample.0", inputs, outputs, 1, after)
        yield norm(f"{name}.downsample.1", outputs, after * after)


def _stages(
    depths: tuple[int, ...], inputs: int, width: int, side: int, bottleneck: bool
) -> Iterator[Layer]:
    for stage, depth in enumerate(depths, 1):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            name = f"layer{stage}.{index}"
            yield from _block(name, inputs, width, stride, side, bottleneck)
            side = halved(side) if stride == 2 else side
            inputs = 4 * width if bottleneck else width
        width *= 2


def resnet(depths: tuple[int, ...], bottleneck: bool) -> Builder:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        side = halved(size)
        yield convolution("conv1", channels, 64, 7, side)
        yield norm("bn1", 64, side * side)
        yield from _stages(depths, 64, 64, halved(side), bottleneck)
        yield linear("fc", 2048 if bottleneck else 512, classes)

    return layers


def small(blocks: int) -> Builder:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        yield convolution("conv1", channels, 16, 3, size)
        yield norm("bn1", 16, size * size)
        yield from _stages((blocks,) * 3, 16, 16, size, bottleneck=False)
        yield linear("fc", 64, classes)

    return layers


# --- AlexNet and VGG ---------------------------------------------------------------------------

_ALEXNET = ((96, 11, 55, 27, 1), (256, 5, 27, 13, 2), (384, 3, 13, 13, 1), (384, 3, 13, 13, 2),
            (256, 3, 13, 6, 2))  # fmt: skip


def alexnet(norms: bool) -> Builder:
    """Caffe's, with groups; `norms`: batch norms with gamma and beta behind each convolution."""

    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        inputs = channels
        for number, (width, kernel, side, pooled, groups) in enumerate(_ALEXNET, 1):
            yield convolution(f"conv{number}", inputs, width, kernel, side, groups, bias=True)
            if norms:
                yield norm(f"norm{number}", width, pooled * pooled)
            inputs = width
        yield linear("fc6", 256 * 6 * 6, 4096)
        yield linear("fc7", 4096, 4096)
        yield linear("fc8", 4096, classes)

    return layers


def vgg(depths: tuple[int, ...]) -> Builder:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        inputs, side = channels, size
        for stage, depth in enumerate(depths):
            width = min(64 << stage, 512)
            for index in range(depth):
                name = f"stage{stage + 1}.conv{index + 1}"
                yield convolution(name, inputs, width, 3, side, bias=True)
                inputs = width
            side //= 2
        yield linear("fc6", inputs * 7 * 7, 4096)
        yield linear("fc7", 4096, 4096)
        yield linear("fc8", 4096, classes)

    return layers


# --- EfficientNet, ConvNeXt, ViT ---------------------------------------------------------------

# expansion, kernel, stride, width, repeats of B0
_EFFICIENT = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
              (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))  # fmt: skip


def efficientnet(wider: float = 1.0, deeper: float = 1.0) -> Builder:
    def rounded(width: float) -> int:
        near = max(8, int(width + 4) // 8 * 8)
        return near + 8 if near < 0.9 * width else near

    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        inputs, side = rounded(32 * wider), halved(size)
        yield convolution("stem", channels, inputs, 3, side)
        yield norm("stem.bn", inputs, side * side)
        for stage, (expansion, kernel, first, width, repeats) in enumerate(_EFFICIENT, 1):
            outputs = rounded(width * wider)
            for index in range(ceil(repeats * deeper)):
                stride = first if index == 0 else 1
                name = f"stage{stage}.{index}"
                yield from _inverted(name, inputs, outputs, expansion, kernel, stride, side)
                side = halved(side) if stride == 2 else side
                inputs = outputs
        head = rounded(1280 * wider)
        yield convolution("head", inputs, head, 1, side)
        yield norm("head.bn", head, side * side)
        yield linear("classifier", head, classes)

    return layers


def _inverted(
    name: str, inputs: int, outputs: int, expansion: int, kernel: int, stride: int, side: int
) -> Iterator[Layer]:
    """A block that widens, looks around channel by channel, squeezes and narrows."""
    inner, squeezed = inputs * expansion, max(1, inputs // 4)
    after = halved(side) if stride == 2 else side
    if expansion > 1:
        yield convolution(f"{name}.expand", inputs, inner, 1, side)
        yield norm(f"{name}.expand.bn", inner, side * side)
    yield convolution(f"{name}.depthwise", inner, inner, kernel, after, groups=inner)
    yield norm(f"{name}.depthwise.bn", inner, after * after)
    yield convolution(f"{name}.squeeze", inner, squeezed, 1, 1, bias=True)
    yield convolution(f"{name}.excite", squeezed, inner, 1, 1, bias=True)
    yield convolution(f"{name}.project", inner, outputs, 1, after)
    yield norm(f"{name}.project.bn", outputs, after * after)


def convnext(depths: tuple[int, ...], widths: tuple[int, ...]) -> Builder:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        side, inputs = size // 4, widths[0]
        yield convolution("stem", channels, inputs, 4, side, bias=True)
        yield norm("stem.norm", inputs, side * side)
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), 1):
            if stage > 1:
                yield norm(f"stage{stage}.norm", inputs, side * side)
                side //= 2
                yield convolution(f"stage{stage}.down", inputs, width, 2, side, bias=True)
            places = side * side
            for index in range(depth):
                name = f"stage{stage}.{index}"
                yield Layer(f"{name}.scale", (width,), 0, width * places)
                yield convolution(
                    f"{name}.depthwise", width, width, 7, side, groups=width, bias=True
                )
                yield norm(f"{name}.norm", width, places)
                yield linear(f"{name}.widen", width, 4 * width, places)
                yield linear(f"{name}.narrow", 4 * width, width, places)
            inputs = width
        yield norm("norm", inputs, 1)
        yield linear("classifier", inputs, classes)

    return layers


def vit(depth: int, width: int, heads: int, patch: int = 16) -> Builder:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        side = size // patch
        tokens = side * side + 1
        yield Layer("class_token", (width,), 0, width)
        yield convolution("patches", channels, width, patch, side, bias=True)
        yield Layer("positions", (tokens * width,), 0, tokens * width)
        for index in range(depth):
            name = f"block{index}"
            yield norm(f"{name}.norm1", width, tokens)
            yield linear(f"{name}.attention.in", width, 3 * width, tokens)
            # queries by keys, and weights by values: no parameters, but work and outputs
            yield Layer(
                f"{name}.attention",
                (),
                2 * tokens * tokens * width,
                heads * tokens * tokens + tokens * width,
            )
            yield linear(f"{name}.attention.out", width, width, tokens)
            yield norm(f"{name}.norm2", width, tokens)
            yield linear(f"{name}.widen", width, 4 * width, tokens)
            yield linear(f"{name}.narrow", 4 * width, width, tokens)
        yield norm("norm", width, tokens)
        yield linear("head", width, classes)

    return layers


BUILDERS: dict[str, Builder] = {
    "alexnet": alexnet(norms=False),
    "alexnet_bn": alexnet(norms=False),  # its batch norms have neither gamma nor beta
    "alexnet_bn_pool5": alexnet(norms=True),
    "resnet18": resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": resnet((3, 8, 36, 3), bottleneck=True),
    "vgg16": vgg((2, 2, 3, 3, 3)),
    "efficientnet_b0": efficientnet(),
    "efficientnet_b4": efficientnet(1.4, 1.8),
    "convnext_tiny": convnext((3, 3, 9, 3), (96, 192, 384, 768)),
    "convnext_base": convnext((3, 3, 27, 3), (128, 256, 512, 1024)),
    "vit_b_16": vit(12, 768, 12),
    "vit_l_16": vit(24, 1024, 16),
    "small": small(1),
    "small20": small(3),
}
