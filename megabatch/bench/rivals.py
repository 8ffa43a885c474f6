"""What a step is measured against: the net that everyone has with SGD, as it is and compiled whole;
and the convolutions alone, which no step can do without."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch import models
from megabatch.bench.timing import time_of
from megabatch.config import Config
from megabatch.models.alexnet import FoldedConv2d
from megabatch.models.resnet import open_blocks, residual_blocks
from megabatch.precision import autocast


def plain_step(
    config: Config, device: torch.device, compiled: bool, tuned: bool = True
) -> Callable[[], None]:
    """A step of the same net, batch and precision as anyone would write it: no counts, no spans, no
    buckets, SGD with momentum. Tuned, with channels last and SGD fused; otherwise as torch has it.
    """
    data = config.data
    net: Any = _net(config).to(device)
    if tuned:
        net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6, 0.9, weight_decay=5e-5, fused=tuned or None)
    run = torch.compile(net, dynamic=False) if compiled else net
    images = random_images(config, device)
    if not tuned:
        images = images.clone(memory_format=torch.contiguous_format)
    labels = torch.randint(data.classes, (config.micro,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(config.batch // config.micro):
            with autocast(config, device):
                logits = run(images)
            loss = cross_entropy(
                logits.float(), labels, label_smoothing=config.label_smoothing, reduction="sum"
            )
            (loss / config.batch).backward()
        optimizer.step()

    return step


def random_images(config: Config, device: torch.device) -> Tensor:
    """A micro-batch with the channels last in memory, as the loader hands them out."""
    size = config.data.size
    drawn = torch.randn(config.micro, size, size, config.data.channels, device=device)
    return drawn.permute(0, 3, 1, 2)


def _net(config: Config) -> nn.Module:
    """torchvision's where it has it, else our own, which is the same net."""
    data = config.data
    if find_spec("torchvision") and data.channels == 3:
        import torchvision

        if config.model.startswith("resnet") and hasattr(torchvision.models, config.model):
            made: nn.Module = getattr(torchvision.models, config.model)(num_classes=data.classes)
            return made
    net = models.build(config.model, data.classes, data.channels, data.size)
    as_in_training(net)
    for layer in net.modules():
        if isinstance(layer, FoldedConv2d):  # which is ours
            layer.fold = False
    return net


def as_in_training(net: nn.Module) -> None:
    """Open the blocks of a net that has some, as training soon does and torchvision's are: behind a
    gamma of 0 gradients are 0, behind a small one fp16's lose their bits, and a chip at its power
    limit is faster for it (5 % of a step on an H200)."""
    if residual_blocks(net):
        open_blocks(net)


def convolutions_alone(
    config: Config, device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    """Seconds that the convolutions of one pass take, there and back, one after the other on fresh
    memory: the floor of any step that leaves them to the library."""
    data = config.data
    net = models.build(config.model, data.classes, data.channels, data.size)
    shapes: dict[tuple[Any, ...], int] = {}

    def note(layer: nn.Conv2d, inputs: tuple[Tensor]) -> None:
        x = inputs[0]
        key = (
            x.shape[1:], layer.weight.shape, layer.stride, layer.padding, layer.groups,
            x.shape[1] != data.channels,
        )  # fmt: skip
        shapes[key] = shapes.get(key, 0) + 1

    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(note)  # type: ignore[arg-type]
    with torch.no_grad():
        net.eval()(torch.zeros(1, data.channels, data.size, data.size))
    total = 0.0
    for (shape, weight, stride, padding, groups, inner), times in shapes.items():
        last = torch.channels_last
        x = torch.randn(config.micro, *shape, device=device, dtype=dtype)
        x = x.contiguous(memory_format=last)
        w = torch.randn(weight, device=device, dtype=dtype).contiguous(memory_format=last)
        y = nn.functional.conv2d(x, w, None, stride, padding, 1, groups)

        def there_and_back(
            x: Tensor = x, w: Tensor = w, y: Tensor = y, how: Any = (stride, padding, groups, inner)
        ) -> None:
            stride, padding, groups, inner = how
            nn.functional.conv2d(x, w, None, stride, padding, 1, groups)
            torch.ops.aten.convolution_backward(
                y, x, w, None, stride, padding, (1, 1), False, (0, 0), groups, (inner, True, False)
            )

        total += times * time_of(there_and_back, seconds / len(shapes), device.type)
    return total
