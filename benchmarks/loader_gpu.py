"""The loader on a GPU machine: that it gives what the CPU gives, how fast, and what a step loses.

    python benchmarks/loader_gpu.py [--images FOLDER] [--out FILE.json]

First the checks (images on the device against the same images on the host), then images/s of each
way to load, then ResNet-50 with each of them against the same step on images that are already
there. Without a folder it makes photographs of its own: smooth shapes and noise, compressed to
about the size of ImageNet's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import simplejpeg
import torch
from torch.nn.functional import cross_entropy

from megabatch import models
from megabatch.batch import steps
from megabatch.bench.dataloader import measured_rate
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.jpeg import Encoding
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack
from megabatch.runs.verdict import Clock, Facts, verdict

CORES = len(os.sched_getaffinity(0))
HOST = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="")
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--micro", type=int, default=256)
    parser.add_argument("--out", default="")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the script itself")
    parser.add_argument("--no-steps", action="store_true", help="leave ResNet-50 out")
    arguments = parser.parse_args()
    device = Cluster.from_env(device=arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        packs = make_packs(arguments, Path(folder))
        gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "none"
        result = {"gpu": gpu, "cores": CORES, "torch": torch.__version__}
        result["checks"] = check(packs, device)
        result["rates"] = {
            name: measure(name, contender, device, arguments.seconds)
            for name, contender in contenders(packs, arguments.micro).items()
        }
        if not arguments.no_steps:
            result["steps"] = step_losses(packs, device, arguments)
    print(json.dumps(result, indent=2))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")


# --- the images --------------------------------------------------------------------------------


def make_packs(arguments: argparse.Namespace, where: Path) -> dict[str, Path]:
    source = where / "set"
    for part, count in (("train", arguments.count), ("val", 4)):
        target = source / part / "all"
        target.mkdir(parents=True)
        given = sorted(Path(arguments.images).rglob("*.JPEG")) if arguments.images else []
        for number in range(count):
            path = target / f"{number:06d}.JPEG"
            if given:
                path.symlink_to(given[number % len(given)].resolve())
            else:
                path.write_bytes(photograph(number))
    origin = open_origin(source)
    encodings = {
        "originals": Encoding(),
        "256": Encoding(size=256),
        "raw 256": Encoding("raw", 256),
        "raw 64": Encoding("raw", 64),
    }
    packs = {name: where / f"{name.replace(' ', '-')}.arrow" for name in encodings}
    for name, encoding in encodings.items():
        pack(origin, "bench", packs[name], encoding, skip_bad=arguments.count, threads=CORES)
    return packs


def photograph(seed: int, height: int = 375, width: int = 500) -> bytes:
    """About 110 KB, as ImageNet's are."""
    generator = numpy.random.default_rng(seed)
    y, x = numpy.mgrid[0:height, 0:width]
    waves = [numpy.sin(x * generator.uniform(0.01, 0.2) + y * 0.05 + c) for c in range(3)]
    noise = generator.normal(0, 12, (height, width, 3))
    pixels = numpy.stack(waves, 2) * 60 + 128 + noise
    return simplejpeg.encode_jpeg(pixels.clip(0, 255).astype(numpy.uint8), quality=90)


def config_of(path: Path, micro: int, **data: object) -> Config:
    photos = Data(
        path=str(path), size=224, channels=3, crop_area=(0.08, 1.0), flip=True, decode="cpu",
        resident="never",
    )  # fmt: skip
    return Config(batch=micro, micro=micro, span=micro, epochs=1e6, data=replace(photos, **data))


# --- checks ------------------------------------------------------------------------------------


def check(packs: dict[str, Path], device: Cluster) -> dict[str, float]:
    """The largest and mean difference of pixels (of 256 steps) between device and host."""
    found = {}
    for name, changes in (
        ("256", {}),
        ("256", {"jitter": (0.4, 0.4, 0.4), "lighting": 0.1}),
        ("raw 64", {"resident": "always", "size": 64}),
    ):
        config = config_of(packs[name], 64, **changes)
        plain = replace(config, data=replace(config.data, resident="never"))
        on_device, on_host = first_images(config, device), first_images(plain, HOST)
        assert torch.equal(on_device.labels.cpu(), on_host.labels)
        difference = (on_device.images.cpu() - on_host.images).abs() * 0.225 * 255
        label = f"{name} {changes or ''}".strip()
        found[f"{label}: max"] = round(difference.max().item(), 3)
        found[f"{label}: mean"] = round(difference.mean().item(), 4)
    assert found["256: max"] < 1.01, "crops resized on the device differ from the host's"
    return found


