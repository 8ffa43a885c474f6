"""One folder for this process's temporary files, removed when it ends.

A process that was killed cannot remove its own: the next one does, by the lock that the dead no
longer hold.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import subprocess
import tempfile
import time
from io import FileIO
from pathlib import Path

from megabatch.host.durable import is_plain, lock

_PREFIX = "megabatch-"
_LOCK = "lock"
DISK = "disk"
"""where a file system may be mounted in such a folder, and nowhere else"""
_YOUNG_SECONDS = 60.0
"""a folder this new may be on its way to its lock"""
_LONGEST = 60
"""characters of a folder's name, so that a socket's name in it stays within the system's 107"""


@functools.cache
def scratch() -> Path:
    """This process's folder; those of processes that are gone are removed."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    held = lock(folder / _LOCK)
    # At this process's end, not at a fork's, and after multiprocessing has removed its own (-100).
    multiprocessing.util.Finalize(None, _remove_own, (folder, held), exitpriority=-200)
    if len(str(folder)) <= _LONGEST:
        _take_in_multiprocessing(folder)
    return folder


def inside() -> dict[str, str]:
    """The environment of a process whose temporary files go with this one's, should it be killed;
    empty where the names in it would be too long."""
    folder = str(scratch())
    nested = len(folder) + len(os.path.basename(folder)) + 1
    return {"TMPDIR": folder} if nested <= _LONGEST else {}


def _remove_if_left(folder: Path) -> None:
    ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
    old = time.time() - folder.stat().st_mtime > _YOUNG_SECONDS
    if ours and old and is_plain(folder / _LOCK):
        held = lock(folder / _LOCK)
        if held is not None:
            with held:
                let_go_of(folder / DISK)
                shutil.rmtree(folder, ignore_errors=True)


def let_go_of(disk: Path) -> None:
    """A file system that is mounted there, if one is: who still has files of it keeps them."""
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=True)


def _remove_own(folder: Path, held: FileIO | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        held.close()


def _take_in_multiprocessing(folder: Path) -> None:
    """multiprocessing keeps its sockets in a folder that a killed process leaves behind, and that
    it misses aloud at its end if somebody has removed it: it has ours instead."""
    process = multiprocessing.process.current_process()
    process._config.setdefault("tempdir", str(folder))  # type: ignore[attr-defined]
