"""Verifying a pack: all checksums, that each image decodes, and that other Arrow readers can open
it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy

from megabatch.data.jpeg import BadImage, pixels
from megabatch.data.packfile import Pack, PackError
from megabatch.errors import UserError

_PIECE = 256
# Arrow may crash on a damaged frame: it is asked in a process of its own.
_OPEN = """
import sys, pyarrow
with pyarrow.memory_map(sys.argv[1]) as file:
    batch = pyarrow.ipc.open_file(file).get_batch(0)
    sys.exit(0 if batch.num_rows == int(sys.argv[2]) else 1)
"""


@dataclass(frozen=True)
class Verified:
    images: int
    bad: list[tuple[str, str]]
    """image and reason"""
    frame: str
    """what is wrong with the Arrow frame, which the loader does not need; else empty"""


def verify(
    path: Path, threads: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Check every byte of a pack; one that cannot even be opened raises PackError."""
    pack = Pack(path)
    pack.check_names()
    raw = pack.about.encoding["kind"] == "raw"

    def check(index: int) -> tuple[str, str] | None:
        try:
            data = pack.record(index)
            if raw:
                numpy.frombuffer(data, numpy.uint8).reshape(pack.about.shape or ())
            else:
                pixels(data, 3, factor=8)
        except PackError:
            return pack.name(index), "its checksum is wrong"
        except (BadImage, UserError, ValueError) as error:
            return pack.name(index), str(error)
        return None

    bad: list[tuple[str, str]] = []
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(pack), _PIECE):
            piece = range(first, min(first + _PIECE, len(pack)))
            bad += [found for found in pool.map(check, piece) if found is not None]
            progress(piece.stop, len(pack))
    command = [sys.executable, "-c", _OPEN, str(path), str(len(pack))]
    opened = subprocess.run(command, capture_output=True).returncode == 0
    frame = "" if opened else "its Arrow frame is damaged, so other Arrow readers cannot open it"
    return Verified(len(pack), bad, frame)
