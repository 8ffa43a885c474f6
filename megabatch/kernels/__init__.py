"""Triton kernels, where they pay. Each has a plain twin elsewhere and a test that they agree.

Whoever imports one of the files here has asked `available` first.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CUT_FOR = (9, 10)
"""compute capabilities, major: Hopper and Blackwell for servers, 227 KiB of shared memory each"""


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Whether kernels run on a device: a GPU, and Triton is installed."""
    return device.type == "cuda" and _installed()


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether a chip has the shared memory that the products of the training pass take; checked on
    Hopper alone."""
    import torch

    return torch.cuda.get_device_capability(device)[0] in _CUT_FOR
