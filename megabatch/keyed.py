"""Randomness keyed by position: an integer hash in tensor arithmetic, the same bits on CPU and
CUDA.

Everything random in a run is a function of the seed, a purpose and the image's position in the
endless stream (epoch = position // images), never of a worker, a device or a library's generator.
So any number of workers sees the same order, the same augmentation and the same dropout masks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabatch.layers import replace_layers

_MASK = 0xFFFFFFFF
Array = NDArray[numpy.int64]
Bits = Any
"""integers; int64 tensors or arrays that broadcast"""


class Purpose(IntEnum):
    """What a random number is for: numbers of different purposes are independent."""

    ORDER = 1
    CROP = 2
    FLIP = 3
    SHIFT = 4
    HOLD_OUT = 5
    DROPOUT = 6
    GENERATOR = 7
    SYNTHETIC = 8
    COLOUR = 9
    LIGHTING = 10
    TUNING = 11
    OWN_DATA = 12


def mix(value: Bits) -> Bits:
    """A bijective 32-bit mixer (xor-shift, multiply) for 32-bit values in integers, int64 tensors
    or arrays.

    In tensors and arrays products wrap modulo 2^64; only their low 32 bits are kept, which the wrap
    leaves right. The two multipliers are those of Wellons' low-bias search (0x7feb352d,
    0x846ca68b).
    """
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def keyed(seed: int, purpose: int, *keys: Bits) -> Bits:
    """32 random bits for each combination of keys.

    Give integers first: their part of the work is then done once, outside tensors.
    """
    state: Bits = seed & _MASK
    for key in (seed >> 32, purpose, *keys):
        # Both halves of a key count: positions of a long run pass 2^32.
        state = mix(((state * 0x9E3779B1 & _MASK) + key + (key >> 32) * 0x85EBCA77) & _MASK)
    return state


def uniform(seed: int, purpose: int, *keys: Bits) -> Tensor:
    """A float32 in [0, 1), a multiple of 2^-24, for each combination of keys."""
    return torch.as_tensor(keyed(seed, purpose, *keys) >> 8).to(torch.float32) * 2.0**-24


def shuffled(seed: int, positions: Tensor, images: int) -> Tensor:
    """The image at each position of the endless stream: each epoch has its own permutation.

    The permutation is a Feistel network on a grid of a x b >= images places, walked again where it
    leaves [0, images): any position costs the same few operations and nothing is stored.
    """
    a = math.isqrt(images - 1) + 1
    b = -(-images // a)

    def network(epoch: int, place: Array) -> Array:
        left, right = place % a, place // a
        for turn in range(4):
            left = (left + keyed(seed, Purpose.ORDER, 2 * turn, epoch, right)) % a
            right = (right + keyed(seed, Purpose.ORDER, 2 * turn + 1, epoch, left)) % b
        return right * a + left

    # Some hundred operations on short arrays: numpy begins each of them sooner than torch.
    epochs, places = numpy.divmod(positions.numpy(), images)
    found = numpy.empty_like(places)
    for epoch in numpy.unique(epochs).tolist():
        here = epochs == epoch
        place = network(epoch, places[here])
        while (outside := place >= images).any():
            place[outside] = network(epoch, place[outside])
        found[here] = place
    return torch.from_numpy(found)


class Dropout(torch.nn.Module):
    """Dropout whose masks are keyed by seed, layer and the positions of the images in the batch.

    `positions` are set before each pass in training.
    """

    positions: Tensor

    def __init__(self, p: float, seed: int, layer: int) -> None:
        super().__init__()
        self.p, self.seed, self.layer = p, seed, layer

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        images = self.positions.to(x.device)
        elements = torch.arange(x[0].numel(), device=x.device)
        drawn = uniform(self.seed, Purpose.DROPOUT, self.layer, images[:, None], elements[None, :])
        keep = (drawn >= self.p).reshape(x.shape)
        return x * keep / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


def key_dropout(module: torch.nn.Module, seed: int) -> Callable[[], None]:
    """Replace each nn.Dropout inside a module by a keyed one; returns what undoes it."""
    numbers = itertools.count()

    def keyed_one(layer: torch.nn.Module) -> torch.nn.Module | None:
        if type(layer) is not torch.nn.Dropout:
            return None
        return Dropout(layer.p, seed, next(numbers))

    return replace_layers(module, keyed_one)
