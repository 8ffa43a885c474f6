"""A workload: a model's layers with the sizes of their tensors and their work, in forward order.

The bundled models come by formula (nets.py); anyone's own comes as the JSON that
`megabatch.bench.describe` makes of a module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.config import Config
from megabatch.config.settings import shown
from megabatch.errors import UserError, nearest
from megabatch.planner.nets import BUILDERS, Layer

LONGEST_NAME = 60
MOST = 10**18
"""no layer has as many of anything"""

IMAGENET = 1_281_167
IMAGENET_VALIDATION = 50_000


@dataclass(frozen=True)
class Workload:
    name: str
    layers: tuple[Layer, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(sum(layer.parameters) for layer in self.layers)

    @cached_property
    def multiply_adds(self) -> int:
        """Of the forward pass, for one image."""
        return sum(layer.multiply_adds for layer in self.layers)

    @cached_property
    def outputs(self) -> int:
        """Elements that the layers put out for one image."""
        return sum(layer.outputs for layer in self.layers)

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


def parsed(text: str) -> Any:
    """The JSON of a file; ValueError says what is wrong with it."""
    try:
        return json.loads(text.removeprefix("\ufeff"))  # some editors begin a file with it
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def from_json(text: str) -> Workload:
    described = parsed(text)
    if not isinstance(described, dict) or not isinstance(described.get("layers"), list):
        raise ValueError("it has no list of layers")
    layers = tuple(_layer(number, row) for number, row in enumerate(described["layers"], 1))
    if not any(layer.parameters for layer in layers):
        raise ValueError("none of its layers has parameters")
    name = described.get("name", "model")
    if not (isinstance(name, str) and name.isprintable()):
        raise ValueError(f"its name is {shown(name)}, not a line of text")
    return Workload(name[-LONGEST_NAME:], layers)


def _layer(number: int, row: Any) -> Layer:
    if not isinstance(row, dict):
        raise ValueError(f"its layer {number} is {shown(row)}, not an object")

    def count(value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
            raise ValueError(
                f"{key} of its layer {number} is {shown(value)}, not a whole number from 0 to "
                f"{MOST:g}"
            )
        return value

    for key in row:
        if key not in (known := [one.name for one in fields(Layer)]):
            raise ValueError(f"its layer {number} has {shown(key)}: {nearest(key, known)}")
    sizes = row.get("parameters")
    if not isinstance(sizes, list):
        raise ValueError(f"its layer {number} has no list of parameters")
    return Layer(
        str(row.get("name", number)),
        tuple(count(size, "a tensor") for size in sizes),
        count(row.get("multiply_adds", 0), "multiply_adds"),
        count(row.get("outputs", 0), "outputs"),
    )


def load(name: str) -> Workload:
    """A bundled model by its name, or the JSON of someone's own."""
    if name in BUILDERS:
        return usual(name)
    if not name.endswith(".json"):
        raise UserError(
            f"there is no model {name!r}: {nearest(name, BUILDERS)} (or give the JSON that "
            f"megabatch bench step --export writes)"
        )
    try:
        return from_json(Path(name).read_text())
    except OSError as error:
        raise UserError(f"the model {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{name} does not describe a model: {error}") from None


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


@cache
def bundled(name: str, size: int = 224, channels: int = 3, classes: int = 1000) -> Workload:
    """A bundled model for images of so many pixels a side."""
    if name not in BUILDERS:
        raise UserError(
            f"the planner does not know the layers of {name!r}: give --workload the JSON that "
            f"megabatch bench step --export writes"
        )
    return Workload(name, tuple(BUILDERS[name](size, channels, classes)))


def made_for(name: str) -> tuple[int, int, int]:
    """Side and channels of the images that a bundled model was made for, and classes."""
    if name.startswith("small"):
        return (8, 1, 10) if name == "small" else (32, 3, 10)
    sides = {"efficientnet_b4": 380}
    return 227 if name.startswith("alexnet") else sides.get(name, 224), 3, 1000


def usual(name: str) -> Workload:
    """A bundled model on the images it was made for: what a machine's rates are of."""
    return bundled(name, *made_for(name))


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
