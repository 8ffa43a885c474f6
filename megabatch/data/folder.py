"""A folder of images: train/CLASS/* and val/CLASS/*, JPEG and PNG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from megabatch.config import Data, UserError
from megabatch.data.augment import centre_box, random_box

_SUFFIXES = (".jpg", ".jpeg", ".png")


class Folder:
    """One part (train or val) of a folder of images; classes are its sub-folders in order of
    name."""

    def __init__(self, data: Data, part: str) -> None:
        root = Path(data.path) / part
        self._data = data
        self.names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if not self.names:
            raise UserError(f"{root} holds no class folders: images belong into {root}/CLASS/")
        self.paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.names):
            found = sorted(
                entry.path
                for entry in os.scandir(root / name)
                if entry.name.lower().endswith(_SUFFIXES)
            )
            if not found:
                raise UserError(f"{root / name} holds no JPEG or PNG images: fill it or remove it")
            self.paths += found
            labels += [label] * len(found)
        self.labels = torch.tensor(labels)
        self.classes = len(self.names)
        # Of ImageNet; the usual figures for photographs.
        colour = data.channels == 3
        self.mean: tuple[float, ...] = (0.485, 0.456, 0.406) if colour else (0.45,)
        self.std: tuple[float, ...] = (0.229, 0.224, 0.225) if colour else (0.225,)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = draws.tolist() if draws is not None else [None] * len(indices)
        images = [
            self._read(self.paths[i], row) for i, row in zip(indices.tolist(), rows, strict=True)
        ]
        return torch.from_numpy(numpy.stack(images)), self.labels[indices]

    def _read(self, path: str, draws: list[float] | None) -> numpy.ndarray:
        data = self._data
        try:
            with Image.open(path) as image:
                picture = image.convert("RGB" if data.channels == 3 else "L")
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise UserError(
                f"the image {path} cannot be read ({error}): repair or remove it"
            ) from error
        box = (
            centre_box(data, *picture.size)
            if draws is None
            else random_box(data, *picture.size, draws)
        )
        picture = picture.resize((data.size, data.size), Image.Resampling.BILINEAR, box=box)
        pixels = numpy.asarray(picture)
        return pixels[None] if data.channels == 1 else pixels.transpose(2, 0, 1)


def open_folder(data: Data) -> tuple[Folder, Folder]:
    """The train and val parts, whose classes must be the same."""
    root = Path(data.path)
    if not root.is_dir():
        raise UserError(
            f"there is no folder {root}: give --data.path a folder with train/ and val/"
        )
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise UserError(f"{root} has no {part} folder: images belong into {root}/{part}/CLASS/")
    try:
        train, val = Folder(data, "train"), Folder(data, "val")
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: check its permissions") from error
    if train.names != val.names:
        name = sorted(set(train.names) ^ set(val.names))[0]
        lacking = "val" if name in train.names else "train"
        raise UserError(
            f"the classes of {root}/train and {root}/val differ: {name} is missing in {lacking}, "
            f"so the labels would not agree; both need the same class folders"
        )
    return train, val
