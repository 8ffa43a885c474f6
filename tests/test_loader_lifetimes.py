"""What a loader takes it gives back: no thread, process, file or memory outlives it, whatever
happened."""

import contextlib
import gc
import os
import sys
import threading
import warnings
from collections import Counter
from dataclasses import replace
from operator import le
from pathlib import Path

import pictures
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from waiting import until

from megabatch.batch import steps
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.pool import Decoders
from megabatch.data.slots import Layout, Slots
from megabatch.errors import RunFailed, UserError

PHOTOS = Data(size=12, channels=3, crop_area=(0.2, 1.0), flip=True, threads=2, shared="never")
CONFIG = Config(batch=8, micro=4, span=4, epochs=2, data=PHOTOS)
ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
KINDS = {
    "pack, threads": ("jpeg.arrow", {"processes": "never"}),
    "pack, processes": ("jpeg.arrow", {"processes": "always"}),
    "folder, threads": ("set", {"processes": "never"}),
    "raw pack": ("raw.arrow", {"processes": "never"}),
    "resident": ("raw.arrow", {"resident": "always"}),
    "synthetic": ("", {"source": "synthetic", "images": 40}),
    "own": (None, {}),
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return pictures.packed(tmp_path_factory.mktemp("packs"), each=9, val=3, size=(30, 40), raw=20)


class Own:
    classes = ("a", "b")

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((3, 12, 12), index / 30), index % 2


def taken():
    """What this process holds: threads, children, files, and memory that is shared."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files[number] = os.readlink(f"/proc/self/fd/{number}")
    maps = [
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "megabatch" in line or "arrow" in line
    ]
    threads = sorted(thread.name for thread in threading.enumerate())
    # The sockets of a world that stands are its own business.
    return threads, children, sorted(files.values()), maps


def gives_back(before):
    """Whether, in the end, this process holds nothing that it did not hold; of what it held, some
    may have been about to end."""
    kept = []

    def nothing_kept():
        kept[:] = [
            kind
            for now, then in zip(taken(), before, strict=True)
            for kind in (Counter(now) - Counter(then))
        ]
        return not kept

    try:
        return until(nothing_kept, "all that was taken given back")
    except AssertionError as late:
        raise AssertionError(f"{late}: {kept}") from None


def use(packs, kind, cluster=ALONE, **changes):
    name, data = KINDS[kind]
    path = "" if not name else str(packs / name)
    config = replace(CONFIG, data=replace(PHOTOS, **{"path": path, **data, **changes}))
    train, val = open_sources(config, Own() if name is None else None)
    with StepLoader(train, val, config, cluster, torch.float32) as loader:
        for step in list(steps(config.all_stages, len(train), config.epochs))[:3]:
            assert list(loader.micro_batches(step))
        assert list(loader.validation())
    loader.close()  # twice is fine


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_leave_nothing(packs, kind):
    use(packs, kind)  # what is imported and made only once
    before = taken()
    for _ in range(2 if "processes" in kind else 10):  # each of these loads torch anew
        use(packs, kind)
    assert gives_back(before)


def several_shared(cluster, packs, processes):
    def counts():
        threads, children, files, maps = map(len, taken())
        # gloo's own sockets and threads come and go with a group: their number says it.
        return threads, children, files, maps, len(dist.distributed_c10d._world.pg_map)

    use(packs, "pack, threads", cluster, shared="always", processes=processes)
    dist.barrier()
    before = counts()
    for _ in range(10 if processes == "never" else 2):
        use(packs, "pack, threads", cluster, shared="always", processes=processes)
    dist.barrier()
    return until(lambda: all(map(le, counts(), before)), "all that was taken given back")


@pytest.mark.parametrize("processes", ["never", pytest.param("always", marks=pytest.mark.systems)])
def test_those_that_share_a_pack_out_leave_nothing(packs, processes):
    assert run_ranks(several_shared, 2, packs, processes) == [True, True]


# --- what is not closed, or cannot be made


@pytest.mark.parametrize("processes", ["always", "never"])
def test_a_loader_that_nobody_closed_is_closed_with_a_warning(packs, processes):
    before = taken()
    data = replace(PHOTOS, path=str(packs / "jpeg.arrow"), processes=processes)
    config = replace(CONFIG, data=data)
    train, val = open_sources(config)
    loader = StepLoader(train, val, config, ALONE, torch.float32)
    list(loader.micro_batches(next(steps(config.all_stages, len(train), 1))))
    del train, val
    with pytest.warns(ResourceWarning, match="loader was not closed"):
        del loader
        gc.collect()
    assert gives_back(before)


def test_a_closed_loader_gives_no_warning(packs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(packs, "pack, threads")
        gc.collect()


def test_a_loader_that_cannot_be_made_leaves_nothing(packs, monkeypatch):
    config = replace(
        CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow"), processes="always")
    )
    train, val = open_sources(config)
    before = taken()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(packs / "no-python"))
        with pytest.raises(FileNotFoundError):
            StepLoader(train, val, config, ALONE, torch.float32)
    assert gives_back(before)
    never = replace(config, data=replace(config.data, resident="always", path=str(packs / "set")))
    with pytest.raises(UserError, match="is for packs"):
        StepLoader(open_sources(never)[0], None, never, ALONE, torch.float32)
    assert gives_back(before)


def test_a_run_that_failed_leaves_nothing(packs):
    before = taken()
    config = replace(
        CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow"), processes="always")
    )
    train = open_sources(config)[0]
    with pytest.raises(RunFailed), StepLoader(train, None, config, ALONE, torch.float32) as loader:
        for process in loader._decoders.processes:
            os.kill(process, 9)
        list(loader.micro_batches(next(steps(config.all_stages, len(train), 1))))
    del train, loader
    assert gives_back(before)


def test_pool_and_slots_close_twice_and_by_with(packs):
    before = taken()
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow")))
    layout = Layout("bytes", 4, 12, 3)
    with Decoders(config, layout, 1, 3, pinned=False) as decoders:
        buffer = decoders.split(0).submit(0, 4).result()
    decoders.close()
    assert len(buffer.labels.tolist()) == 4  # what was handed out stays
    del buffer, decoders
    with Slots(layout, 2, pinned=False) as slots:
        slots.take()
    slots.close()
    del slots
    assert gives_back(before)
