"""A workload: a model's layers with the sizes of their tensors and their work, in forward order.

The bundled models are written here by formula, without torch (a test holds them to the real ones);
anyone's own model comes as the JSON that `megabatch.bench.step.describe` makes of a module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from megabatch.config import Config
from megabatch.errors import UserError

IMAGENET = 1_281_167
IMAGENET_VALIDATION = 50_000


@dataclass(frozen=True)
class Layer:
    """Parameters as the number of elements of each tensor; multiply-adds of one image's forward
    pass."""

    name: str
    parameters: tuple[int, ...]
    multiply_adds: int = 0


@dataclass(frozen=True)
class Workload:
    name: str
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Of the forward pass, for one image."""
        return sum(layer.multiply_adds for layer in self.layers)

    def gradients(self) -> Iterator[tuple[int, float]]:
        """Elements of each gradient in the order backward makes them, and the share of backward
        that is over by then."""
        done, total = 0, max(self.multiply_adds, 1)
        for layer in reversed(self.layers):
            done += layer.multiply_adds
            for elements in reversed(layer.parameters):
                yield elements, done / total

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def from_json(text: str) -> Workload:
    said = json.loads(text)
    layers = (
        Layer(row["name"], tuple(row["parameters"]), row["multiply_adds"]) for row in said["layers"]
    )
    return Workload(said["name"], tuple(layers))


def load(path: str) -> Workload:
    """The JSON of someone's own model."""
    try:
        return from_json(Path(path).read_text())
    except OSError as error:
        raise UserError(f"the model {path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe a model: {error!r}") from None


class Images(NamedTuple):
    """How many there are to train on and to evaluate on, and their classes."""

    train: int
    validation: int
    classes: int


def images_of(config: Config) -> Images:
    """ImageNet's numbers, unless the config says otherwise."""
    data = config.data
    if data.source == "digits":
        return Images(round(1797 * (1 - data.val_share)), round(1797 * data.val_share), 10)
    if data.source == "synthetic":
        held_out = round(data.images * data.val_share)
        return Images(data.images - held_out, held_out, data.classes)
    return Images(IMAGENET, IMAGENET_VALIDATION, 1000)


def workload_of(config: Config) -> Workload:
    """The config's model on its images."""
    return bundled(config.model, config.data.size, config.data.channels, images_of(config).classes)


def bundled(name: str, size: int = 224, channels: int = 3, classes: int = 1000) -> Workload:
    """A bundled model for images of so many pixels a side."""
    if name not in _BUILDERS:
        raise UserError(
            f"the planner does not know the layers of {name!r}: give --workload the JSON that "
            f"megabatch bench step --export writes"
        )
    return Workload(name, tuple(_BUILDERS[name](size, channels, classes)))


def made_for(name: str) -> tuple[int, int, int]:
    """Side and channels of the images that a bundled model was made for, and classes."""
    if name.startswith("small"):
        return (8, 1, 10) if name == "small" else (32, 3, 10)
    return 227 if name.startswith("alexnet") else 224, 3, 1000


def usual(name: str) -> Workload:
    """A bundled model on the images it was made for: what a machine's rates are of."""
    return bundled(name, *made_for(name))


# --- layers by formula -------------------------------------------------------------------------


def _convolution(
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
    return Layer(name, (weights, outputs) if bias else (weights,), weights * side * side)


def _norm(name: str, width: int) -> Layer:
    return Layer(name, (width, width))


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, (inputs * outputs, outputs), inputs * outputs)


def _halved(side: int) -> int:
    """The side after a padded convolution or pool of stride 2."""
    return (side + 1) // 2


