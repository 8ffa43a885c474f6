"""Folders of runs, looked at before anything is begun or read: what lies there, and what to type
instead. Needs no torch."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.host.durable import is_plain, read_plain
from megabatch.runs.record import is_run

_MOST_NAMES = 64 << 20
"""bytes of a million classes' names"""


def check_run(path: Path, otherwise: str = "") -> None:
    """Refuse what is not the folder of a run, and say which may be meant, or what else to do."""
    if is_run(path):
        return
    if path.is_file() and is_run(path.parent):
        raise UserError(f"{path} is a file of a run: name the run's folder, {path.parent}")
    if inside := runs_in(path):
        newest = max(inside, key=lambda run: run.stat().st_mtime)
        kind = "a study" if any(is_plain(run / "trial.json") for run in inside) else "a folder"
        raise UserError(
            f"{path} is {kind} of {len(inside):,} run{'s' * (len(inside) > 1)}, not a run itself: "
            f"name one of them, {newest} say"
        )
    close = difflib.get_close_matches(str(path), map(str, runs_in(path.parent)), n=1)
    hint = f"did you mean {close[0]}?" if close else "megabatch runs lists what there is"
    raise UserError(f"{path} is not the folder of a run: {hint}{otherwise}")


def check_brought(
    run: str | os.PathLike[str], config: Config, model: object = None, data: object = None
) -> None:
    """Refuse an evaluation without the model or the data that a run's caller brought: no file has
    them."""
    for own, given, word in ((config.model, model, "model"), (config.data.source, data, "data")):
        if own.startswith("own") and given is None:
            raise UserError(
                f"{run} was trained with {word} of its caller's: evaluate it from Python, "
                f"megabatch.evaluate(run, {word}=...)"
            )


def runs_in(path: Path) -> list[Path]:
    """The runs that lie in a folder."""
    try:
        return [inner for inner in path.iterdir() if is_run(inner)]
    except OSError:
        return []


def check_place(path: Path, config: Config, resume: bool) -> None:
    """Refuse a folder in which the run of a config cannot begin, or go on."""
    written = path / "config.json"
    check_writable(path)
    if not written.exists():
        return
    if not resume:
        raise UserError(
            f"{path} holds a run already: add --resume to go on with it (from Python, "
            f"resume=True), or name another --out"
        )
    try:
        before = Config.read(written)
    except UserError as error:
        raise UserError(f"{error}; remove it to go on with the settings given now") from None
    difference = before.resume_difference(config)
    if difference is not None:
        raise UserError(
            f"{path} was begun with {difference}: resume with the same settings, or name another "
            f"--out"
        )


def written_classes(run: Path) -> list[str] | None:
    """The names of a run's classes, by label, where it wrote them."""
    written = run / "classes.json"
    if not written.exists():
        return None
    try:
        names = json.loads(read_plain(written, _MOST_NAMES))
    except (OSError, ValueError, RecursionError):
        names = None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise UserError(f"{written} is not a list of names: repair or remove it")


def check_classes(run: Path, known: list[str], found: list[str], images: str) -> None:
    """Refuse images whose labels mean other classes than a run knows."""
    if found != known:
        raise UserError(
            f"{images} has {_few(found)}, but {run} knows {_few(known)}: give images of the same "
            f"classes"
        )


def _few(names: list[str]) -> str:
    """So many classes, and the first of them by name."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} class{'es' * (len(names) != 1)} ({', '.join(names[:3])}{more})"


def check_writable(path: Path) -> None:
    """Whether it is a folder to write in, or could be made as one."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"{path} cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: {there} may not be written to")
