"""ResNet-18 to 152 (He 2016) with the stride on the 3x3 convolution ("v1.5"), as in Goyal 2017.

Weights start as section 5.1 of Goyal 2017 has them, and tensors have the names and shapes of
torchvision's, so that its `resnet50().load_state_dict(ours)` loads all of them.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megabatch.errors import UserError

MODELS = {
    "resnet18": None,
    "resnet34": None,
    "resnet50": None,
    "resnet101": None,
    "resnet152": None,
}

# ReLU is not in place: batch norm does not keep its output for the backward pass, so no memory is
# lost, and a batch norm that returns a view of its work can stand in for the plain one.


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the block of ResNet-18 and 34."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = _closing_norm(width)
        self.downsample = _shortcut(inputs, width, stride)

    @property
    def closing_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up and a shortcut: the block of ResNet-50 and deeper."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, outputs)
        self.bn3 = _closing_norm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    @property
    def closing_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


BlockClass = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Stem, four stages of `depths` blocks, mean over the picture, one linear layer."""

    def __init__(
        self,
        block: BlockClass,
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        channels: int = 3,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, depths[0], 64, 64, stride=1)
        self.layer2 = stage(block, depths[1], 64 * block.expansion, 128, stride=2)
        self.layer3 = stage(block, depths[2], 128 * block.expansion, 256, stride=2)
        self.layer4 = stage(block, depths[3], 256 * block.expansion, 512, stride=2)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def resnet18(num_classes: int = 1000, channels: int = 3) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, channels)


def resnet34(num_classes: int = 1000, channels: int = 3) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, channels)


def resnet50(num_classes: int = 1000, channels: int = 3) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, channels)


def resnet101(num_classes: int = 1000, channels: int = 3) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, channels)


def resnet152(num_classes: int = 1000, channels: int = 3) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, channels)


def stage(block: BlockClass, depth: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    """`depth` blocks in a row, of which the first takes the stride and the change of channels."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(depth - 1)))


def initialise(net: nn.Module) -> None:
    """Draw a residual net's weights: He normal for convolutions, N(0, 0.01) for linear layers.

    Batch norms are left alone: they start with gamma 1 and beta 0, a block's last with gamma 0.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


def open_blocks(net: nn.Module) -> None:
    """Let every residual block begin with gamma 1 in its last batch norm too."""
    blocks = residual_blocks(net)
    if not blocks:
        raise UserError("the model has no residual blocks: leave --no-zero-gamma away")
    for block in blocks:
        nn.init.ones_(block.closing_norm.weight)


def residual_blocks(net: nn.Module) -> list[BasicBlock | Bottleneck]:
    return [m for m in net.modules() if isinstance(m, BasicBlock | Bottleneck)]


def _closing_norm(width: int) -> nn.BatchNorm2d:
    # gamma 0: a block starts as its shortcut alone. Worth 0.4 points at a batch of 8k (Goyal 2017).
    norm = nn.BatchNorm2d(width)
    nn.init.zeros_(norm.weight)
    return norm


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    # An empty Sequential is the identity and, like torchvision's None, owns no tensor.
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
