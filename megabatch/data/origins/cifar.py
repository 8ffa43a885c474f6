"""CIFAR-10 and CIFAR-100, binary and Python version, as archives or unpacked.

The Python version is pickled. It is read by an unpickler that knows four inert stand-ins for
numpy's names and refuses every other, so nothing in the file is ever executed.
"""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from megabatch.data.jpeg import Pixels
from megabatch.data.origins.expanding import expanded
from megabatch.data.origins.idx import Arrays
from megabatch.errors import UserError

_PIXELS = 3 * 32 * 32
_TRAIN = [f"data_batch_{part}" for part in range(1, 6)]
# (training files, test files, label bytes in front of a binary row, key of the labels, names)
_KINDS: dict[str, tuple[list[str], str, int, str, str]] = {
    "CIFAR-10 binary": ([f"{n}.bin" for n in _TRAIN], "test_batch.bin", 1, "", "batches.meta.txt"),
    "CIFAR-100 binary": (["train.bin"], "test.bin", 2, "", "fine_label_names.txt"),
    "CIFAR-10 Python": (_TRAIN, "test_batch", 0, "labels", "batches.meta"),
    "CIFAR-100 Python": (["train"], "test", 0, "fine_labels", "meta"),
}


_NAMES = {name for train, test, *_, names in _KINDS.values() for name in (*train, test, names)}
_MOST_BYTES = 256 << 20


def found_at(path: Path) -> bool:
    if path.is_file():
        return path.name.startswith("cifar-") and ".tar" in path.name
    return path.is_dir() and _kind(_plain_files(path)) is not None


def open_at(path: Path) -> Arrays:
    files = _unpacked(path) if path.is_file() else _plain_files(path)
    kind = _kind(files)
    if kind is None:
        raise UserError(f"{path} holds none of the files of CIFAR-10 or CIFAR-100")
    train, test, ahead, key, names_file = _KINDS[kind]
    images: list[Pixels] = []
    labels: list[NDArray[Any]] = []
    for name in [*train, test]:
        data = files[name] if isinstance(files[name], bytes) else files[name].read_bytes()
        some, numbers = _binary(data, ahead, name) if ahead else _pickled(data, key, name)
        images.append(some.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(numbers)
    together = numpy.concatenate(labels).astype(numpy.int32)
    found = path.stat()
    return Arrays(
        kind,
        images,
        together,
        sum(len(part) for part in images[:-1]),
        _class_names(files.get(names_file), bool(ahead), int(together.max()) + 1),
        f"{found.st_size} {found.st_mtime_ns}",
    )


def _plain_files(path: Path) -> dict[str, Any]:
    return {entry.name: entry for entry in path.iterdir() if entry.is_file()}


def _unpacked(path: Path) -> dict[str, Any]:
    """The files of an archive that a CIFAR data set has; others are not looked at."""
    found: dict[str, Any] = {}
    try:
        with expanded(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in _NAMES and member.size <= _MOST_BYTES:
                    opened = archive.extractfile(member)
                    assert opened is not None
                    found[name] = opened.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"the archive {path} cannot be read: {error}") from None
    return found


def _kind(names: Iterable[str]) -> str | None:
    there = set(names)
    return next(
        (kind for kind, (train, test, *_) in _KINDS.items() if {*train, test} <= there), None
    )


def _binary(data: bytes, ahead: int, name: str) -> tuple[Pixels, NDArray[numpy.uint8]]:
    if len(data) == 0 or len(data) % (ahead + _PIXELS):
        raise UserError(f"{name} is damaged: {len(data):,} bytes are no whole number of images")
    rows = numpy.frombuffer(data, numpy.uint8).reshape(-1, ahead + _PIXELS)
    return rows[:, ahead:], rows[:, ahead - 1]  # of coarse and fine label the fine one is last


def _class_names(found: Any, text: bool, count: int) -> list[str]:
    names: list[str] = []
    if found is not None:
        data = found if isinstance(found, bytes) else found.read_bytes()
        if text:
            names = data.decode(errors="replace").split()
        else:
            meta = _unpickled(data, "the class names")
            listed = meta.get("label_names") or meta.get("fine_label_names") or []
            names = [str(name) for name in listed]
    return names if len(names) >= count else [str(label) for label in range(count)]


# --- pickles without execution -----------------------------------------------------------------


class _Array:
    """What numpy's pickled arrays become here: a note of their state."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Array):
    """A pickled dtype: only unsigned bytes are wanted, and only their name is looked at."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        super().__init__()
        self.name = name


class _Ndarray:
    """Stands for the type that _reconstruct is handed."""


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode("latin1") if encoding == "latin1" else b""


_STAND_INS: dict[tuple[str, str], Any] = {
    (module, name): stand_in
    for modules, name, stand_in in (
        (("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", _Array),
        (("numpy",), "ndarray", _Ndarray),
        (("numpy",), "dtype", _Dtype),
        (("_codecs",), "encode", _encoded),
    )
    for module in modules
}


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _STAND_INS[module, name]


def _unpickled(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = _Inert(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{name} is no plain CIFAR pickle, so it is not read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{name} is no plain CIFAR pickle, so it is not read: it is no table")
    return {str(key): value for key, value in found.items()}


def _pickled(data: bytes, key: str, name: str) -> tuple[Pixels, NDArray[Any]]:
    table = _unpickled(data, name)
    array = table.get("data")
    try:
        assert isinstance(array, _Array)
        _, shape, dtype, _, raw = array.state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        assert dtype.name == "u1" and shape == (len(table[key]), _PIXELS)
        images = numpy.frombuffer(raw, numpy.uint8).reshape(shape)
        labels = numpy.array([int(label) for label in table[key]])
        assert (labels >= 0).all()
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{name} does not hold rows of {_PIXELS} bytes and labels") from None
    return images, labels
