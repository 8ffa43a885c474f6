"""Triton kernels, where they pay. Each has a plain twin elsewhere and a test that they agree.

Whoever imports one of the files here has asked `available` first.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CUT_FOR = (9, 10)
"""compute capabilities, major: Hopper and Blackwell for servers, 227 KiB of shared memory each"""


def installed() -> bool:
    """Whether there is a Triton."""
    return find_spec("triton") is not None


def c_compiler() -> str | None:
    """The C compiler that Triton takes, chosen as it chooses."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def python_headers() -> Path:
    """Where Triton looks for Python.h."""
    # Debian's own scheme names a folder below /usr/local, where nobody puts it.
    scheme = sysconfig.get_default_scheme()
    return Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )


@functools.cache
def lacking() -> str:
    """What Triton lacks to launch a kernel, in words; empty where it lacks nothing."""
    if not installed():
        return "Triton is not installed"
    # It compiles what talks to the driver, against Python's headers, when its cache is empty.
    if c_compiler() is None:
        return "Triton finds no C compiler"
    if not (python_headers() / "Python.h").exists():
        return "Triton finds no Python.h"
    return ""


def available(device: torch.device) -> bool:
    """Whether kernels run on a device: a GPU, and Triton has what it needs."""
    return device.type == "cuda" and not lacking()


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether a chip has the shared memory that the products of the training pass take; checked on
    Hopper alone."""
    import torch

    return torch.cuda.get_device_capability(device)[0] in _CUT_FOR
