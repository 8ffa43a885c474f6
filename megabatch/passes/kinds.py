"""How a net runs in training: by kernels of our own, compiled, or as it is.

A pass takes one micro-batch from images to loss, counts and batch norm's statistics. Which one a
run takes follows from its config, its net and the device; all of them leave the net's parameters
where and what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch import kernels
from megabatch.batchnorm import MovingAverages, use_spans
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.models.resnet import BasicBlock, Bottleneck, ResNet
from megabatch.passes.compiling import compile_net
from megabatch.precision import HALF, autocast, full_dtype
from megabatch.sync.control import counts


class Found(NamedTuple):
    """What a pass over a micro-batch gives."""

    loss: Tensor
    """summed over its images: where backward begins"""
    counts: Tensor
    """loss, top-1 and top-5, without gradient, as the control vector has them"""
    statistics: Tensor
    """of batch norm, as MovingAverages orders them"""


class Pass(Protocol):
    """The net as it is called in training."""

    @property
    def how(self) -> str:
        """In words, for the log; empty for the net as it is."""

    @property
    def copies(self) -> Mapping[Tensor, Tensor]:
        """Copies of weights that this pass reads: whoever changes the weights writes them too."""

    def __call__(self, images: Tensor, labels: Tensor) -> Found: ...

    def refresh(self) -> None:
        """The weights were changed by someone who did not write the copies."""

    def close(self) -> None:
        """Leave the net as it was."""


def choose_pass(
    config: Config,
    cluster: Cluster,
    net: nn.Module,
    moving: MovingAverages,
    own: bool = False,
    classes: int = 1,
) -> Pass:
    """The pass of a run: on a GPU the fastest there is, unless the config says never. `own`: the
    net is of the caller's making; `classes`: what labels tell apart."""
    device = cluster.device
    if config.compile != "never" and fusable(config, device, net, own):
        return FusedPass(config, net, classes)
    compiled = config.compile == "always" or (
        config.compile == "auto" and kernels.available(device) and not config.deterministic
    )
    # On a GPU equal blocks share kernels, which take long to make; on a CPU calls count.
    as_one = compiled and device.type == "cpu" and cluster.world == 1
    undo = compile_net(net, as_one) if compiled else None
    return PlainPass(config, device, net, moving, undo, classes, as_one)


def fusable(config: Config, device: torch.device, net: nn.Module, own: bool = False) -> bool:
    """Whether kernels of our own run this net: a bundled ResNet, all of which trains, in half
    precision, on a chip whose multiprocessors have the room that they were cut for."""
    return (
        type(net) is ResNet
        and config.precision in HALF
        and all(p.requires_grad for p in net.parameters())
        and kernels.available(device)
        and kernels.roomy(device)
        and (not own or _as_bundled(net, config.span))
    )


def _as_bundled(net: ResNet, span: int) -> bool:
    """Whether its maker has put no other layers into the net and hung nothing on those it has:
    kernels would not know of it."""
    stages = net.layer1, net.layer2, net.layer3, net.layer4
    kinds = [type(layer) for layer in (net.conv1, net.fc, *stages)]
    block: Any = type(next(net.layer1.children(), None))
    if kinds != [nn.Conv2d, nn.Linear, *[nn.Sequential] * 4]:
        return False
    if block not in (BasicBlock, Bottleneck):
        return False
    one, two, three, four = map(len, stages)
    with torch.device("meta"):
        bundled = ResNet(block, (one, two, three, four), net.fc.out_features, net.conv1.in_channels)
    use_spans(bundled, span)
    return repr(net) == repr(bundled) and not (_hung_on(net) or _shares_weights(net))


def _hung_on(net: nn.Module) -> bool:
    """Whether somebody listens to a module or a weight, or has put a forward of his own in a
    module's place."""
    of_modules = (
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        or "forward" in vars(m)
        for m in net.modules()
    )  # fmt: skip
    of_weights = (p._backward_hooks or p._post_accumulate_grad_hooks for p in net.parameters())
    return any(of_modules) or any(of_weights)


def _shares_weights(net: nn.Module) -> bool:
    """Whether a weight, or a layer, stands in two places: each has a half copy of its own, and an
    update would reach one of them."""
    places = [p for _, p in net.named_parameters(remove_duplicate=False)]
    return len(places) > len(set(places))


