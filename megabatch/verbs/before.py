"""What can be refused before a worker is started, in the time of a keystroke and without torch: the
images, the first weights, the devices, the grid, the measured plans, the folder.

Workers look again at what they open; under a launcher they alone do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megabatch.config import Config
from megabatch.data.paths import check_named
from megabatch.errors import UserError
from megabatch.models.zoo import check_init
from megabatch.runs.begun import check_place, check_writable
from megabatch.study.results import read
from megabatch.study.trials import StudyPlan, check_beside, is_study, state
from megabatch.sync.choice import measured
from megabatch.verbs.workers import gpus
from megabatch.workers.place import Place, grid_of


def check_not_own(config: Config) -> None:
    """A command can bring no module and no data set along."""
    for what, word, given in (
        ("model", "model", config.model.split()[0]),
        ("data set", "data", config.data.source),
    ):
        if given == "own":
            raise UserError(
                f"a {what} of your own comes from Python: megabatch.train(config, {word}=...)"
            )


def check_beginnings(config: Config) -> None:
    """What a run begins from: its images and its first weights."""
    check_named(config.data)
    check_init(config.init)


def check_run_folder(config: Config, out: Path, resume: bool) -> None:
    """Where a run begins, or goes on."""
    if is_study(out):
        raise UserError(f"{out} is the folder of a study: name another --out for a run")
    check_place(out, config, resume)


def check_study(plan: StudyPlan, out: Path) -> None:
    """Where a study begins, or grows: what lies there must be runs of the same recipe."""
    check_writable(out)
    if is_study(out):
        found = read(out)
        found.check_searched(plan.configs, {trial.name for trial in plan.search()})
        runs = plan.runs(found.chosen_factors())
        check_beside(out, runs)
        for trial in (*plan.probes(), *plan.search(), *runs):
            state(out / trial.name, trial)


def check_workers_here(
    config: Config, workers: Sequence[int], device: str, grid: tuple[int, int] | None = None
) -> None:
    """So many local workers, one number a batch stage, on this machine's devices."""
    there = gpus(device)
    if device == "cuda" and there == 0 and not _may_have_gpus():
        raise UserError("device cuda was asked for but there is no GPU: use --device cpu")
    for count in workers:
        on_gpus = device == "cuda" or (device == "auto" and there > 0)
        if on_gpus and 0 < there < count and "NCCL_HOSTID" not in os.environ:
            raise UserError(
                f"{count} workers want a GPU each but there {'is' if there == 1 else 'are'} "
                f"{there}: start {there} (--workers {there}), or use --device cpu"
            )
        # One worker needs no grid; where their number changes, it is for the stages that it holds.
        spared = count == 1 or any(_holds(grid, other) for other in workers)
        fits = _holds(grid, count) or not spared
        shape = grid_of(Place(0, count, 0, count), grid if fits else None)
        if config.plan == "auto" and count > 1 and not config.deterministic:
            measured("machine.json", shape)


def _holds(grid: tuple[int, int] | None, workers: int) -> bool:
    return grid is not None and min(grid) > 0 and grid[0] * grid[1] == workers


def _may_have_gpus() -> bool:
    """Whether torch may see GPUs that /dev does not name as NVIDIA's driver for Linux does."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev", name).exists() for name in ("dxg", "kfd"))
