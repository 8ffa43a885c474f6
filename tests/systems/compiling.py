"""A plugin for pytest, in a process of its own: what tests launch is compiled for a chip that is
not there, and nothing runs. So what they find is no result, and what they compare says nothing."""

import json
import os
from collections import defaultdict
from pathlib import Path

import on_gpu
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY, FOUND = int(os.environ["CAPABILITY"]), Path(os.environ["FOUND"])
SHARED, TENSOR_COLUMNS = 227 << 10, 512
"""what a program has of shared memory, on both chips, and of tensor memory: asked at a launch"""

compiled = defaultdict(set)
run = JITFunction.run


class Chip:
    """What Triton asks of the driver before it launches."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_alone(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED, (self.__name__, kernel.metadata.shared)
    assert (getattr(kernel.metadata, "tmem_size", 0) or 0) <= TENSOR_COLUMNS, self.__name__
    compiled[f"{self.__module__}.{self.__name__}"].add(kernel.hash)
    return kernel


driver.set_active(Chip())
JITFunction.run = compile_alone
torch.testing.assert_close = lambda *args, **options: None
on_gpu.ON_A_GPU = []  # what the interpreter cannot do compiles all the same


@pytest.hookimpl
def pytest_sessionfinish():
    FOUND.write_text(json.dumps({name: len(kinds) for name, kinds in compiled.items()}))
