"""What the loader is measured against: torch's DataLoader with the transforms everyone uses."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Photos(Dataset[tuple[Tensor, int]]):
    """Files to tensors: open, random resized crop, flip, to tensor, normalise."""

    def __init__(self, folder: Path, size: int, decoder: str) -> None:
        self._paths = sorted(str(path) for path in folder.rglob("*.JPEG"))
        self._size, self._decoder = size, decoder

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._paths[index]
        if self._decoder == "Pillow":
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        else:
            with open(path, "rb") as file:
                image = Image.fromarray(simplejpeg.decode_jpeg(file.read(), strict=False))
        image = image.crop(_random_box(*image.size))
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255).sub_(_MEAN).div_(_STD), 0


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = numpy.exp(random.uniform(numpy.log(3 / 4), numpy.log(4 / 3)))
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, upper = random.randint(0, width - w), random.randint(0, height - h)
            return left, upper, left + w, upper + h
    side = min(width, height)
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


def rate(
    folder: Path,
    decoder: str,
    size: int,
    batch: int,
    workers: int,
    device: torch.device,
    seconds: float,
) -> float:
    """Images a second of DataLoader with so many worker processes."""
    photos = Photos(folder, size, decoder)
    sampler = RandomSampler(photos, replacement=True, num_samples=1 << 30)
    loader: Any = DataLoader(
        photos, batch, sampler=sampler, num_workers=workers, pin_memory=device.type == "cuda"
    )
    return measured_rate(_counts(loader, device), seconds, device)


def _counts(loader: Iterable[Any], device: torch.device) -> Iterator[int]:
    for images, labels in loader:
        images.to(device, non_blocking=True)
        labels.to(device, non_blocking=True)
        yield len(images)


def measured_rate(batches: Iterator[int], seconds: float, device: torch.device) -> float:
    """Images a second that an iterator gives, after a few batches that fill its queues."""
    for _ in range(8):
        next(batches)
    _finish(device)
    images, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        images += next(batches)
    _finish(device)
    return images / (max(now, time.perf_counter()) - began)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