def _block(
    name: str, inputs: int, width: int, stride: int, side: int, bottleneck: bool
) -> Iterator[Layer]:
    after = _halved(side) if stride == 2 else side
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        kernels = [(inputs, width, 1, side), (width, width, 3, after), (width, outputs, 1, after)]
    else:
        kernels = [(inputs, width, 3, after), (width, width, 3, after)]
    for number, (before, behind, kernel, out) in enumerate(kernels, 1):
        yield _convolution(f"{name}.conv{number}", before, behind, kernel, out)
        yield _norm(f"{name}.bn{number}", behind)
    if stride != 1 or inputs != outputs:
        yield _convolution(f"{name}.downsample.0", inputs, outputs, 1, after)
        yield _norm(f"{name}.downsample.1", outputs)


def _stages(
    depths: tuple[int, ...], inputs: int, width: int, side: int, bottleneck: bool
) -> Iterator[Layer]:
    for stage, depth in enumerate(depths, 1):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            name = f"layer{stage}.{index}"
            yield from _block(name, inputs, width, stride, side, bottleneck)
            side = _halved(side) if stride == 2 else side
            inputs = 4 * width if bottleneck else width
        width *= 2


def _resnet(depths: tuple[int, ...], bottleneck: bool) -> Callable[..., Iterator[Layer]]:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        side = _halved(size)
        yield _convolution("conv1", channels, 64, 7, side)
        yield _norm("bn1", 64)
        yield from _stages(depths, 64, 64, _halved(side), bottleneck)
        yield _linear("fc", 2048 if bottleneck else 512, classes)

    return layers


def _small(blocks: int) -> Callable[..., Iterator[Layer]]:
    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        yield _convolution("conv1", channels, 16, 3, size)
        yield _norm("bn1", 16)
        yield from _stages((blocks,) * 3, 16, 16, size, bottleneck=False)
        yield _linear("fc", 64, classes)

    return layers


def _alexnet(norms: dict[str, int]) -> Callable[..., Iterator[Layer]]:
    """`norms`: batch norms with gamma and beta, by the layer they follow."""

    def layers(size: int, channels: int, classes: int) -> Iterator[Layer]:
        yield _convolution("conv1", channels, 96, 11, 55, bias=True)
        yield from _after("conv1")
        yield _convolution("conv2", 96, 256, 5, 27, groups=2, bias=True)
        yield from _after("conv2")
        yield _convolution("conv3", 256, 384, 3, 13, bias=True)
        yield from _after("conv3")
        yield _convolution("conv4", 384, 384, 3, 13, groups=2, bias=True)
        yield from _after("conv4")
        yield _convolution("conv5", 384, 256, 3, 13, groups=2, bias=True)
        yield from _after("conv5")
        yield _linear("fc6", 256 * 6 * 6, 4096)
        yield _linear("fc7", 4096, 4096)
        yield _linear("fc8", 4096, classes)

    def _after(name: str) -> Iterator[Layer]:
        if name in norms:
            yield _norm(f"norm{name[-1]}", norms[name])

    return layers


_POOL5 = {"conv1": 96, "conv2": 256, "conv3": 384, "conv4": 384, "conv5": 256}

_BUILDERS: dict[str, Callable[..., Iterator[Layer]]] = {
    "alexnet": _alexnet({}),
    "alexnet_bn": _alexnet({}),  # its batch norms have neither gamma nor beta
    "alexnet_bn_pool5": _alexnet(_POOL5),
    "resnet18": _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": _resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": _resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": _resnet((3, 8, 36, 3), bottleneck=True),
    "small": _small(1),
    "small20": _small(3),
}


def bert_large(sequence: int = 128) -> Workload:
    """BERT-Large, for Horovod's row: 24 blocks of width 1024, a vocabulary of 30,522."""
    width, inner = 1024, 4096
    embeddings = Layer("embeddings", (30_522 * width, 512 * width, 2 * width, width, width))
    blocks = []
    for index in range(24):
        weights = 4 * width * width + 2 * width * inner
        biases_and_norms = 4 * width + inner + width + 4 * width
        layer = Layer(f"block{index}", (weights, biases_and_norms), weights * sequence)
        blocks.append(layer)
    head = Layer("head", (width * width, width, width * width, width, 2 * width, 30_522))
    return Workload("bert_large", (embeddings, *blocks, head))
