"""What a verb leaves: files, whole or not at all, with the permissions that the umask gives; and
lines that do nothing to a terminal but stand there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megabatch.errors import RunFailed, UserError, printable
from megabatch.runs.progress import say as say_on
from megabatch.runs.progress import to_people


def check_out(out: Path, suffixes: tuple[str, ...], what: str) -> None:
    """Refuse, before any work, a name that cannot be written."""
    if out.name and out.suffix.lower() not in suffixes:
        raise UserError(f"the name of {what} ends with {suffixes[0]}: name it {out}{suffixes[0]}")
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"{out} cannot be written: name a file in a folder that is there")


def write_out(out: Path, data: bytes) -> None:
    """Aside, then renamed: who reads it finds the old file or the new one."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            aside.write_bytes(data)
            aside.replace(out)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise RunFailed(f"{out} cannot be written: {error.strerror or error}") from None


def say(words: str, progress: bool = False) -> None:
    """One line: a result on standard output, or progress on standard error."""
    print(printable(words), file=sys.stderr if progress else sys.stdout, flush=True)


def say_result(words: str) -> None:
    """A sentence on standard output, at a terminal broken between words."""
    say_on(to_people(result=True), words)
    sys.stdout.flush()
