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

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.loader import MicroBatch
from megabatch.errors import UserError
from megabatch.keyed import Dropout
from megabatch.passes.kinds import Found, FusedPass, Pass

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


PassResult = tuple[Found, dict[nn.Parameter, Tensor]]
"""what a pass found, and the gradients"""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: list[PassResult]
    """of each way, where every replay writes them"""


class CapturedPass:
    """Forward and backward of passes over micro-batches of one shape, captured once and replayed;
    up to `ways` of them side by side, as far as memory goes.

    Where so many cannot be captured, fewer are; a pass that cannot be captured at all runs as it
    is, and one line says so.
    """

    def __init__(self, run: Pass, net: nn.Module, ways: int = 1) -> None:
        self._run, self._net, self._ways = run, net, ways
        self._parameters = [p for p in net.parameters() if p.requires_grad]
        self._dropouts = [layer for layer in net.modules() if isinstance(layer, Dropout)]
        self._held: list[tuple[Tensor, ...]] = []
        """images, labels and positions that each way reads"""
        self._streams: list[torch.cuda.Stream] = []
        """of each way, the same in every graph: memory that one has freed only it takes again"""
        self._graphs: dict[int, _Graph] = {}
        """by the number of ways: a step's last micro-batches may be fewer"""
        self.refused = False
        """it could not be captured: whoever can run the pass otherwise should"""

    def __call__(
        self, micro_batches: Iterable[MicroBatch], factor: Tensor | float
    ) -> Iterator[Passed]:
        """What the passes found, and the gradients of their losses times a factor; overwritten when
        the next is asked for."""
        waiting: list[int] = []
        for micro in micro_batches:
            self._hold(len(waiting), micro)
            waiting.append(micro.first)
            if not self._streams:
                self._warm_up()
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
            return
        for held, new in zip(self._held[way], tensors, strict=True):
            if held.shape != new.shape:  # a copy would repeat one image in the place of many
                raise UserError(
                    f"micro-batches of {tuple(held.shape)} and {tuple(new.shape)}: passes that are "
                    f"replayed are of one shape, --graphs never takes them as they come"
                )
            held.copy_(new)

    def _passed(self, firsts: list[int], factor: Tensor | float) -> Iterator[Passed]:
        """Of the micro-batches that are held: at once, unless so many cannot be captured."""
        if isinstance(factor, Tensor):
            self._factor.copy_(factor)
        else:
            self._factor.fill_(factor)
        done = 0
        while done < len(firsts):
            ways = min(self._ways, len(firsts) - done)
            if not (self.refused or self._has_graph(ways)):
                continue  # with fewer, or with none
            for way in range(ways if done else 0):
                for held, new in zip(self._held[way], self._held[done + way], strict=True):
                    held.copy_(new)
            for first, result in zip(firsts[done:], self._results(ways), strict=False):
                yield Passed(first, *result)
            done += ways
        del self._held[self._ways :]

    def _results(self, ways: int) -> list[PassResult]:
        if self.refused:
            return [self._work(way) for way in range(ways)]
        graph, results = self._graphs[ways]
        graph.replay()
        return results

    def _warm_up(self) -> None:
        """Compile and choose kernels, and see how many passes have room side by side."""
        streams = [torch.cuda.Stream() for _ in range(self._ways)]
        self._factor = torch.ones((), dtype=torch.float64, device=self._held[0][0].device)
        # What is drawn and counted before the first pass counts must not show in it.
        drawn = torch.cuda.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self._net.buffers()]
        before = torch.cuda.memory_allocated()
        streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            for _ in range(_BEFORE_CAPTURE):
                torch.cuda.reset_peak_memory_stats()  # the last counts: others try kernels out
                self._work(0)
        torch.cuda.current_stream().wait_stream(streams[0])
        for buffer, as_it_was in buffers:
            buffer.copy_(as_it_was)
        torch.cuda.set_rng_state(drawn)
        taken = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self._ways = min(self._ways, max(1, int(_FREE_SHARE * free / max(taken, 1))))
        self._streams = streams[: self._ways]

    def _has_graph(self, ways: int) -> bool:
        """Of so many passes, captured now if need be. If they cannot be, half as many are the most
        from now on; if one cannot, that is said."""
        if ways in self._graphs or (reason := self._capture(ways)) is None:
            return True
        self._ways = max(1, ways // 2)
        self._graphs = {n: graph for n, graph in self._graphs.items() if n <= self._ways}
        if ways == 1:
            self._refuse(reason)
        return False

    def _capture(self, ways: int) -> str | None:
        """Returns why it failed, if it did."""
        generator = torch.cuda.default_generators[self._factor.device.index]
        drawn, spare = torch.cuda.get_rng_state(), generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        # Replayed one after another, so all may lie in the same memory.
        pools = (other.graph.pool() for other in self._graphs.values())
        pool = next(pools, None) or torch.cuda.graph_pool_handle()
        reason = None
        try:
            # Around it, since a capture that fails leaves its own stream the present one.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(
                    graph,
                    pool=pool,
                    stream=self._streams[0],
                    # Other threads go on with work of their own on the device: copies, all-reduces.
                    capture_error_mode="thread_local",
                ),
            ):
                results = self._side_by_side(ways)
            self._graphs[ways] = _Graph(graph, results)
        except Exception as error:
            reason = _first_reason(error)
            if not _was_ended(graph):
                _end_allocating(self._factor.device, pool)
                # The generator too is left as if the capture went on.
                generator.graphsafe_set_state(spare)
        torch.cuda.set_rng_state(drawn)
        return reason

    def _side_by_side(self, ways: int) -> list[PassResult]:
        main, *others = self._streams[:ways]
        begin = main.record_event()
        for stream in others:
            stream.wait_event(begin)
        results = []
        try:
            for way, stream in enumerate([main, *others]):
                with torch.cuda.stream(stream):
                    results.append(self._work(way))
        finally:  # also after a failure: a capture ends well only if all streams are back
            for stream in others:
                main.wait_stream(stream)
        return results

    def _refuse(self, reason: str) -> None:
        self.refused = True
        print(
            f"megabatch: this model cannot be replayed as a CUDA graph ({reason}): it runs as it "
            f"is, --graphs never says so from the start",
            file=sys.stderr,
        )

    def _work(self, way: int) -> PassResult:
        images, labels, positions = self._held[way]
        for layer in self._dropouts:
            layer.positions = positions
        found = self._run(images, labels)
        # Not .backward(): nothing is added up here, and no hook of the engine may run.
        gradients = torch.autograd.grad(
            found.loss * self._factor.to(found.loss.dtype), self._parameters, allow_unused=True
        )
        reached = zip(self._parameters, gradients, strict=True)
        return Found(*(tensor.detach() for tensor in found)), {
            p: gradient for p, gradient in reached if gradient is not None
        }


def _first_reason(error: BaseException) -> str:
    """Of what went wrong first: a capture that cannot go on fails once more when it is ended."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _was_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a capture came to its end, also where what was captured failed: the device breaks
    some off, and torch then leaves its own affairs as they are."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _end_allocating(device: torch.device, pool: Any) -> None:
    """Of a capture that was broken off. The allocator would think that it goes on for ever, and
    meanwhile give back no memory that two streams have used, which all images are."""
    with contextlib.suppress(RuntimeError):  # it did not even begin
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


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
