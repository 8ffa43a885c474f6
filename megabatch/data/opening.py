"""Opening the images of a run: what the config names, as a training and a validation source."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.decoded import Decoded, FromOrigin, FromPack
from megabatch.data.jpeg import BadImage, pixels
from megabatch.data.origins import Origin, open_origin
from megabatch.data.origins.folders import VAL_NAMES
from megabatch.data.packs.reading import Pack, PackError
from megabatch.data.paths import NO_DIGITS, check_fitting
from megabatch.data.source import (
    InMemory,
    OwnData,
    Source,
    are_two_sets,
    for_tuning,
    hold_out,
    hold_out_order,
)
from megabatch.data.threads import threads_of
from megabatch.errors import UserError
from megabatch.keyed import Purpose, keyed

_NAMED = 3
_SLAB = 64
"""synthetic images that are drawn at a time"""


def open_sources(
    config: Config,
    data: Any = None,
    cluster: Cluster | None = None,
    training: bool = True,
    left_out: Sequence[int] | None = None,
) -> tuple[Source, Source]:
    """The training and the validation images of a run; `data` is a caller's own set, or two of
    them.

    With a cluster, all of whose workers call it, the images of a folder are looked at first (unless
    `training`, those of validation alone), and all that cannot be read are named or left out;
    `left_out` are those that such a look has found before. With data.tuning_share the validation
    images stay unseen: some of the training images take their place.
    """
    sources = _open(config, data, cluster, training, left_out)
    return for_tuning(sources, config.data.tuning_share)


def _open(
    config: Config,
    data: Any,
    cluster: Cluster | None,
    training: bool,
    left_out: Sequence[int] | None,
) -> tuple[Source, Source]:
    kind = config.data.kind
    if data is not None:
        if config.data.skip_bad:
            raise UserError("data.skip_bad leaves images of a folder out, not of data of your own")
        return open_own(config, data)
    check_fitting(config.data)
    if kind in ("pack", "folder"):
        looking = cluster if left_out is None else None
        return open_stored(config, left_out or (), looking, training)
    if kind == "own":
        raise UserError(
            "data.source is own but no data was given: megabatch.train(config, data=...)"
        )
    if kind == "digits":
        return hold_out(digits(config.data), config.data.val_share)
    drawn_on = torch.device("cpu") if cluster is None else cluster.device
    return hold_out(synthetic(config, drawn_on), config.data.val_share)


def open_own(config: Config, data: Any) -> tuple[Source, Source]:
    """A data set of the caller's, of which a share is held out, or two of them."""
    if isinstance(data, Mapping) and "train" in data:  # as Hugging Face keeps the parts together
        val = next((data[name] for name in VAL_NAMES if name in data), None)
        data = data["train"] if val is None else (data["train"], val)
    if are_two_sets(data):
        titles = ("the training set", "the validation set")
        train, val = (
            OwnData(part, config, title) for part, title in zip(data, titles, strict=True)
        )
        val.number_as(train)
        return train, val
    return hold_out(OwnData(data, config, "the data set"), config.data.val_share)


# --- images that are stored --------------------------------------------------------------------


def open_stored(
    config: Config,
    left_out: Sequence[int] = (),
    cluster: Cluster | None = None,
    training: bool = True,
) -> tuple[Decoded, Decoded]:
    """The train and val parts of a pack, a folder or an archive, without the images left out."""
    check_fitting(config.data)
    if config.data.kind == "pack":
        train, val = _open_pack(config)
    else:
        train, val = _open_origin(config, left_out, cluster, training)
    train.notes = (*train.notes, *_colour_left_out(train))
    return train, val


def _colour_left_out(train: Decoded) -> tuple[str, ...]:
    """A note where the first image has colour that the model will not see: few mean it."""
    if train.data.channels != 1:
        return ()
    try:
        image = train.records.record(int(train.chosen[0]))
        seen = image if isinstance(image, numpy.ndarray) else pixels(image, 3)
    except (BadImage, PackError, OSError):  # whoever trains on it says so
        return ()
    if (seen == seen[..., :1]).all():
        return ()
    return ("the images are in colour but seen in grey: --data.channels 3 takes them as they are",)


def _open_origin(
    config: Config, left_out: Sequence[int], cluster: Cluster | None, training: bool
) -> tuple[Decoded, Decoded]:
    path = Path(config.data.path)
    origin = open_origin(path)
    train, val = _parts_of(origin, config.data.val_share)
    bad: list[Unreadable] = []
    if cluster is not None:
        looked_at = torch.cat([train, val]) if training else val
        bad = find_bad(origin, looked_at, config, cluster)
        left_out = [index for index, _ in bad]
    sources = []
    labels = torch.from_numpy(origin.labels.astype(numpy.int64))
    for name, part in (("train", train), ("val", val)):
        chosen = part[~torch.isin(part, torch.tensor(left_out, dtype=torch.int64))]
        if len(chosen) == 0:
            raise UserError(f"none of the {len(part)} {name} images in {path} can be read")
        sources.append(
            Decoded(
                config.data,
                FromOrigin(origin, path),
                chosen,
                labels[chosen],
                len(origin.classes),
                tuple(left_out),
                (*origin.notes, *([f"left out {_named(origin, bad)}"] if bad else [])),
                origin.classes,
            )
        )
    return sources[0], sources[1]


