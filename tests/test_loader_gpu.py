"""The loader on a GPU: the images of the host, also when the device lags far behind."""

import contextlib
from dataclasses import replace

import pictures
import pytest
import torch

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PHOTOS = Data(size=32, channels=3, crop_area=(0.2, 1.0), flip=True, threads=2)
CONFIG = Config(batch=80, micro=40, span=40, epochs=9, data=PHOTOS)
WAYS = {
    "processes": ("jpeg", {"processes": "always", "resident": "never"}),
    "threads": ("jpeg", {"processes": "never", "resident": "never"}),
    "raw": ("raw", {"processes": "always", "resident": "never"}),
    "resident": ("raw", {"resident": "always"}),
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return pictures.packed(tmp_path_factory.mktemp("packs"), each=30, val=15, size=(70, 90), raw=48)


def cluster(kind):
    return Cluster(0, 1, 0, 1, torch.device(kind), (1, 1))


def read(config, kind, batches, lag=0):
    """What a loop gets that is `lag` cycles of the device behind at each micro-batch, and of
    validation after each step."""
    train, val = open_sources(config)
    found, valid, seen = [], [], 0
    with contextlib.closing(StepLoader(train, val, config, cluster(kind), torch.float32)) as loader:
        for index, batch in enumerate(batches):
            for micro in loader.micro_batches(Step(index, seen, batch, 0.0, 0)):
                if lag:
                    torch.cuda._sleep(lag)
                # Work of the training stream, long after the loader went on.
                found.append((micro.first, micro.images * 1, micro.labels * 1))
            valid += [(images * 1, labels * 1) for images, labels in loader.validation()]
            seen += batch
    if kind == "cuda":
        torch.cuda.synchronize()
    return found, valid


def steps_apart(one, other):
    return ((one.cpu() - other.cpu()).abs() * 0.225 * 255).max().item()


@pytest.mark.parametrize("way", WAYS)
def test_a_device_that_lags_behind_still_gets_the_hosts_images(packs, way):
    name, settings = WAYS[way]
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / f"{name}.arrow"), **settings))
    plain = replace(config, data=replace(config.data, resident="never"))
    batches = [80, 160, 40, 120, 80, 40, 200]  # also steps that nobody foresaw
    found, valid = read(config, "cuda", batches, lag=20_000_000)
    expected, valid_expected = read(plain, "cpu", batches)
    assert [row[0] for row in found] == [row[0] for row in expected]
    for (_, images, labels), (_, right, right_labels) in zip(found, expected, strict=True):
        assert torch.equal(labels.cpu(), right_labels)
        assert steps_apart(images, right) < 1.1
    for (images, labels), (right, right_labels) in zip(valid, valid_expected, strict=True):
        assert torch.equal(labels.cpu(), right_labels)
        assert steps_apart(images, right) < 1.1


def test_two_runs_give_the_same_bits(packs):
    data = replace(PHOTOS, path=str(packs / "jpeg.arrow"), processes="always", resident="never")
    config = replace(CONFIG, data=data)
    one, other = (read(config, "cuda", [80, 80, 80], lag)[0] for lag in (0, 10_000_000))
    for (_, images, labels), (_, again, labels_again) in zip(one, other, strict=True):
        assert torch.equal(images, again) and torch.equal(labels, labels_again)


class Slow(torch.utils.data.Dataset):
    """A caller's own images, made where they lie, and late."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if self.kind == "cuda":
            torch.cuda._sleep(1_000_000)
        return torch.full((3, 32, 32), float(index), device=self.kind), index % 10


def test_images_that_a_caller_makes_on_the_device_are_waited_for():
    found = {}
    for kind in ("cuda", "cpu"):
        train, val = open_sources(CONFIG, (Slow(kind), Slow(kind)))
        loader = StepLoader(train, val, CONFIG, cluster(kind), torch.float32)
        with contextlib.closing(loader):
            micros = [
                m for at in range(2) for m in loader.micro_batches(Step(at, 80 * at, 80, 0.0, 0))
            ]
            found[kind] = [m.images.cpu() for m in micros]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)
