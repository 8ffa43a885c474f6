"""Files that survive a crash and can be trusted to be files: written whole or not at all, read only
where they are plain, and locked so that one process writes at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """A new file on the disk, with the permissions that the umask gives; one that is there, link or
    not, is in the way."""
    where = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(where, left) :]
        os.fsync(where)
    finally:
        os.close(where)


def write_whole(path: Path, data: bytes) -> None:
    """Aside, flushed, then renamed: whatever happens, who reads it finds the old file or the new
    one."""
    with replacing(path) as aside:
        write(aside, data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name aside for a file that takes the place of `path` once it is written and synced."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)  # of one that was killed while it wrote
        yield aside
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove(folder: Path) -> None:
    """A folder, by another name first: half of it is never taken for the whole."""
    gone = folder.with_name(f".{folder.name.lstrip('.')}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_plain(path: Path) -> bool:
    """A file of its own: a pipe or a device would never end, and a link may lead anywhere."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def open_plain(path: Path, most: int) -> BufferedReader:
    """A plain file of at most so many bytes, for reading; an OSError says why not."""
    where = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(where)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
        return os.fdopen(where, "rb")
    os.close(where)
    reason = "larger than it can be" if stat.S_ISREG(found.st_mode) else "not a plain file"
    raise OSError(f"{path.name} is {reason}")


def read_plain(path: Path, most: int) -> bytes:
    with open_plain(path, most) as file:
        return file.read(most)


def lock(path: Path, note: Callable[[], str] = str) -> FileIO | None:
    """Hold a file's lock until what is returned is closed or this process ends, however it ends;
    None where another holds it. The holder leaves a note in the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o666), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a note
        file.truncate(0)
        file.write(note().encode())
    return file