def _parts_of(origin: Origin, val_share: float) -> tuple[Tensor, Tensor]:
    """The training and the validation images: a share is held out where there is no val part."""
    count = len(origin.labels)
    if origin.train < count:
        return torch.arange(origin.train), torch.arange(origin.train, count)
    return hold_out_order(count, val_share)


Unreadable = tuple[int, str]
"""an image's number in its origin, and why it cannot be read"""


def find_bad(origin: Origin, indices: Tensor, config: Config, cluster: Cluster) -> list[Unreadable]:
    """All unreadable images, the same list on every worker; an error if they are too many.

    Each worker looks at its share. A quick look finds files that are missing, empty, cut off or no
    images; where some may be left out, every image is decoded once, so that none is met later.
    """
    if origin.pixels:
        return []
    allowed, records = config.data.skip_bad, FromOrigin(origin, Path(config.data.path))

    def look(index: int) -> Unreadable | None:
        if not allowed and origin.seems_whole(index):
            return None
        try:
            image = records.record(index)
            assert not isinstance(image, numpy.ndarray)
            pixels(image, 3, factor=8)
        except BadImage as error:
            return index, str(error)
        return None

    with ThreadPoolExecutor(threads_of(config, cluster), "look") as pool:
        mine = indices[cluster.rank :: cluster.world].tolist()
        found = [bad for bad in pool.map(look, mine) if bad is not None]
    bad = sorted(itertools.chain.from_iterable(cluster.gather(found)))
    if len(bad) > allowed:
        raise UserError(
            f"{config.data.path} has {_named(origin, bad)}; repair or remove them, or leave them "
            f"out with --data.skip-bad {len(bad)}; from Python, Data(skip_bad={len(bad)})"
        )
    return bad


def _named(origin: Origin, bad: list[Unreadable]) -> str:
    first = ", ".join(f"{origin.name(index)} ({reason})" for index, reason in bad[:_NAMED])
    more = ", ..." if len(bad) > _NAMED else ""
    return f"{len(bad)} unreadable image{'s' if len(bad) > 1 else ''}: {first}{more}"


def _open_pack(config: Config) -> tuple[Decoded, Decoded]:
    """From node-local storage where that was asked for."""
    data = config.data
    pack = Pack(staged(Path(data.path), Path(data.local_copy)) if data.local_copy else data.path)
    for part in ("train", "val"):
        first, last = pack.about.splits.get(part, (0, 0))
        if first == last:
            raise PackError(f"the pack {data.path} has no {part} images: pack it again")
    labels = torch.from_numpy(pack.labels.astype(numpy.int64))
    records, names = FromPack(pack), pack.about.classes
    train, val = (
        Decoded(data, records, chosen, labels[chosen], len(names), class_names=names)
        for chosen in (torch.arange(*pack.about.splits[part]) for part in ("train", "val"))
    )
    return train, val


def staged(path: Path, folder: Path) -> Path:
    """The copy of a pack in a folder of this node; every worker of the node calls it and waits for
    the copy.

    A copy that is there already is used if it is of the same pack, whatever its time.
    """
    original = Pack(path)
    copy = folder / path.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(PackError):
                if Pack(copy).fingerprint == original.fingerprint:
                    return copy
            fresh = folder / f"{path.name}.fresh"
            shutil.copyfile(path, fresh)
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(fresh, copy)
    except OSError as error:
        raise UserError(
            f"the pack cannot be staged in {folder}: {error.strerror or error}; give "
            f"--data.local-copy a folder of this node with space for {original.nbytes / 1e9:.1f} GB"
        ) from None
    return copy


# --- images that need no download --------------------------------------------------------------


def digits(data: Data) -> InMemory:
    """1,797 grey digits of 8 x 8 pixels (enlarged when the model wants more)."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError(NO_DIGITS)
    # The file itself: to import scikit-learn takes each worker longer than a whole epoch.
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(numpy.loadtxt(file, dtype=numpy.uint8, delimiter=","))
    images = rows[:, :64].view(-1, 1, 8, 8).float().mul(16).clamp(0, 255)
    if data.size != 8:
        images = interpolate(images, size=(data.size, data.size), mode="bilinear")
    images = images.round().to(torch.uint8).repeat(1, data.channels, 1, 1)
    return InMemory(images, rows[:, 64].long(), 10, tuple("0123456789"))


def synthetic(config: Config, drawn_on: torch.device) -> InMemory:
    """Noise with a faint pattern a class, so that there is something to learn; a function of the
    seed, whatever device draws it."""
    data, seed = config.data, config.seed
    shape = (data.images, data.channels, data.size, data.size)
    labels = torch.arange(data.images) % data.classes
    images = torch.empty((data.images, math.prod(shape[1:])), dtype=torch.uint8)
    values = torch.arange(images.shape[1], device=drawn_on)
    for first in range(0, data.images, _SLAB):  # what is drawn has eight times the bytes
        some = slice(first, first + _SLAB)
        number = torch.arange(data.images)[some, None].to(drawn_on)
        noise = keyed(seed, Purpose.SYNTHETIC, 0, number, values)
        pattern = keyed(seed, Purpose.SYNTHETIC, 1, labels[some, None].to(drawn_on), values)
        # In bytes before they leave the device: `to` of both would convert on the host.
        images[some] = (noise % 192 + pattern % 64).to(torch.uint8).cpu()
    return InMemory(images.view(shape), labels, classes=data.classes)
