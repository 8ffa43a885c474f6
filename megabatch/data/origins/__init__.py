"""Where packs come from: data sets as they are published, listed in a fixed order and read by
index.

`open_origin` decides by what lies at the path. An origin lists its training images first; where it
has no val part, packing holds a share out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from megabatch.data.jpeg import Encoded, Pixels
from megabatch.data.origins import folders
from megabatch.errors import UserError


class Origin(Protocol):
    """Images to pack, by index: `train` training images, then the val part if there is one."""

    kind: str
    classes: list[str]
    labels: NDArray[numpy.int32]
    train: int
    pixels: bool
    """reads give pixels, not files"""
    notes: tuple[str, ...]
    """what a user should know of it, a line each"""

    def name(self, index: int) -> str:
        """What the image is called; unique."""
        ...

    def stamp(self, index: int) -> str:
        """Changes when the image may have changed: its file's size and time."""
        ...

    def seems_whole(self, index: int) -> bool:
        """Whether a quick look finds nothing wrong with the image; True where none is possible."""
        ...

    def read(self, index: int) -> Encoded | Pixels:
        """The image's bytes or pixels; called from several threads."""
        ...


@cache
def kinds() -> tuple[Any, ...]:
    """The modules here that know a kind of data set: found_at(path) -> bool, open_at(path) ->
    Origin. A new kind is a new file; folders of any images come last."""
    found = (import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))
    known = [module for module in found if hasattr(module, "found_at")]
    return tuple(sorted(known, key=lambda module: (module is folders, module.__name__)))


def open_origin(path: Path) -> Origin:
    """The data set at a path, of whatever kind it is."""
    kind = kind_at(path)
    with _in_words(path):
        opened: Origin = kind.open_at(path)
    return opened


def kind_at(path: Path) -> Any:
    """Which of the kinds lies at a path."""
    if not path.exists():
        raise UserError(f"there is no {path}: name a folder or an archive of images")
    with _in_words(path):
        for kind in kinds():
            if kind.found_at(path):
                return kind
    raise UserError(
        f"{path} is no set of images that is known here: give a folder of class folders (or train "
        f"and val with class folders), Tiny ImageNet, ILSVRC2012's tar files, parquet, CIFAR or "
        f"idx files"
    )


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """What cannot be read while it is looked through, by its name."""
    try:
        yield
    except OSError as error:
        denied = isinstance(error, PermissionError)
        why = "check its permissions" if denied else error.strerror or error
        raise UserError(f"{error.filename or path} cannot be read: {why}") from error
