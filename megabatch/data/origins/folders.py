"""Folders of class folders, with or without train and val, and Tiny ImageNet's own layout.

Links are followed. Names are ordered by their bytes, so the order is the same on every machine.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from megabatch.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png")
VAL_NAMES = ("val", "validation", "valid", "test")
_ANNOTATIONS = "val_annotations.txt"


class Names:
    """Many names in little memory: a string has 57 bytes beside its letters, one here 8."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        self.extend(names)

    def extend(self, names: Iterable[str]) -> None:
        for name in names:
            self._bytes += os.fsencode(name)
            self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(bytes(self._bytes[self._ends[index] : self._ends[index + 1]]))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


@dataclass
class Folders:
    kind: str
    root: str
    classes: list[str]
    labels: NDArray[numpy.int32]
    train: int
    names: Names
    """paths below the root"""
    pixels = False

    def name(self, index: int) -> str:
        # A name that is no UTF-8 is still a name: its odd bytes are written out.
        return os.fsencode(self.names[index]).decode(errors="backslashreplace")

    def stamp(self, index: int) -> str:
        try:
            found = os.stat(os.path.join(self.root, self.names[index]))
        except OSError:
            return "unreadable"
        return f"{found.st_size} {found.st_mtime_ns}"

    def read(self, index: int) -> bytes:
        with open(os.path.join(self.root, self.names[index]), "rb") as file:
            return file.read()


def found_at(path: Path) -> bool:
    return path.is_dir() and (_splits(path) is not None or len(_class_folders(path)) > 0)


def open_at(path: Path) -> Folders:
    splits = _splits(path)
    if splits is None:
        names, labels, classes = _listed(path, path, _class_folders(path))
        return Folders("folder", str(path), classes, labels, len(names), names)
    train_root, val_root = splits
    classes = _class_folders(train_root)
    names, labels, _ = _listed(path, train_root, classes)
    train = len(names)
    if val_root is None:
        return Folders("folder", str(path), classes, labels, train, names)
    more: Iterable[str]
    if (val_root / _ANNOTATIONS).is_file() and (val_root / "images").is_dir():
        more, more_labels = _annotated(path, val_root, classes)
        kind = "Tiny ImageNet"
    else:
        more, more_labels, val_classes = _listed(path, val_root, _class_folders(val_root), classes)
        kind = "folder"
        strange = sorted(set(val_classes) - set(classes))
        if strange:
            raise UserError(
                f"{val_root} has a class {strange[0]} that {train_root} lacks: its images would "
                f"have no label; add it to both or remove it"
            )
    names.extend(more)
    return Folders(kind, str(path), classes, numpy.concatenate([labels, more_labels]), train, names)


def _splits(path: Path) -> tuple[Path, Path | None] | None:
    """The train folder and the val folder, if the path has a train folder."""
    if not (path / "train").is_dir():
        return None
    found = [path / name for name in VAL_NAMES if (path / name).is_dir()]
    # Tiny ImageNet's test part has no labels: only a folder of class folders, or the annotated
    # val, will do.
    usable = [
        folder for folder in found if (folder / _ANNOTATIONS).is_file() or _class_folders(folder)
    ]
    return path / "train", usable[0] if usable else None


def _class_folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        names = [
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        ]
    return sorted(names, key=os.fsencode)


def _listed(
    top: Path, root: Path, folders: list[str], classes: list[str] | None = None
) -> tuple[Names, NDArray[numpy.int32], list[str]]:
    """Paths below `top` of the images in class folders below `root`, and their labels."""
    number = {name: label for label, name in enumerate(classes or folders)}
    names = Names()
    labels = array("i")
    for folder in folders:
        where = root / folder
        found = _images(where)
        if not found and (where / "images").is_dir():  # as Tiny ImageNet nests them
            found = [f"images/{name}" for name in _images(where / "images")]
        names.extend(os.path.relpath(where / name, top) for name in found)
        labels.extend([number.get(folder, -1)] * len(found))
    if len(names) == 0:
        raise UserError(f"{root} holds no JPEG or PNG images: they belong into {root}/CLASS/")
    return names, numpy.array(labels, numpy.int32), folders


def _images(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        # No question whether it is a file: a dangling link is to be reported, not passed over.
        names = [entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES)]
    return sorted(names, key=os.fsencode)


def _annotated(top: Path, val: Path, classes: list[str]) -> tuple[list[str], NDArray[numpy.int32]]:
    """Tiny ImageNet's val part: one folder, and a table of file and class."""
    number = {name: label for label, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for row, line in enumerate((val / _ANNOTATIONS).read_text().splitlines(), 1):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in number:
            raise UserError(
                f"line {row} of {val / _ANNOTATIONS} names no class of the train part: {line[:60]}"
            )
        names.append(os.path.relpath(val / "images" / words[0], top))
        labels.append(number[words[1]])
    return names, numpy.array(labels, numpy.int32)
