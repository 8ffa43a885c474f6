"""megabatch pack SOURCE OUT.arrow: a data set into one file; megabatch pack --verify FILE."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megabatch.errors import DONE, FAILED, UserError
from megabatch.runs.progress import counting, to_people
from megabatch.verbs.parsing import parse
from megabatch.verbs.writing import say

_SHOWN = 20


@dataclass(frozen=True)
class PackFlags:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = ""
    """images in a folder a class, in train/ and val/ or not; Tiny ImageNet, ILSVRC2012's tar files,
    parquet, CIFAR (archive or folder) or MNIST-style idx files"""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.arrow")] = ""
    """the pack to write"""
    verify: Annotated[str, tyro.conf.arg(metavar="FILE.arrow")] = ""
    """check this pack instead: every byte of it, and that each image can be decoded"""
    size: int = 0
    """images are made smaller to this shortest side, in pixels (0: JPEGs stay untouched)"""
    quality: int = 90
    """of the JPEGs that are made anew, 1 to 100"""
    raw: bool = False
    """keep pixels, not JPEG: the middle square of --size, or images that are all of one size"""
    val_share: float | None = None
    """share held out where there is no val part (none: 0.1)"""
    skip_bad: int = 0
    """so many unreadable images may be left out; with more there is no pack"""
    threads: int = 0
    """threads that decode and encode (0: one a core)"""
    json: bool = False
    """the result as JSON, the last line on standard output"""


def run(arguments: list[str]) -> int:
    flags = parse(PackFlags, "pack", arguments)
    threads = flags.threads or len(os.sched_getaffinity(0))
    if flags.verify:
        if flags.source:
            raise UserError("--verify checks a pack that is there: give no source beside it")
        status, result = _verify(Path(flags.verify), threads)
    else:
        _check(flags)
        try:
            status, result = _pack(flags, threads)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            say(
                f"megabatch: packing stopped: {error.strerror or error}{where}; there is no output "
                f"file, finished parts are kept, and the same command goes on from there",
                progress=True,
            )
            status, result = FAILED, {"error": str(error)}
    if flags.json:
        print(json.dumps(result), flush=True)
    return status


def _check(flags: PackFlags) -> None:
    if not flags.source or not flags.out:
        raise UserError("pack needs a source and an output: megabatch pack SOURCE OUT.arrow")
    if flags.source.endswith(".arrow") and Path(flags.source).is_file():
        raise UserError(f"{flags.source} is a pack already: train on it, --data.path FILE.arrow")
    if not flags.out.endswith(".arrow"):
        raise UserError(f"a pack's name ends with .arrow: name it {flags.out}.arrow")
    if not Path(flags.out).parent.is_dir():
        raise UserError(f"there is no folder {Path(flags.out).parent} to write the pack into")
    if flags.size < 0 or flags.skip_bad < 0 or flags.threads < 0:
        raise UserError("--size, --skip-bad and --threads cannot be negative")
    if not 1 <= flags.quality <= 100:
        raise UserError(f"--quality is {flags.quality}; give 1 to 100")
    if flags.val_share is not None and not 0 < flags.val_share < 1:
        raise UserError(f"--val-share is {flags.val_share:g}; give a share, 0.1 say")


def _pack(flags: PackFlags, threads: int) -> tuple[int, dict[str, Any]]:
    from megabatch.data.jpeg import Encoding
    from megabatch.data.origins import open_origin
    from megabatch.data.packs.making import check_new, pack

    source, out = Path(flags.source), Path(flags.out)
    check_new(out)
    if source.exists():  # an archive is read whole before its first image is packed
        how = "looking through" if source.is_dir() else "reading"
        say(f"{how} {source}", progress=True)
    origin = open_origin(source)
    for note in origin.notes:
        say(note, progress=True)
    encoding = Encoding("raw" if flags.raw else "jpeg", flags.size, flags.quality)
    with counting("packing", to_people()) as progress:
        packed = pack(
            origin,
            source.resolve().name,
            out,
            encoding,
            val_share=flags.val_share,
            skip_bad=flags.skip_bad,
            threads=threads,
            progress=progress,
        )
    _list("cannot be read", [(bad.name, bad.reason) for bad in packed.bad])
    result = {
        "out": None if packed.path is None else str(packed.path),
        "images": packed.images,
        "splits": packed.splits,
        "bad": [[bad.name, bad.reason] for bad in packed.bad],
        "nbytes": packed.nbytes,
        "parts_kept": packed.parts_kept,
    }
    if packed.path is None:
        print(
            f"megabatch: no pack was made: {len(packed.bad)} of {packed.images} images cannot be "
            f"read; repair or remove them, or allow them with --skip-bad {len(packed.bad)}",
            file=sys.stderr,
        )
        return FAILED, result
    parts = ", ".join(f"{count:,} {name}" for name, count in packed.splits.items())
    say(f"{packed.path}: {parts} images, {packed.nbytes / 1e6:,.1f} MB")
    return DONE, result


def _verify(path: Path, threads: int) -> tuple[int, dict[str, Any]]:
    from megabatch.data.packs.reading import verify_pack

    with counting("verifying", to_people()) as progress:
        found = verify_pack(path, threads, progress)
    _list("is damaged", found.bad)
    result = {"file": str(path), "images": found.images, "bad": found.bad, "frame": found.frame}
    if found.bad or found.frame:
        say(f"megabatch: {path} is damaged: copy it or pack it again", progress=True)
        if found.frame:
            say(f"megabatch: {found.frame}", progress=True)
        return FAILED, result
    say(f"{path}: all {found.images:,} images are good")
    return DONE, result


def _list(what: str, bad: list[tuple[str, str]]) -> None:
    for name, reason in bad[:_SHOWN]:
        say(f"  {name} {what}: {reason}", progress=True)
    if len(bad) > _SHOWN:
        say(f"  and {len(bad) - _SHOWN} more (--json lists them all)", progress=True)
