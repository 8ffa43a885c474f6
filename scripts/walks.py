"""Makes docs/walks.md: which files an image, a gradient and a sum pass, found by tracing a real
step.

    python scripts/walks.py           print the page
    python scripts/walks.py --write   write docs/walks.md

An image walks from a pack to the loss: one worker, one image a step, read by a thread. A gradient
walks from the hook that sees it first into another worker's sum: two workers and a torus. The sum
walks into the weights: the first worker's update, by LARS. A file is
entered when a function of it is called from another file of ours; calls that a file makes to
another one after the other are one visit.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
from PIL import Image

import megabatch as mb
from megabatch.data.jpeg import Encoding
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack
from megabatch.launch import run_local

ROOT = Path(mb.__file__).parent
PAGE = ROOT.parent / "docs" / "walks.md"

# These are asked for numbers and are handed neither an image nor a gradient: settings, randomness,
# which image stands where, which part of it is taken, who is dealt what, which messages a plan has.
ASKED = ("config/", "schedule.py", "batch.py", "tree.py", "keyed.py", "plans/", "cluster.py",
         "data/crop.py")  # fmt: skip
ASKED_FUNCTIONS = ("Order.", "autocast", "full_dtype", "threads_of", "available")
# A net is one place, however often its blocks and norms call each other; so is an optimizer, which
# takes the weights by groups.
ONE_PLACE = ("models/", "batchnorm.py", "optim/")


@dataclass(frozen=True)
class Event:
    """A function of ours was called, or ended."""

    thread: int
    file: str
    function: str
    ends: bool


class Trace:
    """What happens in this thread and in those begun while it lasts."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __enter__(self) -> Trace:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(str(ROOT)):
            file, function = os.path.relpath(path, ROOT), frame.f_code.co_qualname
            thread = threading.get_ident()
            self.events.append(Event(thread, file, function, event == "return"))


def calls_of(events: list[Event], function: str) -> list[list[Event]]:
    """Each call of a function, with all that its thread called meanwhile."""
    found = []
    for thread in dict.fromkeys(event.thread for event in events):
        own = [event for event in events if event.thread == thread]
        ends = [i for i, event in enumerate(own) if event.function == function]
        # A call and its end in turn; the last may not have ended.
        found += [own[begin : end + 1] for begin, end in zip(ends[::2], ends[1::2], strict=False)]
    return found


def entered(events: Iterable[Event]) -> list[tuple[str, str]]:
    """The calls that enter a file from another: file and function."""
    stack: list[str] = []
    found = []
    for event in events:
        if event.file.startswith(ASKED) or event.function.startswith(ASKED_FUNCTIONS):
            continue
        if event.ends:
            if stack:
                stack.pop()
            continue
        if not stack or stack[-1] != event.file:
            found.append((event.file, event.function))
        stack.append(event.file)
    return found


def visits(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Calls one after the other of one file as one, and each file of one place once."""
    found: list[tuple[str, str]] = []
    for file, function in calls:
        if file.startswith(ONE_PLACE) and any(file == seen for seen, _ in found):
            continue
        if found and found[-1][0] == file:
            function = f"{found.pop()[1]}`, `{function}"
        found.append((file, function))
    return found


# --- the runs ----------------------------------------------------------------------------------


def small_pack(folder: Path) -> str:
    random = numpy.random.default_rng(0)
    for part, name, number in itertools.product(("train", "val"), ("a", "b"), (0, 1)):
        place = folder / "images" / part / name
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (80, 80, 3), numpy.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")
    out = folder / "images.arrow"
    pack(open_origin(folder / "images"), "a walk", out, Encoding())
    return str(out)


def config_of(path: str, batch: int, plan: str = "backend") -> mb.Config:
    data = mb.Data(path=path, size=64, channels=3, flip=True, processes="never", threads=1)
    return mb.Config(
        model="resnet18",
        epochs=1.0,
        batch=batch,
        micro=1,
        span=1,
        eval_every=0.0,
        save_every=0.0,
        plan=plan,
        data=data,
        lr=mb.LearningRate(warmup=0.0),
    )


def image_and_sum_walks(path: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    with Trace() as trace:
        mb.train(config_of(path, batch=1), quiet=True)
    # Of training's: the last ones that were read are of the evaluation.
    reading, handing, passing = (
        calls_of(trace.events, function)[0]
        for function in ("ThreadReader._timed", "StepLoader._prepare", "_pass")
    )
    # Where the loss is handed over the image's walk ends and the gradient's begins.
    over = next(i for i, event in enumerate(passing) if event.file.startswith("sync/"))
    calls = [*entered(reading), *entered(handing), *entered(passing[:over])]
    updating = entered(calls_of(trace.events, "Layerwise.step")[0])
    return visits(calls), visits(updating)


def traced_worker(path: str) -> list[tuple[str, str]]:
    """The work of one of two workers: what its hook and a lane did with the last bucket."""
    cluster = mb.Cluster.from_env(grid=(1, 2), device="cpu")
    try:
        with Trace() as trace:
            mb.train(config_of(path, batch=2, plan="torus"), quiet=True, cluster=cluster)
    finally:
        cluster.leave()
    sending = entered(calls_of(trace.events, "GradientSum._collect")[-1])
    # Of the lanes' the fullest: some have nobody to send to.
    lane = max(map(entered, calls_of(trace.events, "Journey.walk")), key=len)
    return visits([*sending, *lane])


def gradient_walk(path: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = run_local(2, traced_worker, path)
    return found


# --- the page ----------------------------------------------------------------------------------


def files_of(walk: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(file for file, _ in walk))


def places(*walks: list[tuple[str, str]]) -> int:
    """Files of all walks, the net's as one and the optimizer's as one."""
    files = {file for walk in walks for file in files_of(walk)}
    apart = {file for file in files if not file.startswith(ONE_PLACE)}
    return len(apart) + len({file.startswith("optim/") for file in files - apart})


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = small_pack(Path(folder))
        (image, updated), gradient = image_and_sum_walks(path), gradient_walk(path)
    return "\n".join(
        [
            "# From a file to the weights",
            "",
            "Three walks through the code, one where the other ends, made by",
            "`python scripts/walks.py --write`, which traces a real step; a test makes them again.",
            "A line is a visit: a call that enters a file from another one, or several that the",
            "other makes one after the other. Files that are asked for numbers and are handed",
            "neither an image nor a gradient are not counted: "
            + ", ".join(f"`{name}`" for name in ASKED)
            + ".",
            "A net and an optimizer are one place each, whose files stand once: so counted, an",
            f"image passes {places(image, updated)} places on its way into its worker's weights.",
            "",
            *_walk("An image, from the pack to the loss", image),
            *_walk("A gradient, from its hook into another worker's sum", gradient),
            *_walk("The sum, into the weights", updated),
        ]
    )


def _walk(title: str, walk: list[tuple[str, str]]) -> list[str]:
    files = files_of(walk)
    again = len(walk) - len(files)
    lines = [f"| {n} | `{file}` | `{function}` |" for n, (file, function) in enumerate(walk, 1)]
    return [
        f"## {title}",
        "",
        f"{len(files)} files, {again} times back in one that was entered before.",
        "",
        "| | file | by |",
        "|---|---|---|",
        *lines,
        "",
    ]


if __name__ == "__main__":
    (PAGE.write_text if "--write" in sys.argv else print)(page())
