"""The work of a decode thread or process: positions of the stream in, images in their room out."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.config import Config
from megabatch.data.augment import finish, normalise
from megabatch.data.crop import crop_draws
from megabatch.data.room import Layout, Room
from megabatch.data.source import Fills
from megabatch.keyed import shuffled

PIECE = 32
"""images of a request: few enough that a micro-batch is finished by all together, enough that
choosing their crops costs little"""


@dataclass(frozen=True)
class Order:
    """Which image stands at a position, and the randomness of its crop: in training the endless
    shuffled stream, in evaluation each image in its place, without randomness."""

    seed: int
    images: int
    training: bool

    def indices(self, positions: Tensor) -> Tensor:
        return shuffled(self.seed, positions, self.images) if self.training else positions

    def draws(self, positions: Tensor) -> Tensor | None:
        return crop_draws(self.seed, positions) if self.training else None


class Work:
    """What the host does to the images of one source. Any number of threads may call it."""

    def __init__(self, source: Fills, config: Config, layout: Layout, training: bool) -> None:
        self._source, self._config, self._layout = source, config, layout
        self.order = Order(config.seed, len(source), training)
        self._local = threading.local()

    def do(self, first: int, room: Room) -> None:
        """Read the images at positions from `first` on, as many as there is room for."""
        count = len(room.labels)
        positions = torch.arange(first, first + count)
        indices, draws = self.order.indices(positions), self.order.draws(positions)
        if self._layout.form != "numbers":
            self._source.fill(room, indices, draws)
            return
        between = Room(self._bytes(count), room.labels)
        self._source.fill(between, indices, draws)
        data, mean, std = self._config.data, self._source.mean, self._source.std
        dtype, out = self._layout.dtype, room.images
        if self.order.training:
            finish(between.images, positions, data, self._config.seed, mean, std, dtype, out)
        else:
            normalise(between.images, mean, std, dtype, out)

    def _bytes(self, count: int) -> Tensor:
        """Images of the model's size before they are numbers; fresh memory would cost more than
        the crops."""
        kept: Tensor | None = getattr(self._local, "images", None)
        if kept is None or len(kept) < count:
            size, channels = self._layout.size, self._layout.channels
            kept = torch.empty((count, size, size, channels), dtype=torch.uint8)
            self._local.images = kept
        return kept[:count].permute(0, 3, 1, 2)
