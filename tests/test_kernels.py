"""Kernels against their plain twins, on a GPU."""

import numpy
import pytest
import torch
from pictures import pixels

from megabatch import kernels
from megabatch.config import Data
from megabatch.data.augment import finish
from megabatch.data.crop import crop_draws, random_boxes
from megabatch.data.decoded import bring_to_size
from megabatch.data.resident import crop_on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def shapes():
    generator = numpy.random.default_rng(0)
    some = generator.integers(1, 300, (40, 2)).tolist()
    return [[1, 1], [1, 50], [224, 224], [48, 48], [47, 49], [448, 597], *some]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [16, 48, 224])
def test_crops_of_any_shape_are_resized_as_on_the_host(channels, size):
    from megabatch.kernels.resize import resize_crops

    crops = [pixels(n, *shape)[:, :, :channels] for n, shape in enumerate(shapes())]
    longest = max(crop.size for crop in crops)
    room = numpy.zeros((len(crops), longest), numpy.uint8)
    expected = torch.empty(len(crops), channels, size, size, dtype=torch.uint8)
    for row, out, crop in zip(room, expected, crops, strict=True):
        row[: crop.size] = crop.reshape(-1)
        bring_to_size(numpy.ascontiguousarray(crop), out)
    found = resize_crops(
        torch.from_numpy(room).cuda(), torch.tensor(shapes()).cuda(), size, channels
    )
    assert found.is_contiguous(memory_format=torch.channels_last)
    difference = (found.cpu().int() - expected.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.3


def test_boxes_of_resident_images_are_those_of_the_matrix_products():
    from megabatch.kernels.resize import resize_boxes

    images = torch.from_numpy(numpy.stack([pixels(n, 40, 56) for n in range(60)])).cuda()
    numbers = torch.randperm(60)[:33]
    data = Data(size=24, channels=3, crop_area=(0.08, 1.0))
    draws = crop_draws(1, torch.arange(33)).numpy().astype(float)
    boxes = torch.from_numpy(random_boxes(data, numpy.full(33, 40), numpy.full(33, 56), draws))
    numbers, boxes = numbers.cuda(), boxes.cuda()
    found = resize_boxes(images, numbers, boxes, 24)
    expected = crop_on_device(images[numbers], boxes, 24)
    difference = (found.int() - expected.int()).abs()
    # Halves may be rounded either way.
    assert difference.max() <= 1 and difference.float().mean() < 0.01


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_bytes_become_the_numbers_of_the_plain_twin_to_the_bit(channels, flip, monkeypatch):
    drawn = torch.randint(256, (9, channels, 13, 17), dtype=torch.uint8, device="cuda")
    images = drawn.contiguous(memory_format=torch.channels_last)
    data = Data(size=17, channels=channels, flip=flip)
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    positions = torch.arange(9, device="cuda")
    found = finish(images.clone(), positions, data, 3, mean, std, torch.float32)
    monkeypatch.setattr(kernels, "available", lambda device: False)
    expected = finish(images.clone(), positions, data, 3, mean, std, torch.float32)
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
