"""A pass and its backward as one CUDA graph, where the host would be slower than the device.

A pass of ResNet-50 is some 650 launches, 60 ms of the host's time whatever its size. Captured once,
it is replayed for every micro-batch, since all have one shape: images, labels and the factor of the
loss are copied to where the graph reads them, and its gradients always lie in the same place. They
are all there at its end: among several workers, passes that the host keeps up with run as they are,
so that gradients leave meanwhile.

Passes that are too small to fill the device run side by side in one graph: while a short kernel of
one waits for the one before it, those of the others run.

What a module does in Python it does once, while it is captured: a module of somebody else's is
captured only where the config says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import MicroBatch
from megabatch.keyed import Dropout
from megabatch.passes import Found, FusedPass, Pass

_BEFORE_CAPTURE = 3
_SMALL_PIXELS = 40e6
"""of a micro-batch: below it an H200 needs less than the 70 ms that the host takes"""
_FULL_PIXELS = 1024 * 224 * 224
"""of passes side by side: more images at once were no faster on an H200"""
_MOST_WAYS = 4
_FREE_SHARE = 0.5
"""of the memory that is free, for passes side by side: evaluations want some too"""


class Passed(NamedTuple):
    """What a pass over a micro-batch gave."""

    first: int
    """position of the micro-batch"""
    found: Found
    gradients: dict[nn.Parameter, Tensor]
    """of its loss times the factor"""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: list[tuple[Found, dict[nn.Parameter, Tensor]]]
    """of each way, where every replay writes them"""


class CapturedPass:
    """Forward and backward of passes over micro-batches of one shape, captured once and replayed;
    up to `ways` of them side by side, as far as memory goes.

    A pass that cannot be captured runs as it is, and one line says so.
    """

    def __init__(self, run: Pass, net: nn.Module, ways: int = 1) -> None:
        self._run = run
        self._parameters = [p for p in net.parameters() if p.requires_grad]
        self._dropouts = [layer for layer in net.modules() if isinstance(layer, Dropout)]
        self._ways, self._warm, self._refused = ways, False, False
        self._held: list[tuple[Tensor, ...]] = []
        """images, labels and positions that each way reads"""
        self._graphs: dict[int, _Graph] = {}
        """by the number of ways: a step's last micro-batches may be fewer"""

    def __call__(
        self, micro_batches: Iterable[MicroBatch], factor: Tensor | float
    ) -> Iterator[Passed]:
        """What the passes found, and the gradients of their losses times a factor; overwritten when
        the next is asked for."""
        waiting: list[int] = []
        for micro in micro_batches:
            self._hold(len(waiting), micro)
            waiting.append(micro.first)
            if len(waiting) == self._ways:
                yield from self._passed(waiting, factor)
                waiting = []
        if waiting:
            yield from self._passed(waiting, factor)

    def close(self) -> None:
        """Let go of the graphs and their memory."""
        self._graphs, self._held = {}, []

    def _hold(self, way: int, micro: MicroBatch) -> None:
        """Copied at once: whoever brings micro-batches may write the next where this one lies."""
        tensors = micro.images, micro.labels, micro.positions
        if way == len(self._held):
            self._held.append(tuple(tensor.clone() for tensor in tensors))
        else:
            for held, new in zip(self._held[way], tensors, strict=True):
                held.copy_(new)
        if not self._warm:
            self._factor = torch.ones((), device=micro.images.device)
            self._ways, self._warm = self._warmed_up(), True

    def _passed(self, waiting: list[int], factor: Tensor | float) -> Iterator[Passed]:
        if isinstance(factor, Tensor):
            self._factor.copy_(factor)
        else:
            self._factor.fill_(factor)
        ways = len(waiting)
        if ways not in self._graphs and not self._refused:
            self._capture(ways)
        if self._refused:
            for way, first in enumerate(waiting):
                yield Passed(first, *self._work(way))
            return
        graph, results = self._graphs[ways]
        graph.replay()
        for first, result in zip(waiting, results, strict=True):
            yield Passed(first, *result)

    def _warmed_up(self) -> int:
        """Compile and choose kernels; returns how many passes have room side by side."""
        # What is drawn before the first pass counts must not show in it.
        drawn = torch.cuda.get_rng_state()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_BEFORE_CAPTURE):
                self._work(0)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.set_rng_state(drawn)
        taken = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return min(self._ways, max(1, int(_FREE_SHARE * free / max(taken, 1))))

    def _capture(self, ways: int) -> None:
        generator = torch.cuda.default_generators[self._factor.device.index]
        drawn, spare = torch.cuda.get_rng_state(), generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        # One after another, so all may lie in the same memory.
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        try:
            # Other threads go on with work of their own on the device: copies, all-reduces.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._graphs[ways] = _Graph(graph, self._side_by_side(ways))
        except RuntimeError as error:
            self._graphs.clear()
            # A capture that failed leaves the generator as if it went on.
            generator.graphsafe_set_state(spare)
            self._refuse(error)
        finally:
            torch.cuda.set_rng_state(drawn)

    def _side_by_side(self, ways: int) -> list[tuple[Found, dict[nn.Parameter, Tensor]]]:
        main = torch.cuda.current_stream()
        begin = main.record_event()
        results = [self._work(0)]
        for way in range(1, ways):
            stream = torch.cuda.Stream()
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                results.append(self._work(way))
            main.wait_stream(stream)
        return results

    def _refuse(self, error: Exception) -> None:
        self._refused, self._ways = True, 1
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        print(
            f"megabatch: this model cannot be replayed as a CUDA graph ({reason}): it runs as it "
            f"is, --graphs never says so from the start",
            file=sys.stderr,
        )

    def _work(self, way: int) -> tuple[Found, dict[nn.Parameter, Tensor]]:
        images, labels, positions = self._held[way]
        for layer in self._dropouts:
            layer.positions = positions
        found = self._run(images, labels)
        # Not .backward(): nothing is added up here, and no hook of the engine may run.
        gradients = torch.autograd.grad(
            found.loss * self._factor, self._parameters, allow_unused=True
        )
        reached = zip(self._parameters, gradients, strict=True)
        return Found(*(tensor.detach() for tensor in found)), {
            p: gradient for p, gradient in reached if gradient is not None
        }


def captured(
    config: Config, cluster: Cluster, run: Pass, net: nn.Module, own: bool
) -> CapturedPass | None:
    """The pass as a graph, if the config says so, or if it is small, or by kernels of our own with
    nothing that would leave during backward. `own`: the net is of the caller's making."""
    if cluster.device.type != "cuda" or config.graphs == "never":
        return None
    pixels = config.micro * config.data.size**2
    worth, ways = pixels < _SMALL_PIXELS, 1
    if isinstance(run, FusedPass):
        worth = worth or cluster.world == 1
        # Nothing of such a pass lies anywhere but in what it returns.
        ways = min(_MOST_WAYS, max(1, _FULL_PIXELS // pixels))
    else:
        worth = worth and not (own or config.deterministic or config.compile == "never")
    return CapturedPass(run, net, ways) if worth or config.graphs == "always" else None
