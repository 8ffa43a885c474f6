"""A tensor on its way from the device to the host, which goes on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arriving:
    """A copy of a small tensor for the host: on its way from a GPU, there at once otherwise."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            # Into pinned memory: a copy into any other would wait for the device.
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host = pinned.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """Its values, as soon as they are there; from any thread."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values
