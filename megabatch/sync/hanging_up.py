"""gloo's connections of a process group closed from within: whoever waits in it, here or there,
waits no longer."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch

_NOBODYS_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)


def hang_up(group: Any) -> None:
    """For good: the group can be used no more.

    gloo has no call for it, but when one receive is given up it closes all connections of its
    group. Connections that are closed already refuse one, so all are asked.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NOBODYS_TAG).wait(_AT_ONCE)
