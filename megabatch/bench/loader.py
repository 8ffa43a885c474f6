"""megabatch bench loader: this loader against torch's DataLoader and the limit of decoding, on the
same images.

The limit is libjpeg-turbo called in a loop on every core, whole pictures, nothing else done. All
contenders take turns, several times, so that a busy moment of the machine strikes them alike; the
median of the turns counts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import simplejpeg
import torch
from rich.console import Console
from rich.table import Table

from megabatch.batch import steps
from megabatch.bench import dataloader
from megabatch.bench.timing import check_seconds
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.jpeg import Encoding
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack
from megabatch.data.packs.reading import Pack
from megabatch.errors import DONE, UserError
from megabatch.verbs.parsing import parse

_SUFFIXES = (".jpg", ".jpeg")


@dataclass(frozen=True)
class LoaderFlags:
    images: str
    """a folder with JPEGs, at any depth"""
    size: int = 224
    """side of the images the model sees"""
    small: int = 256
    """shortest side of the smaller JPEGs, which are measured too"""
    resident: int = 64
    """side of the images that live in memory"""
    threads: int = 0
    """of each contender (0: one a core)"""
    most: int = 1000
    """images to use of the folder"""
    micro: int = 64
    """images in a batch"""
    seconds: float = 3.0
    """length of a turn"""
    turns: int = 3
    """of each contender"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the images are needed"""
    out: str = ""
    """a file for the result as JSON"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


@dataclass(frozen=True)
class Measured:
    """One contender; rates in images a second."""

    images: str
    loader: str
    rate: float
    lowest: float
    highest: float
    of_limit: float | None
    of_dataloader: float | None
    """against DataLoader with Pillow on the same images"""


Turn = Callable[[float], float]
"""seconds -> images a second"""


def run(arguments: list[str]) -> int:
    flags = parse(LoaderFlags, "bench loader", arguments)
    _check(flags)
    threads = flags.threads or len(os.sched_getaffinity(0))
    cluster = Cluster.from_env(device=flags.device)
    with tempfile.TemporaryDirectory(prefix="megabatch-bench-") as folder:
        sets = _prepare(flags, Path(folder), threads)
        contenders = _contenders(flags, sets, threads, cluster)
        rates: dict[tuple[str, str], list[float]] = {name: [] for name in contenders}
        for turn in range(flags.turns):
            for name, measure in contenders.items():
                rates[name].append(measure(flags.seconds))
                rate = f"{rates[name][-1]:,.0f} images/s"
                print(f"turn {turn + 1}: {name[0]}, {name[1]}: {rate}", file=sys.stderr)
    rows = _rows(rates)
    _show(rows)
    result = {
        "threads": threads,
        "cores": len(os.sched_getaffinity(0)),
        "device": str(cluster.device),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "flags": asdict(flags),
        "rows": [asdict(row) for row in rows],
    }
    if flags.out:
        Path(flags.out).parent.mkdir(parents=True, exist_ok=True)
        Path(flags.out).write_text(json.dumps(result, indent=2) + "\n")
    if flags.json:
        print(json.dumps(result), flush=True)
    return DONE


def _check(flags: LoaderFlags) -> None:
    if not Path(flags.images).is_dir():
        raise UserError(f"there is no folder {flags.images}: name one that holds JPEGs")
    for name in ("size", "small", "resident", "most", "micro", "turns"):
        if getattr(flags, name) < 1:
            raise UserError(f"--{name} is {getattr(flags, name)}; give 1 or more")
    if flags.threads < 0:
        raise UserError(f"--threads is {flags.threads}; give 1 or more, or 0 for one a core")
    check_seconds(flags.seconds)


# --- the images --------------------------------------------------------------------------------


def _prepare(flags: LoaderFlags, where: Path, threads: int) -> dict[str, Path]:
    """The same images as folders and packs."""
    found = sorted(
        path
        for path in Path(flags.images).rglob("*")
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )[: flags.most]
    if len(found) < 2 * flags.micro:
        raise UserError(
            f"{flags.images} holds {len(found)} JPEGs; {2 * flags.micro} are needed for batches of "
            f"{flags.micro}: name another folder or lower --micro"
        )
    sets = {"originals": where / "originals", "small": where / "small"}
    for part, paths in (("train", found), ("val", found[:1])):
        folder = sets["originals"] / part / "all"
        folder.mkdir(parents=True)
        for number, path in enumerate(paths):
            (folder / f"{number:06d}.JPEG").symlink_to(path.resolve())
    encodings = {
        "originals.arrow": Encoding(),
        "small.arrow": Encoding(size=flags.small),
        "raw.arrow": Encoding("raw", flags.small),
        "resident.arrow": Encoding("raw", flags.resident),
    }
    origin = open_origin(sets["originals"])
    for name, encoding in encodings.items():
        sets[name] = where / name
        pack(origin, "bench", sets[name], encoding, skip_bad=len(found), threads=threads)
    good = Pack(sets["originals.arrow"])
    names = {good.name(index) for index in range(len(good))}
    for link in sets["originals"].rglob("*.JPEG"):
        if str(link.relative_to(sets["originals"])) not in names:
            link.unlink()  # unreadable: in no pack either
    small = Pack(sets["small.arrow"])
    for index in range(len(small)):
        path = sets["small"] / small.name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(small.record(index))
    return sets


# --- the contenders ----------------------------------------------------------------------------


def _contenders(
    flags: LoaderFlags, sets: dict[str, Path], threads: int, cluster: Cluster
) -> dict[tuple[str, str], Turn]:
    found: dict[tuple[str, str], Turn] = {}
    data = Data(size=flags.size, channels=3, crop_area=(0.08, 1.0), flip=True, threads=threads)

    def ours(images: str, loader: str, path: Path, **changes: Any) -> None:
        config = replace(data, path=str(path), **changes)
        found[images, loader] = lambda seconds: _ours(config, flags.micro, cluster, seconds)

    for name, words in (("originals", "originals"), ("small", f"{flags.small} px")):
        folder = sets[name] / "train"
        found[words, "limit: decoding alone"] = lambda seconds, at=folder: _limit(  # type: ignore[misc]
            at, threads, seconds
        )
        for rival in ("Pillow", "simplejpeg"):
            found[words, f"DataLoader, {rival}"] = lambda seconds, at=folder, by=rival: (  # type: ignore[misc]
                dataloader.rate(at, by, flags.size, flags.micro, threads, cluster.device, seconds)
            )
        ours(words, "ours, folder", sets[name])
        ours(words, "ours, pack", sets[f"{name}.arrow"])
    ours(f"raw {flags.small} px", "ours, raw pack", sets["raw.arrow"], resident="never")
    side = flags.resident
    for loader, resident in (("ours, raw pack", "never"), ("ours, resident", "always")):
        path = sets["resident.arrow"]
        ours(f"raw {side} px", loader, path, resident=resident, size=side)
    return found


def _ours(data: Data, micro: int, cluster: Cluster, seconds: float) -> float:
    config = Config(batch=micro, micro=micro, span=micro, epochs=1e9, data=data)
    train, _ = open_sources(config)
    with StepLoader(train, None, config, cluster, torch.float32) as loader:
        batches = (
            len(batch.images)
            for step in steps(config.all_stages, len(train), config.epochs)
            for batch in loader.micro_batches(step)
        )
        return dataloader.measured_rate(batches, seconds, cluster.device)


def _limit(folder: Path, threads: int, seconds: float) -> float:
    """Bare libjpeg-turbo on so many threads."""
    images = [path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))]
    done = [0] * threads
    largest = max(_pixels(image) for image in images)
    buffers = [bytearray(largest) for _ in range(threads)]
    end = time.perf_counter() + seconds

    def decode(number: int) -> None:
        buffer, at = buffers[number], number
        while True:  # one at least, however late this thread comes to run
            simplejpeg.decode_jpeg(images[at % len(images)], buffer=buffer, strict=False)
            at += threads
            done[number] += 1
            if time.perf_counter() >= end:
                return

    began = time.perf_counter()
    workers = [threading.Thread(target=decode, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - began)


def _pixels(image: bytes) -> int:
    height, width, *_ = simplejpeg.decode_jpeg_header(image, strict=False)
    size: int = height * width * 3
    return size


# --- the result --------------------------------------------------------------------------------


def _rows(rates: dict[tuple[str, str], list[float]]) -> list[Measured]:
    middle = {name: statistics.median(values) for name, values in rates.items()}
    rows = []
    for (images, loader), values in rates.items():
        limit = middle.get((images, "limit: decoding alone"))
        usual = middle.get((images, "DataLoader, Pillow"))
        rate = middle[images, loader]
        rows.append(
            Measured(
                images,
                loader,
                round(rate, 1),
                round(min(values), 1),
                round(max(values), 1),
                None if limit is None else round(rate / limit, 3),
                None if usual is None else round(rate / usual, 3),
            )
        )
    return rows


def _show(rows: list[Measured]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("images", "loader"):
        table.add_column(name)
    for name in ("images/s", "of the limit", "of Pillow"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = [
            "" if v is None else f"{v:.2f}{unit}"
            for v, unit in ((row.of_limit, ""), (row.of_dataloader, " x"))
        ]
        table.add_row(row.images, row.loader, f"{row.rate:,.0f}", *ratios)
    Console().print(table)
