"""The original tar files of ILSVRC2012, read where they are: no unpacking, any order, many threads.

The labels of the val part come from the devkit archive beside them, or from a text file with one
WordNet id a line.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.typing import NDArray

from megabatch.data.origins.expanding import expanded
from megabatch.errors import UserError

_TRAIN, _VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_DEVKIT, _LABELS = "ILSVRC2012_devkit_t12.tar.gz", "*validation_synset_labels.txt"


@dataclass
class Tars:
    root: Path
    classes: list[str]
    labels: NDArray[numpy.int32]
    train: int
    names: list[str]
    offsets: NDArray[numpy.int64]
    sizes: NDArray[numpy.int64]
    kind: str = "ILSVRC2012"
    pixels = False
    notes = ()

    def name(self, index: int) -> str:
        return f"{'train' if index < self.train else 'val'}/{self.names[index]}"

    def stamp(self, index: int) -> str:
        found = self._path(index).stat()
        return f"{self.offsets[index]} {found.st_size} {found.st_mtime_ns}"

    def read(self, index: int) -> bytes:
        size, offset = int(self.sizes[index]), int(self.offsets[index])
        # Opened anew each time, which is little beside the decoding, and nothing is left open.
        with self._path(index).open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError("the tar file ends inside it")
        return data

    def seems_whole(self, index: int) -> bool:
        return True

    def _path(self, index: int) -> Path:
        return self.root / (_TRAIN if index < self.train else _VAL)


def found_at(path: Path) -> bool:
    return path.is_dir() and (path / _TRAIN).is_file()


def open_at(path: Path) -> Tars:
    inner: dict[str, list[tuple[str, int, int]]] = {}
    try:
        with tarfile.open(path / _TRAIN, "r:") as outer:
            for member, at, _ in _members(outer):
                opened = outer.extractfile(member)
                if opened is None or not member.name.endswith(".tar"):
                    continue
                wnid = Path(member.name).stem
                with tarfile.open(fileobj=opened, mode="r:") as archive:
                    found = [(m.name, at + first, size) for m, first, size in _members(archive)]
                inner[wnid] = sorted(found)
        val = _val(path) if (path / _VAL).is_file() else []
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"a tar file in {path} cannot be read: {error}") from None
    if not inner:
        raise UserError(f"{path / _TRAIN} holds no tar files of classes")
    classes = sorted(inner)
    rows = [
        (f"{wnid}/{name}", at, size, label)
        for label, wnid in enumerate(classes)
        for name, at, size in inner[wnid]
    ]
    train = len(rows)
    if val:
        rows += _labelled(path, val, classes)
    names, offsets, sizes, labels = zip(*rows, strict=True)
    return Tars(
        path,
        classes,
        numpy.array(labels, numpy.int32),
        train,
        list(names),
        numpy.array(offsets, numpy.int64),
        numpy.array(sizes, numpy.int64),
    )


def _members(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, int, int]]:
    """Files with offset and size; tarfile's own list of all it has seen is kept short."""
    for member in archive:
        if member.isfile():
            yield member, member.offset_data, member.size
        archive.members = []  # type: ignore[attr-defined]


def _val(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path / _VAL, "r:") as archive:
        return sorted((m.name, at, size) for m, at, size in _members(archive))


def _labelled(
    path: Path, val: list[tuple[str, int, int]], classes: list[str]
) -> list[tuple[str, int, int, int]]:
    number = {wnid: label for label, wnid in enumerate(classes)}
    wnids = _val_wnids(path)
    if len(wnids) != len(val):
        raise UserError(f"{path} has {len(val)} val images but labels for {len(wnids)}")
    strange = [wnid for wnid in wnids if wnid not in number]
    if strange:
        raise UserError(f"the val labels in {path} name {strange[0]}, which the train part lacks")
    return [
        (name, at, size, number[wnid]) for (name, at, size), wnid in zip(val, wnids, strict=True)
    ]


def _val_wnids(path: Path) -> list[str]:
    """The WordNet id of each val image, in order of name."""
    listed = sorted(path.glob(_LABELS))
    if listed:
        return listed[0].read_text().split()
    if not (path / _DEVKIT).is_file():
        raise UserError(
            f"{path} has no labels for {_VAL}: put {_DEVKIT} beside it, or a file {_LABELS} with "
            f"one WordNet id a line"
        )
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            f"the labels in {_DEVKIT} are a MATLAB file, which scipy reads: pip install scipy"
        ) from None
    with (
        expanded(path / _DEVKIT) as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        parts: dict[str, IO[bytes]] = {}
        for member in archive:
            for wanted in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"):
                opened = archive.extractfile(member) if member.name.endswith(wanted) else None
                if opened is not None:
                    parts[wanted] = io.BytesIO(opened.read())
    if len(parts) != 2:
        raise UserError(f"{path / _DEVKIT} lacks meta.mat or the ground truth of the val part")
    synsets: Any = loadmat(parts["meta.mat"], squeeze_me=True)["synsets"]
    wnid_of = {int(row[0]): str(row[1]) for row in synsets}
    truth = parts["ILSVRC2012_validation_ground_truth.txt"].read().split()
    return [wnid_of[int(number)] for number in truth]