class PlainPass:
    """The net itself, with autocast where the config says so; its blocks compiled, or not."""

    copies: Mapping[Tensor, Tensor] = {}

    def __init__(
        self,
        config: Config,
        device: torch.device,
        net: nn.Module,
        moving: MovingAverages,
        undo: Callable[[], None] | None = None,
        classes: int = 1,
        as_one: bool = False,
    ) -> None:
        """`undo` takes a compiled net back to what it was; `as_one`: loss, counts and statistics
        are compiled with it."""
        self._config, self._device, self._net, self._moving = config, device, net, moving
        self._classes, self._undo = classes, undo
        self._rehearsed = undo is None
        self._run = torch.compile(self._as_it_is, dynamic=False) if as_one else self._as_it_is
        self.how = ""
        if undo:
            self.how = "compiled by torch: the first steps take a minute or two"
        elif device.type == "cuda" and (lacking := kernels.lacking()):
            self.how = f"{lacking}: torch's kernels run instead of ours, slower (megabatch doctor)"

    def __call__(self, images: Tensor, labels: Tensor) -> Found:
        try:
            if not (self._rehearsed or self._being_captured()):
                self._rehearse(images, labels)
            return self._run(images, labels)
        except Exception as error:
            if self._undo is None or isinstance(error, UserError) or self._being_captured():
                raise
            # Whose fault it was shows without the compiler.
            self.close()
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            print(
                f"megabatch: torch cannot compile this model ({reason}): it runs as it is, "
                f"--compile never says so from the start",
                file=sys.stderr,
            )
            return self._run(images, labels)

    def _rehearse(self, images: Tensor, labels: Tensor) -> None:
        """Once there and back, which counts for nothing: backward is compiled when it first runs,
        and what fails there shows while the net can still run as it is."""
        self._rehearsed = True
        buffers = [(buffer, buffer.clone()) for buffer in self._net.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        trained = [p for p in self._net.parameters() if p.requires_grad]
        try:
            with torch.random.fork_rng(devices):
                loss = self._run(images, labels).loss
                if loss.requires_grad:
                    torch.autograd.grad(loss, trained, allow_unused=True)
        finally:
            with torch.no_grad():
                for buffer, as_it_was in buffers:
                    buffer.copy_(as_it_was)

    def _as_it_is(self, images: Tensor, labels: Tensor) -> Found:
        config = self._config
        with autocast(config, self._device):
            logits = logits_of(self._net(images), labels, self._classes).to(full_dtype(config))
        if not logits.requires_grad:
            raise UserError(
                "the model's logits do not depend on a parameter that trains: its forward detaches "
                "them, runs under torch.no_grad, or passes what is frozen alone"
            )
        loss, counted = _loss_and_counts(logits, labels, config.label_smoothing)
        return Found(loss, counted, self._moving.statistics(counted))

    def _being_captured(self) -> bool:
        """Then it is not the compiler's fault: the same pass ran before."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def refresh(self) -> None:
        """There are no copies."""

    def close(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo, self._run = None, self._as_it_is


class FusedPass:
    """A ResNet by kernels of our own: batch norm, ReLU and residuals in few passes over memory."""

    how = "by kernels of our own: the first step compiles them, a minute without a cache"

    def __init__(self, config: Config, net: nn.Module, classes: int = 1) -> None:
        # Here alone: these files import Triton, which not every machine has.
        from megabatch.kernels.loss import MOST_CLASSES, cross_entropy
        from megabatch.models.fused import ResNetPass

        self._run = ResNetPass(net, HALF[config.precision], config.span)
        few = net.get_parameter("fc.weight").shape[0] <= MOST_CLASSES
        self._loss_and_counts = cross_entropy if few else _loss_and_counts
        self._smoothing = config.label_smoothing
        self._classes = classes

    @property
    def copies(self) -> Mapping[Tensor, Tensor]:
        return self._run.halves

    def __call__(self, images: Tensor, labels: Tensor) -> Found:
        logits, statistics = self._run(images)
        logits = logits_of(logits, labels, self._classes)
        loss, counted = self._loss_and_counts(logits, labels, self._smoothing)
        return Found(loss, counted, statistics.mean(0))

    def refresh(self) -> None:
        self._run.refresh()

    def close(self) -> None:
        """The net was not changed."""


def _loss_and_counts(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the counts: the plain twin of the one in kernels/loss.py."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss, counts(logits.detach(), labels, loss.detach())


def logits_of(output: Any, labels: Tensor, classes: int = 1) -> Tensor:
    """What the net gave, if it can be the logits of these images; shapes alone are looked at."""
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(labels):
        given = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise UserError(
            f"the model gives {given} for {len(labels)} images: training needs one tensor of "
            f"logits, a row an image and a column a class"
        )
    if output.shape[1] < classes:
        raise UserError(
            f"the model tells {output.shape[1]} classes apart, but the images have {classes}: give "
            f"its last layer {classes} outputs, or set data.classes where a data set of your own "
            f"does not list them"
        )
    return output
