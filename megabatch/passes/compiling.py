"""torch.compile by blocks: what repeats in a net is compiled once, and gradients of a block leave
while backward goes on with the ones before it. Or whole, where nothing leaves and calls count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

# Blocks of one class share a forward, and each shape of them counts: torch's own limit is 8.
_RECOMPILATIONS = 64


def compile_net(net: nn.Module, as_one: bool) -> Callable[[], None]:
    """Compile a net's blocks in place, or all of it as one, at the first call; returns what undoes
    it."""
    blocks = [net] if as_one else list(_blocks(net)) or [net]
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _RECOMPILATIONS)
    for block in blocks:
        block.compile(dynamic=False)

    def undo() -> None:
        torch._dynamo.config.recompile_limit = limit
        for block in blocks:
            block._compiled_call_impl = None

    return undo


@contextlib.contextmanager
def as_it_is(net: nn.Module) -> Iterator[None]:
    """While this lasts, what is compiled in a net runs uncompiled: for a pass of a shape that comes
    once, whose compilation takes longer than it does."""
    compiled = [(m, m._compiled_call_impl) for m in net.modules() if m._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of sequences that are made of modules themselves, the outermost ones."""
    in_row = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if in_row and next(child.children(), None) is not None:
            yield child
        else:
            yield from _blocks(child)
