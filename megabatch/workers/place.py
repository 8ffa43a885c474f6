"""Who a worker is by its launcher's variables: torchrun's, Slurm's or MPI's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megabatch.errors import UserError


@dataclass(frozen=True)
class Place:
    """A worker's number among all workers and among those of its host."""

    rank: int
    world: int
    local_rank: int
    local_world: int


# How each launcher says rank, world and, where it does, local rank and local world. The first row
# that is there whole counts, so what runs innermost comes first: in a Slurm job mpirun and mpiexec
# start a daemon on each node by srun, and the workers inherit the daemons' variables beside their
# own. (A batch script has SLURM_PROCID too, but it is no step: nothing has been started yet.)
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun; local workers, below
    ("RANK", "WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH's and Intel's Hydra
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def launcher_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the variables by which a worker is known here; empty if there is none."""
    return next((row for row in LAUNCHERS if all(name in environ for name in row)), ())


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several workers, or says that it is
    alone."""
    return bool(launcher_of(environ))


def place_by(environ: Mapping[str, str]) -> Place:
    """Who a worker is by its launcher's variables."""
    names = launcher_of(environ)
    if not names:
        return Place(0, 1, 0, 1)
    figures = []
    for name in names:
        # Slurm writes tasks per node as "4(x2),3": the first figure is what a row holds.
        figure = re.match(r"\d+(?=\(x\d+\)|,|$)", environ[name])
        if figure is None:
            raise UserError(f"{name} is {environ[name]!r}, not a number")
        figures.append(int(figure[0]))
    rank, world = figures[:2]
    if rank >= world:
        raise UserError(f"{names[0]} is {rank} but {names[1]} is {world}: ranks count from 0")
    local_rank, local_world = figures[2:] or (rank, world)
    return Place(rank, world, local_rank, local_world)


def grid_of(place: Place, asked: tuple[int, int] | None) -> tuple[int, int]:
    """The grid asked for, if it holds the workers; else a row a node, or one row."""
    if asked is None:
        rows, left = divmod(place.world, place.local_world)
        return (1, place.world) if left else (rows, place.local_world)
    y, x = asked
    if min(asked) < 1 or y * x != place.world:
        raise UserError(
            f"a grid of {y} x {x} does not hold the {place.world} workers there are: give a grid "
            f"whose product is {place.world}"
        )
    return asked
