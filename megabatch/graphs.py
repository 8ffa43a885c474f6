"""A pass and its backward as one CUDA graph, where the host would be slower than the device.

A pass of ResNet-50 is some 650 launches, 60 ms of the host's time whatever its size. Captured once,
it is replayed for every micro-batch, since all have one shape: images, labels and the factor of the
loss are copied to where the graph reads them, and its gradients always lie in the same place. They
are all there at its end: among several workers, passes that the host keeps up with run as they are,
so that gradients leave meanwhile.

What a module does in Python it does once, while it is captured: a module of somebody else's is
captured only where the config says so.
"""

from __future__ import annotations

import sys

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


class CapturedPass:
    """Forward and backward of a pass over micro-batches of one shape; captured at the first.

    What a call returns is overwritten by the next. A pass that cannot be captured runs as it is,
    and one line says so.
    """

    def __init__(self, run: Pass, net: nn.Module) -> None:
        self._run = run
        self._parameters = [p for p in net.parameters() if p.requires_grad]
        self._dropouts = [layer for layer in net.modules() if isinstance(layer, Dropout)]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._refused = False
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def __call__(
        self, micro: MicroBatch, factor: Tensor | float
    ) -> tuple[Found, dict[nn.Parameter, Tensor]]:
        """What the pass found, and the gradients of its loss times a factor."""
        if self._graph is None and not self._refused:
            self._read(*(tensor.clone() for tensor in _tensors(micro)))
            self._factor = torch.ones((), device=micro.images.device)
            self._graph = self._captured()
        if self._graph is None:
            self._read(*_tensors(micro))
            self._factor = torch.as_tensor(factor, device=micro.images.device)
            self._found, self._gradients = self._work()
            return self._found, self._gradients
        for held, new in zip(self._held, _tensors(micro), strict=True):
            held.copy_(new)
        if isinstance(factor, Tensor):
            self._factor.copy_(factor)
        else:
            self._factor.fill_(factor)
        self._graph.replay()
        return self._found, self._gradients

    def close(self) -> None:
        """Let go of the graph and its memory."""
        self._graph, self._gradients = None, {}

    def _read(self, images: Tensor, labels: Tensor, positions: Tensor) -> None:
        """These, from now on."""
        self._held = images, labels, positions
        for layer in self._dropouts:
            layer.positions = positions

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        # What is drawn before the first pass counts must not show in it.
        drawn = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_BEFORE_CAPTURE):  # kernels are compiled and chosen
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on with work of their own on the device: copies, all-reduces.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._found, self._gradients = self._work()
        except RuntimeError as error:
            self._refuse(error)
            return None
        finally:
            torch.cuda.set_rng_state(drawn)
        return graph

    def _refuse(self, error: Exception) -> None:
        self._refused = True
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        print(
            f"megabatch: this model cannot be replayed as a CUDA graph ({reason}): it runs as it "
            f"is, --graphs never says so from the start",
            file=sys.stderr,
        )

    def _work(self) -> tuple[Found, dict[nn.Parameter, Tensor]]:
        # Not .backward(): nothing is added up here, and no hook of the engine may run.
        images, labels, _ = self._held
        found = self._run(images, labels)
        gradients = torch.autograd.grad(
            found.loss * self._factor, self._parameters, allow_unused=True
        )
        reached = zip(self._parameters, gradients, strict=True)
        return Found(*(tensor.detach() for tensor in found)), {
            p: gradient for p, gradient in reached if gradient is not None
        }


def _tensors(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    return micro.images, micro.labels, micro.positions


def captured(
    config: Config, cluster: Cluster, run: Pass, net: nn.Module, own: bool
) -> CapturedPass | None:
    """The pass as a graph, if the config says so, or if it is small, or by kernels of our own with
    nothing that would leave during backward. `own`: the net is of the caller's making."""
    if cluster.device.type != "cuda" or config.graphs == "never":
        return None
    worth = config.micro * config.data.size**2 < _SMALL_PIXELS
    if isinstance(run, FusedPass):
        worth = worth or cluster.world == 1
    else:
        worth = worth and not (own or config.deterministic or config.compile == "never")
    return CapturedPass(run, net) if worth or config.graphs == "always" else None
