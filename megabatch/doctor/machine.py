"""Cores, memory, files and room on disk, as this process may use them."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megabatch.doctor.finding import Finding
from megabatch.host.granted import cpu_quotas, memory

GIB = 2**30
# Measured on a CPU build: a worker with torch and the trainer imported, before model and images.
WORKER_BYTES = GIB // 4
FEW_FILES = 1024


def check_cores(environ: Mapping[str, str] = os.environ, system: Path = Path("/")) -> Finding:
    """Cores of the machine, those this process may use, and the time a container grants."""
    there, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    found = f"{usable} of {there} cores"
    asked = environ.get("OMP_NUM_THREADS", "")
    threads = f", OMP_NUM_THREADS {asked}" if asked else ""
    quota = min(cpu_quotas(system), default=float(usable))
    if quota < usable:
        return Finding(
            "cores",
            "limited",
            f"{found}, but the time of {quota:g}{threads}",
            "threads are counted by cores and then wait for their turn",
            f"give the container more, or bind it: taskset -c 0-{max(0, int(quota) - 1)}",
        )
    if usable == 1 and there > 1:
        return Finding(
            "cores",
            "limited",
            found + threads,
            "everything runs on one core",
            "launchers bind so: mpirun --bind-to none, srun --cpus-per-task, taskset",
        )
    if asked.isdigit() and int(asked) > usable:
        costs = "threads outside training (evaluation of your own, numpy) crowd the cores"
        return Finding("cores", "limited", found + threads, costs, "unset OMP_NUM_THREADS")
    return Finding("cores", "works", found + threads)


def check_memory(system: Path = Path("/")) -> Finding:
    known = memory(system)
    if known is None:
        return Finding("memory", "works", "not told by this system")
    free, total = known
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    fit = free // WORKER_BYTES
    if fit < 8:
        costs = f"room for about {fit} workers, before their models and images"
        return Finding("memory", "limited", found, costs, "fewer --workers, or a larger machine")
    return Finding("memory", "works", found)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    part, costs = "shared memory", "NCCL joins the GPUs of one machine slowly or not at all"
    remedy = "in a container: --shm-size=8g or --ipc=host; else NCCL_SHM_DISABLE=1"
    if not path.is_dir():
        return Finding(part, "limited", f"there is no {path}", costs, remedy)
    if (trouble := _write_trouble(path)) is not None:
        return Finding(part, "limited", f"{path} cannot be written: {trouble}", costs, remedy)
    free = shutil.disk_usage(path).free
    found = f"{path} has {free / GIB:.1f} GiB free"
    if free < GIB // 8:  # containers have 64 MB if nobody asks for more
        return Finding(part, "limited", found, costs, remedy)
    return Finding(part, "works", found)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may_rise = soft != hard
    found = f"up to {_count(soft)} at once"
    found += f" (could be raised to {_count(hard)})" if may_rise else ""
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Finding(
            "open files",
            "limited",
            found,
            "every pair of workers holds sockets: many workers fail to join",
            f"ulimit -n {_count(min(hard, 65536) if hard > 0 else 65536)}"
            if may_rise
            else "an administrator raises it in limits.conf",
        )
    return Finding("open files", "works", found)


def check_folder(folder: Path = Path()) -> Finding:
    """Runs are written below the working folder unless --out says otherwise."""
    part, here = "working folder", folder.absolute()
    if (trouble := _write_trouble(folder)) is not None:
        found = f"{here} cannot be written: {trouble}"
        return Finding(part, "limited", found, "a run has no place to write", "train with --out")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {here}"
    if free < GIB:
        costs = "a checkpoint of ResNet-50 takes 0.2 GiB, and two are kept"
        return Finding(part, "limited", found, costs, "train with --out on another disk")
    return Finding(part, "works", found)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit}"


def _write_trouble(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"megabatch")
    except OSError as error:
        return error.strerror or str(error)
    return None