def first_images(config: Config, cluster: Cluster):
    train, _ = open_sources(config)
    with StepLoader(train, None, config, cluster, torch.float32) as loader:
        step = next(steps(config.all_stages, len(train), config.epochs))
        return next(loader.micro_batches(step))


# --- rates -------------------------------------------------------------------------------------


def contenders(packs: dict[str, Path], micro: int) -> dict[str, Contender]:
    return {
        "256 px pack, all cores": Contender(config_of(packs["256"], micro)),
        "256 px pack, 8 cores": Contender(config_of(packs["256"], micro), cores=8),
        "256 px pack, threads": Contender(config_of(packs["256"], micro, processes="never")),
        "originals, all cores": Contender(config_of(packs["originals"], micro)),
        "raw 256 px": Contender(config_of(packs["raw 256"], micro)),
        "raw 256 px, resident": Contender(config_of(packs["raw 256"], micro, resident="always")),
        "raw 64 px, resident": Contender(
            config_of(packs["raw 64"], 1024, resident="always", size=64)
        ),
    }


@dataclass(frozen=True)
class Contender:
    config: Config
    cores: int = CORES

    @contextlib.contextmanager
    def loader(self, device: Cluster) -> Iterator[tuple[StepLoader, int]]:
        """The loader, on so many cores and no more, and how many images it has."""
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(allowed)[: self.cores])
        try:
            train, _ = open_sources(self.config)
            with StepLoader(train, None, self.config, device, torch.float32) as loader:
                yield loader, len(train)
        finally:
            os.sched_setaffinity(0, allowed)


def measure(name: str, contender: Contender, device: Cluster, seconds: float) -> float:
    with contender.loader(device) as (loader, images):
        counts = (len(batch.images) for batch in batches(loader, contender.config, images))
        rate = measured_rate(counts, seconds, device.device)
    print(f"{name}: {rate:,.0f} images/s", flush=True)
    return round(rate)


def batches(loader: StepLoader, config: Config, images: int):
    for step in steps(config.all_stages, images, config.epochs):
        yield from loader.micro_batches(step)


# --- steps -------------------------------------------------------------------------------------


def step_losses(
    packs: dict[str, Path], device: Cluster, arguments: argparse.Namespace
) -> dict[str, dict[str, object]]:
    """ResNet-50 in bf16 on images that are already there, then with each loader."""
    micro, gpu = arguments.micro, device.device
    net = models.build("resnet50", 1000, 3, 224).to(gpu, memory_format=torch.channels_last)
    compiled = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def train_on(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(compiled(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    same = torch.randn(micro, 3, 224, 224, device=gpu), torch.zeros(micro, device=gpu).long()

    def synthetic():
        while True:
            train_on(*same)
            yield micro

    def trained(loader: StepLoader, config: Config, images: int):
        for batch in batches(loader, config, images):
            train_on(batch.images, batch.labels)
            yield len(batch.images)

    found: dict[str, dict[str, object]] = {}
    for name, contender in contenders(packs, micro).items():
        data = contender.config.data
        if data.size != 224:
            continue
        # Before and after: what a GPU does in a second changes with its temperature.
        limits = [measured_rate(synthetic(), arguments.seconds / 2, gpu)]
        with contender.loader(device) as (loader, images):
            batches_ = trained(loader, contender.config, images)
            for _ in range(8):
                next(batches_)
            clock = Clock()
            clock.lap(loader.waited_seconds, loader.busy_seconds, loader.core_seconds)
            rate = measured_rate(batches_, arguments.seconds, gpu)
            waits = clock.lap(loader.waited_seconds, loader.busy_seconds, loader.core_seconds)
            facts = Facts(
                loader.threads,
                contender.cores,
                224,
                packed=True,
                stored_size={"256": 256, "originals": 0}.get(Path(data.path).stem),
                readers=loader.readers,
            )
        limits.append(measured_rate(synthetic(), arguments.seconds / 2, gpu))
        found[name] = {
            "images_per_second": round(rate),
            "synthetic": round(sum(limits) / 2),
            "loss": round(1 - rate / (sum(limits) / 2), 4),
            "verdict": str(verdict(waits, facts)),
        }
        print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    began = time.time()
    main()
    print(f"{time.time() - began:.0f} s")
