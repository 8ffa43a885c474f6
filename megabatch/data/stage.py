"""Staging: a copy of the pack on node-local storage, made once a node by whichever worker comes
first."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from megabatch.data.packfile import Pack, PackError
from megabatch.errors import UserError


def staged(path: Path, folder: Path) -> Path:
    """The copy of a pack in a folder of this node; every worker of the node calls it and waits for
    the copy.

    A copy that is there already is used if it is of the same pack, whatever its time.
    """
    original = Pack(path)
    copy = folder / path.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(PackError):
                if Pack(copy).fingerprint == original.fingerprint:
                    return copy
            fresh = folder / f"{path.name}.fresh"
            shutil.copyfile(path, fresh)
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(fresh, copy)
    except OSError as error:
        raise UserError(
            f"the pack cannot be staged in {folder}: {error.strerror or error}; give "
            f"--data.local-copy a folder of this node with room for {original.nbytes / 1e9:.1f} GB"
        ) from None
    return copy
