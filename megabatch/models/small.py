"""A small ResNet for pictures of 8 to 32 px: what a laptop's core trains in seconds.

It has the shape of He 2016, section 4.2 (depth 6n + 2 in three stages), with a projection where the
shape changes; blocks and initialisation are those of `resnet`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.models.resnet import BasicBlock, initialise, stage

MODELS = {"small": None, "small20": None}


class SmallResNet(nn.Module):
    """A 3x3 stem, no pooling, then three stages of `width`, 2 and 4 times `width` channels."""

    def __init__(self, num_classes: int, channels: int, depth: int, width: int):
        super().__init__()
        blocks, odd = divmod(depth - 2, 6)
        if blocks < 1 or odd:
            raise ValueError(f"a small ResNet has a depth of 8, 14, 20, ... (6n + 2), not {depth}")
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(BasicBlock, blocks, width, width, stride=1)
        self.layer2 = stage(BasicBlock, blocks, width, 2 * width, stride=2)
        self.layer3 = stage(BasicBlock, blocks, 2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def small(num_classes: int = 10, channels: int = 1, depth: int = 8, width: int = 16) -> SmallResNet:
    """Made for 8 px digits: 78 thousand parameters, 0.76 million multiply-adds an image."""
    return SmallResNet(num_classes, channels, depth, width)


def small20(num_classes: int = 10, channels: int = 3) -> SmallResNet:
    """Made for 32 px photographs: 0.27 million parameters, 41 million multiply-adds an image."""
    return SmallResNet(num_classes, channels, depth=20, width=16)
