"""Folders of class folders, with or without train and val, and Tiny ImageNet's own layout.

Links are followed, hidden files are passed over. Names are ordered by their bytes, so the order is
the same on every machine.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy
from numpy.typing import NDArray

from megabatch.data.jpeg import ends_well
from megabatch.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff")
VAL_NAMES = ("val", "validation", "valid", "test")
_ANNOTATIONS = "val_annotations.txt"
_MOST_BYTES = 1 << 30  # of one file
_NAMED = 3
_AT_AN_END = 64


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
    notes: tuple[str, ...] = ()
    pixels = False

    def name(self, index: int) -> str:
        return _shown(self.names[index])

    def stamp(self, index: int) -> str:
        try:
            found = os.stat(os.path.join(self.root, self.names[index]))
        except OSError:
            return "unreadable"
        return f"{found.st_size} {found.st_mtime_ns}"

    def read(self, index: int) -> bytes:
        with self._opened(index) as file:
            return file.read()

    def seems_whole(self, index: int) -> bool:
        """Whether a file can be opened, and begins and ends as an image does."""
        try:
            with self._opened(index) as file:
                head = file.read(_AT_AN_END)
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _AT_AN_END))
                return ends_well(head, file.read(_AT_AN_END), size)
        except OSError:
            return False

    @contextmanager
    def _opened(self, index: int) -> Iterator[IO[bytes]]:
        # Not blocking: a pipe that is called an image would be waited for, a device never ends.
        path = os.path.join(self.root, self.names[index])
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is no plain file")
            if found.st_size > _MOST_BYTES:
                raise OSError(f"it has {found.st_size:,} bytes")
            yield file


def found_at(path: Path) -> bool:
    return path.is_dir() and (_splits(path) is not None or len(_class_folders(path)) > 0)


def open_at(path: Path) -> Folders:
    splits, passed = _splits(path), _PassedOver()
    train_root, val_root = (path, None) if splits is None else splits
    classes = _class_folders(train_root)
    names, labels = _listed(path, train_root, classes, classes, passed)
    train = len(names)
    passed.only = classes[0] if len(classes) == 1 else None
    if val_root is None:
        return Folders("folder", str(path), classes, labels, train, names, passed.notes)
    more: Iterable[str]
    if (val_root / _ANNOTATIONS).is_file() and (val_root / "images").is_dir():
        more, more_labels = _annotated(path, val_root, classes)
        kind = "Tiny ImageNet"
    else:
        val_classes = _class_folders(val_root)
        more, more_labels = _listed(path, val_root, val_classes, classes, passed)
        kind = "folder"
        strange = sorted(set(val_classes) - set(classes))
        if strange:
            raise UserError(
                f"{val_root} has a class {_shown(strange[0])} that {train_root} lacks: its images "
                f"would have no label; add it to both or remove it"
            )
    names.extend(more)
    labels = numpy.concatenate([labels, more_labels])
    return Folders(kind, str(path), classes, labels, train, names, passed.notes)


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
        names = [entry.name for entry in entries if not _hidden(entry.name) and _is_folder(entry)]
    return sorted(names, key=os.fsencode)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Of a link that leads to itself, which leads to none, `is_dir` of the entry would raise."""
    return os.path.isdir(entry.path)


def _hidden(name: str) -> bool:
    """Also what a Mac adds to an archive."""
    return name.startswith(".") or name == "__MACOSX"


@dataclass
class _Few:
    """How many there are, and the names of the first."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, names: list[str], folder: Path = Path()) -> None:
        self.count += len(names)
        self.first += [_shown(folder / name) for name in names[: _NAMED - len(self.first)]]

    def __str__(self) -> str:
        return ", ".join(self.first) + (", ..." if self.count > _NAMED else "")


@dataclass
class _PassedOver:
    """What lies beside the images."""

    files: _Few = field(default_factory=_Few)
    folders: _Few = field(default_factory=_Few)
    """inside class folders: whoever has images in them will miss those"""
    empty: _Few = field(default_factory=_Few)
    """class folders without images"""
    only: str | None = None
    """the one class, where there is no other to tell it from"""

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if count := self.files.count:
            what = "file that is no image" if count == 1 else "files that are no images"
            notes.append(f"passed over {count} {what}: {self.files}")
        if count := self.folders.count:
            what = "folder inside a class" if count == 1 else "folders inside classes"
            notes.append(
                f"passed over {count} {what}: {self.folders}: images lie straight in CLASS/"
            )
        if count := self.empty.count:
            what = "class without images" if count == 1 else "classes without images"
            notes.append(f"{count} {what}: {self.empty}")
        if self.only is not None:
            notes.append(
                f"warning: {_shown(self.only)} is the only class, so that there is nothing to "
                f"learn: name the folder in which the class folders lie"
            )
        return tuple(notes)


def _shown(name: str | Path) -> str:
    """A name that is no UTF-8 is still a name: its odd bytes are written out."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _listed(
    top: Path, root: Path, folders: list[str], classes: list[str], passed: _PassedOver
) -> tuple[Names, NDArray[numpy.int32]]:
    """Paths below `top` of the images in class folders below `root`, and their labels."""
    number = {name: label for label, name in enumerate(classes)}
    names = Names()
    labels = array("i")
    for folder in folders:
        where = root / folder
        found, inner, others = _images(where)
        if not found and "images" in inner:  # as Tiny ImageNet nests them
            where = where / "images"
            found, inner, others = _images(where)
        passed.folders.add(inner, where)
        passed.files.add(others, where)
        if not found:
            passed.empty.add([os.path.relpath(root / folder, top)])
        names.extend(os.path.relpath(where / name, top) for name in found)
        labels.extend([number.get(folder, -1)] * len(found))
    if len(names) == 0:
        kinds = ", ".join(suffix.removeprefix(".") for suffix in SUFFIXES)
        raise UserError(f"{root} holds no images ({kinds}): they belong into {root}/CLASS/")
    return names, numpy.array(labels, numpy.int32)


def _images(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The names of images, of folders, and of what else is there."""
    images: list[str] = []
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _hidden(entry.name):
                continue
            # No question whether it is a file: a dangling link is to be reported, not passed over.
            if entry.name.lower().endswith(SUFFIXES):
                images.append(entry.name)
            else:
                (folders if _is_folder(entry) else others).append(entry.name)
    for names in (images, folders, others):
        names.sort(key=os.fsencode)
    return images, folders, others


def _annotated(top: Path, val: Path, classes: list[str]) -> tuple[list[str], NDArray[numpy.int32]]:
    """Tiny ImageNet's val part: one folder, and a table of file and class."""
    number = {name: label for label, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    for row, line in enumerate((val / _ANNOTATIONS).read_text(errors="replace").splitlines(), 1):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in number:
            raise UserError(
                f"line {row} of {val / _ANNOTATIONS} names no class of the train part: {line[:60]}"
            )
        if not words[0] or words[0] != os.path.basename(words[0]) or words[0] in (".", ".."):
            raise UserError(
                f"line {row} of {val / _ANNOTATIONS} names no file in {val / 'images'}: {line[:60]}"
            )
        names.append(os.path.relpath(val / "images" / words[0], top))
        labels.append(number[words[1]])
    return names, numpy.array(labels, numpy.int32)
