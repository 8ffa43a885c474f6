"""The parts of a run that hold state: module, masters, optimizer, engine, loss scale, average."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import models
from megabatch.batchnorm import MovingAverages, use_spans
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.ema import WeightAverage
from megabatch.errors import UserError
from megabatch.finetune import begin_from
from megabatch.keyed import Dropout, key_dropout
from megabatch.models.resnet import open_blocks
from megabatch.models.zoo import is_foreign
from megabatch.optim import Layerwise, build, parameter_groups
from megabatch.optim.layout import dense, overlaps
from megabatch.passes.graphs import CapturedPass, captured
from megabatch.passes.kinds import Pass, choose_pass
from megabatch.precision import LossScale, Masters, full_dtype
from megabatch.sync.buckets import GradientSum
from megabatch.sync.own_buffers import OwnBuffers
from megabatch.workers.process import made_in_fp32


@dataclass(frozen=True)
class Parts:
    """What train_step works on. close() ends what was begun here and leaves the module whole."""

    config: Config
    device: torch.device
    net: nn.Module
    run: Pass
    """the net as it is called in training"""
    graph: CapturedPass | None
    """the same with its backward, as a CUDA graph, where passes are small"""
    own: bool
    """a module of somebody else's, which may draw from torch's generator"""
    masters: Masters
    optimizer: Layerwise
    engine: GradientSum
    scale: LossScale
    moving: MovingAverages
    buffers: OwnBuffers | None
    """the net's others, where it has some"""
    average: WeightAverage
    dropouts: tuple[Dropout, ...]
    """of the net, looked for once: it has hundreds of modules"""
    settled: dict[str, tuple[nn.Parameter, bool]]
    """the net's parameters as the run began, and whether each trains"""

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            if self.graph is not None:
                self.graph.close()
            self.run.close()
            self.engine.close()
        finally:
            self.masters.close()

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """What the optimizer updates -> what the pass reads of it in half precision."""
        return {**self.run.copies, **{twin: half for half, twin in self.masters.twins.items()}}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beyond weights and the optimizer's state."""
        return {
            **self.masters.tensors(),
            **self.scale.tensors(),
            **self.average.tensors(),
        }

    def replicated(self, buffers: bool = True) -> Iterator[Tensor]:
        """What every worker holds alike, bit for bit, after each step: all of a checkpoint, but for
        the buffers that a module of the caller's keeps as it likes. Without `buffers`: also in the
        middle of an evaluation, which may compute them anew."""
        alike = buffers and not self.own
        yield from self.net.state_dict().values() if alike else self.net.parameters()
        for held in self.optimizer.state.values():
            yield from (value for value in held.values() if isinstance(value, Tensor))
        parts = (self.masters, self.scale) if self.own else (self.masters, self.scale, self.average)
        for part in parts:
            yield from part.tensors().values()

    def check_settled(self) -> None:
        """Refuse a net whose parameters are others than the run began with: what it holds of them
        (gradients, momentum, averages) is of those."""
        now = dict(self.net.named_parameters())
        for name in {**self.settled, **now}:
            before, trains = self.settled.get(name, (None, False))
            if now.get(name) is not before:
                how = "replaced" if before is not None and name in now else "added or removed"
            elif before is not None and before.requires_grad != trains:
                how = "frozen" if trains else "made to train"
            else:
                continue
            raise UserError(
                f"the model's {name} was {how} while the run went on, which trains the parameters "
                f"that it began with: change the model between two runs"
            )

    def load(self, tensors: dict[str, Tensor]) -> None:
        for part in (self.masters, self.scale, self.average):
            part.load(tensors)
        self.run.refresh()

    def layers(self) -> dict[str, tuple[float, float, float]]:
        """Trust ratio, weight norm and gradient norm of each adapted layer in the last step."""
        names: dict[Tensor, str] = {
            self.masters.of(p): name for name, p in self.net.named_parameters()
        }
        return {
            names[weight]: (float(seen.ratio), float(seen.weight_norm), float(seen.gradient_norm))
            for weight, seen in self.optimizer.ratios.items()
        }


