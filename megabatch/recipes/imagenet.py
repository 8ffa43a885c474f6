"""What the recipes for ImageNet share: its size, and the two ways the papers cut their crops."""

from __future__ import annotations

from megabatch.config import Data

IMAGES = 1_281_167
"""training images of ImageNet-1k"""


def crops_by_area(least: float = 0.08) -> Data:
    """224 px of a random area and aspect, mirrored or not, as Goyal 2017; centre crops of 256."""
    return Data(
        source="folder",
        size=224,
        channels=3,
        classes=1000,
        crop_area=(least, 1.0),
        crop_aspect=(3 / 4, 4 / 3),
        flip=True,
        resize=256,
    )


def crops_of_256(size: int = 224) -> Data:
    """A random square of the image at a shorter side of 256, mirrored or not, as Caffe's models."""
    return Data(
        source="folder",
        size=size,
        channels=3,
        classes=1000,
        scale=(256, 256),
        flip=True,
        resize=256,
    )
