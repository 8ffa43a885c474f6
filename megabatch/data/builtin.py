"""Images that need no download: scikit-learn's handwritten digits, and synthetic ones."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from megabatch.config import Config, Data
from megabatch.data.source import Memory
from megabatch.errors import UserError
from megabatch.keyed import Purpose, keyed


def digits(data: Data) -> Memory:
    """1,797 grey digits of 8 x 8 pixels (enlarged when the model wants more)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "the digits live in scikit-learn, which is not installed: pip install 'megabatch[demo]'"
        ) from None
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).mul(16).clamp(0, 255)[:, None].float()
    if data.size != 8:
        images = interpolate(images, size=(data.size, data.size), mode="bilinear")
    images = images.round().to(torch.uint8).repeat(1, data.channels, 1, 1)
    return Memory(images, torch.from_numpy(bunch.target).long(), classes=10)


def synthetic(config: Config) -> Memory:
    """Noise with a faint pattern a class, so that there is something to learn; a function of the
    seed."""
    data, seed = config.data, config.seed
    pixels = data.channels * data.size * data.size
    labels = torch.arange(data.images) % data.classes
    noise = keyed(
        seed, Purpose.SYNTHETIC, 0, torch.arange(data.images)[:, None], torch.arange(pixels)
    )
    pattern = keyed(seed, Purpose.SYNTHETIC, 1, labels[:, None], torch.arange(pixels))
    images = (torch.as_tensor(noise) % 192 + torch.as_tensor(pattern) % 64).to(torch.uint8)
    shape = (data.images, data.channels, data.size, data.size)
    return Memory(images.view(shape), labels, classes=data.classes)
