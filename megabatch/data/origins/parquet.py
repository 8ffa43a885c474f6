"""Parquet as Hugging Face lays image sets out: columns image.bytes and label, files named by
split."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from megabatch.data.origins.expanding import bound_of
from megabatch.data.origins.folders import VAL_NAMES
from megabatch.errors import UserError

_MOST_CLASSES = 1 << 20
_KEPT = 3  # row groups in memory: threads that read in order touch two at a time


@dataclass
class Parquet:
    classes: list[str]
    labels: NDArray[numpy.int32]
    train: int
    groups: list[tuple[Path, int]]
    """file and row group"""
    ends: NDArray[numpy.int64]
    """images up to the end of each row group"""
    kind: str = "parquet"
    pixels = False
    notes = ()
    _held: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def name(self, index: int) -> str:
        group, row = self._place(index)
        path, number = self.groups[group]
        return f"{path.name}/{number}/{row}"

    def stamp(self, index: int) -> str:
        found = self.groups[self._place(index)[0]][0].stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def seems_whole(self, index: int) -> bool:
        return True

    def read(self, index: int) -> bytes:
        group, row = self._place(index)
        with self._lock:
            if group not in self._held:
                self._held[group] = self._load(*self.groups[group])
            self._held.move_to_end(group)
            while len(self._held) > _KEPT:
                self._held.popitem(last=False)
            column = self._held[group]
        data: bytes | None = column[row].as_py()
        return data or b""

    def _place(self, index: int) -> tuple[int, int]:
        group = int(numpy.searchsorted(self.ends, index, side="right"))
        return group, index - (int(self.ends[group - 1]) if group else 0)

    def _load(self, path: Path, group: int) -> Any:
        from pyarrow import compute, parquet

        with parquet.ParquetFile(path) as file:
            if file.metadata.row_group(group).total_byte_size > bound_of(path):
                raise UserError(
                    f"{path} claims to expand to many times its size, which images do not: "
                    f"it is not read"
                )
            table = file.read_row_group(group, columns=["image.bytes"])
        return compute.struct_field(table.column("image"), "bytes")


def found_at(path: Path) -> bool:
    return bool(_files(path))


def open_at(path: Path) -> Parquet:
    from pyarrow import ArrowException, parquet

    files = _files(path)
    val = [file for file in files if file.name.split("-")[0].split(".")[0] in VAL_NAMES]
    names: list[str] = []
    labels: list[NDArray[numpy.int32]] = []
    groups: list[tuple[Path, int]] = []
    rows: list[int] = []
    train = 0
    for file in [file for file in files if file not in val] + val:
        try:
            with parquet.ParquetFile(file) as opened:
                if opened.metadata.num_rows > file.stat().st_size:
                    raise ValueError("it claims more images than it has bytes")
                names = names or _class_names(opened.schema_arrow)
                for group in range(opened.num_row_groups):
                    some = opened.read_row_group(group, columns=["label"]).column("label")
                    labels.append(_classes_of(some))
                    groups.append((file, group))
                    rows.append(len(some))
                    train += 0 if file in val else len(some)
        except (ArrowException, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{file} is not parquet with columns image.bytes and label: "
                f"{str(error).splitlines()[0]}"
            ) from None
    together = numpy.concatenate([numpy.zeros(0, numpy.int32), *labels])
    if train == 0 or together.min() < 0:
        raise UserError(f"{path} has no training images with labels: -1 stands for none")
    names = names or [str(label) for label in range(int(together.max()) + 1)]
    return Parquet(names, together, train, groups, numpy.cumsum(rows))


def _files(path: Path) -> list[Path]:
    if path.suffix == ".parquet" and path.is_file():
        return [path]
    if not path.is_dir():
        return []
    found = [file for file in sorted(path.glob("*.parquet")) if file.is_file()]
    found = found or [file for file in sorted(path.glob("data/*.parquet")) if file.is_file()]
    # Hugging Face's test part of ImageNet has no labels; validation is the part to use.
    if any(file.name.startswith("val") for file in found):
        found = [file for file in found if not file.name.startswith("test")]
    return found


def _classes_of(column: Any) -> NDArray[numpy.int32]:
    """Labels as they are: none of them becomes another by a conversion; -1 where there is none."""
    from pyarrow import types

    if not types.is_integer(column.type):
        raise TypeError(f"its labels are {column.type}, not whole numbers")
    found = column.fill_null(column.type.to_pandas_dtype()(0)).to_numpy()
    none = column.is_null().to_numpy() | (found < 0)
    if found.size and found.max() >= _MOST_CLASSES:
        raise ValueError(f"there is no class {found.max()}")
    return numpy.where(none, -1, found).astype(numpy.int32)


def _class_names(schema: Any) -> list[str]:
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in described["info"]["features"]["label"]["names"]]
    except (KeyError, TypeError, ValueError):
        return []