@contextlib.contextmanager
def prepared(
    config: Config, cluster: Cluster, classes: int, model: nn.Module | None = None
) -> Iterator[nn.Module]:
    """The module of a run while it lasts: the same weights on every worker, batch norm by spans,
    a bundled net's dropout keyed.

    Afterwards it has its own layers again, in the modes they were in, with the weights and moving
    averages that they have by then, laid out as they were; device and precision stay the run's.
    """
    if cluster.group is not None:
        raise UserError("a run has all workers, not a group of them: make the cluster without one")
    torch.manual_seed(config.seed)
    net = model
    if net is None:
        with made_in_fp32():  # what is drawn differs by dtype
            net = models.build(config.model, classes, config.data.channels, config.data.size)
        if not config.zero_gamma:
            open_blocks(net)
    with contextlib.ExitStack() as ending:
        ending.callback(_set_modes, {module: module.training for module in net.modules()})
        layouts = {(name, t.shape): t.stride() for name, t in _tensors(net)}
        ending.callback(_set_layouts, net, layouts)
        if config.init:  # on the first worker; the others get all of its weights below
            cluster.agree(functools.partial(begin_from, net, config))
        ending.callback(use_spans(net, config.span))
        # A net of somebody else's may call one layer several times, on tensors of any shape: it
        # draws from torch's generator, which is keyed too (step.key_draws).
        if model is None and not is_foreign(config.model):
            ending.callback(key_dropout(net, config.seed))
        net.to(cluster.device, full_dtype(config))
        if cluster.world > 1:
            for _, tensor in _tensors(net):  # also buffers that no state dict has
                _broadcast(tensor.detach(), cluster)
        # How tensor cores and oneDNN want convolutions; bits of deterministic runs on a CPU stay.
        if cluster.device.type == "cuda" or not config.deterministic:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        yield net


def _set_modes(modes: dict[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode


def _tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters()
    yield from net.named_buffers()


def _broadcast(tensor: Tensor, cluster: Cluster) -> None:
    """The first worker's values, wherever they lie: gloo takes as many numbers as there are in a
    row, beyond an expanded tensor's memory and between those of a strided one."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # all of them are the one
    run = tensor if dense(tensor) else tensor.contiguous()
    dist.broadcast(run, group_src=0, group=cluster.group)
    if run is not tensor:
        tensor.copy_(run)


def _set_layouts(net: nn.Module, layouts: dict[tuple[str, torch.Size], tuple[int, ...]]) -> None:
    for name, tensor in _tensors(net):
        strides = layouts.get((name, tensor.shape))  # none: the caller has put another there
        if (
            strides is not None
            and tensor.stride() != strides
            and not overlaps(tensor.shape, strides)
        ):
            laid_out = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
            )
            tensor.data = laid_out.copy_(tensor.detach())


def assemble(
    config: Config, cluster: Cluster, net: nn.Module, own: bool = False, classes: int = 1
) -> Parts:
    """The parts around a prepared module; `own`: it is of the caller's making; `classes`: what its
    images' labels tell apart."""
    if not any(p.requires_grad for p in net.parameters()):
        raise UserError(
            f"the model ({type(net).__name__}) has no parameter that trains: set requires_grad on "
            f"some"
        )
    net.train()
    own = own or is_foreign(config.model)
    settings = config.optimizer
    groups = parameter_groups(
        net,
        settings.weight_decay,
        share=settings.unadapted_rate,
        decay_all=settings.decay_all,
        adapt_head=settings.head_adapts,
    )
    with contextlib.ExitStack() as failing:
        masters = Masters(net, config)
        failing.callback(masters.close)
        optimizer = build(settings, masters.groups(groups))
        optimizer.rounds_freely = not config.deterministic
        scale = LossScale(config, cluster.device)
        moving = MovingAverages(net)
        buffers = OwnBuffers(net, cluster, moving.tensors())
        average = WeightAverage(net, config, masters)
        run = choose_pass(config, cluster, net, moving, own, classes)
        failing.callback(run.close)
        # Last: from here on the module's parameters carry hooks.
        engine = GradientSum(
            net,
            cluster,
            moving.length,
            tree=config.deterministic,
            bucket_bytes=config.bucket_mb * 1e6,
            masters=masters.twins,
            plan=None if config.plan == "backend" else config.plan,
            wire=config.wire,
            thresholds=config.hybrid.thresholds,
            silent_seconds=config.patience or None,
            late_seconds=10 * config.patience,
        )
        failing.pop_all()
    return Parts(
        config=config,
        device=cluster.device,
        net=net,
        run=run,
        graph=captured(config, cluster, run, net, own),
        own=own,
        masters=masters,
        optimizer=optimizer,
        engine=engine,
        scale=scale,
        moving=moving,
        buffers=buffers or None,
        average=average,
        dropouts=tuple(layer for layer in net.modules() if isinstance(layer, Dropout)),
        settled={name: (p, p.requires_grad) for name, p in net.named_parameters()},
    )
