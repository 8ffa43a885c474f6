"""The images that a config names: whether they are there, told without reading one and without
torch, so that a slip is answered before a worker is started."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from megabatch.config import Data
from megabatch.data.origins import kind_at
from megabatch.data.packs.reading import Pack
from megabatch.errors import UserError


def check_named(data: Data) -> None:
    """Refuse images that are not there, and settings that are for images of another kind."""
    check_fitting(data)
    if data.kind == "pack":
        Pack(data.path)
    elif data.kind == "folder":
        kind_at(Path(data.path))
    elif data.kind == "digits" and find_spec("sklearn") is None:
        raise UserError(NO_DIGITS)


NO_DIGITS = "the digits live in scikit-learn, which is not installed: pip install 'megabatch[demo]'"


def moved(data: Data, path: str | None) -> Data:
    """A run's images where they are now; None: where they were."""
    there = data if path is None else replace(data, path=path)
    # Of a pack nothing is left out, though the run's folder may have had images that were.
    return there if there.kind == "folder" else replace(there, skip_bad=0)


def check_fitting(data: Data) -> None:
    if data.skip_bad and data.kind != "folder":
        raise UserError(
            "data.skip_bad leaves unreadable images of a folder out; for packs megabatch pack has "
            "--skip-bad"
        )
    if data.kind not in ("pack", "folder"):
        return
    if data.local_copy and data.kind != "pack":
        raise UserError(
            "data.local_copy copies packs, but the images are no pack: make one with megabatch pack"
        )
    if data.path == "":
        raise UserError(
            "no images were named: give --data.path a pack (FILE.arrow), or a folder with "
            "train/CLASS/ and val/CLASS/"
        )
