"""A pass and its backward as one CUDA graph, where the host would be slower than the device.

A pass of ResNet-50 is some 650 launches, 60 ms of the host's time whatever its size. Captured once,
it is replayed for every micro-batch, since all have one shape: images, labels and the factor of the
loss are copied to where the graph reads them, and its gradients always lie in the same place. They
are all there at its end: among several workers, passes that the host keeps up with run as they are,
so that gradients leave meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.passes import Found, FusedPass, Pass

_BEFORE_CAPTURE = 3
_SMALL_PIXELS = 40e6
"""of a micro-batch: below it an H200 needs less than the 70 ms that the host takes"""


class CapturedPass:
    """Forward and backward of a pass over micro-batches of one shape; captured at the first.

    What a call returns is overwritten by the next.
    """

    def __init__(self, run: Pass, net: nn.Module) -> None:
        self._run = run
        self._parameters = [p for p in net.parameters() if p.requires_grad]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: tuple[Tensor, ...] = ()

    def __call__(
        self, images: Tensor, labels: Tensor, factor: Tensor | float
    ) -> tuple[Found, dict[nn.Parameter, Tensor]]:
        """What the pass found, and the gradients of its loss times a factor."""
        if self._graph is None:
            self._images, self._labels = images.clone(), labels.clone()
            self._factor = torch.ones((), device=images.device)
            self._graph = self._captured()
        self._images.copy_(images)
        self._labels.copy_(labels)
        if isinstance(factor, Tensor):
            self._factor.copy_(factor)
        else:
            self._factor.fill_(factor)
        self._graph.replay()
        return self._found, dict(zip(self._parameters, self._gradients, strict=True))

    def close(self) -> None:
        """Let go of the graph and its memory."""
        self._graph, self._gradients = None, ()

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_BEFORE_CAPTURE):  # kernels are compiled and chosen
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on with work of their own on the device: copies, all-reduces.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._found, self._gradients = self._work()
        return graph

    def _work(self) -> tuple[Found, tuple[Tensor, ...]]:
        # Not .backward(): nothing is added up here, and no hook of the engine may run.
        found = self._run(self._images, self._labels)
        gradients = torch.autograd.grad(found.loss * self._factor, self._parameters)
        return Found(*(tensor.detach() for tensor in found)), gradients


def captured(config: Config, cluster: Cluster, run: Pass, net: nn.Module) -> CapturedPass | None:
    """The pass as a graph, if the config says so, or if nothing is to leave during backward, or
    passes are small."""
    capturable = cluster.device.type == "cuda" and isinstance(run, FusedPass)
    small = config.micro * config.data.size**2 < _SMALL_PIXELS
    worth = small or cluster.world == 1
    if config.graphs == "never" or not capturable or (config.graphs == "auto" and not worth):
        return None
    return CapturedPass(run, net)
