"""Decoding processes: the same images as threads give, and nothing is left behind whatever
happens."""

import contextlib
import gc
import io
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pictures
import pytest
import simplejpeg
import torch
from PIL import Image
from waiting import state, until

from megabatch.batch import Step, steps
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data import pool
from megabatch.data.crop import crop_draws
from megabatch.data.decoded import bring_to_size
from megabatch.data.jpeg import BadImage, Workspace, head_of, pixels, region, scaling
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.packs.reading import Pack
from megabatch.data.pool import TRAINING, Decoders
from megabatch.data.slots import Layout, Slots
from megabatch.data.source import Order
from megabatch.errors import RunFailed, UserError

PHOTOS = Data(size=12, channels=3, crop_area=(0.2, 1.0), flip=True, threads=2, processes="always")
CONFIG = Config(batch=40, micro=40, span=40, epochs=2, data=PHOTOS)
ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return pictures.packed(tmp_path_factory.mktemp("packs"), each=30, val=15, size=(70, 90), raw=20)


@contextlib.contextmanager
def loading(path, **data):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(path), **data))
    train, val = open_sources(config)
    loader = StepLoader(train, val, config, ALONE, torch.float32)
    with loader:
        yield loader, list(steps(config.all_stages, len(train), config.epochs))


@pytest.fixture(scope="module")
def standing(packs):
    """A loader with processes, for all that leave it as they found it: each of them loads torch."""
    with loading(packs / "jpeg.arrow") as (loader, run):
        yield loader, run


@pytest.fixture
def decoding(monkeypatch):
    """The processes that decode for this test, when called."""
    mark = f"MARK={os.getpid()} {time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))

    def running():
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                mine = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                if mine and b"megabatch.data.child" in words:
                    found.append(int(folder.name))
        return sorted(found)

    return running


def started(loader):
    """The first process, which only waits, and those that decode, once all of them are there."""
    decoders, processes = loader._decoders, loader.threads + 1

    def all_there():
        decoders.exchange(wait=True)
        return len(decoders.processes) == processes

    until(all_there)
    return decoders.processes


def stop(processes):
    """Until the system says that they are stopped."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    until(lambda: all(state(process) == "T" for process in processes), "the stop")


def read_on(loader):
    """Steps without end, until something is wrong."""
    index = itertools.count(1)
    until(
        lambda: not list(loader.micro_batches(Step(n := next(index), 40 * n, 40, 0.0, 0))),
        "a failure",
    )


# --- the same images


@pytest.mark.parametrize("name", ["jpeg.arrow", "raw.arrow", "set"])
def test_processes_give_what_threads_give_to_the_bit(packs, name):
    found = {}
    for who in ("always", "never"):
        with loading(packs / name, processes=who) as (loader, run):
            training = [micro for step in run for micro in loader.micro_batches(step)]
            # Evaluated twice, by the same processes, between and after steps of training.
            found[who] = training, [list(loader.validation()) for _ in range(2)]
    (ours, valid), (theirs, valid_theirs) = found["always"], found["never"]
    assert len(ours) == len(theirs) == 5
    for one, other in zip(ours, theirs, strict=True):
        assert one.first == other.first
        assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
    for one, other in zip(valid, valid_theirs, strict=True):
        assert sum(len(labels) for _, labels in one) == 45
        for (images, labels), (images_, labels_) in zip(one, other, strict=True):
            assert torch.equal(images, images_) and torch.equal(labels, labels_)


def test_validation_may_come_between_two_micro_batches(standing):
    loader, run = standing
    alone = [micro.images.clone() for step in run for micro in loader.micro_batches(step)]
    found = []
    for step in run:
        for micro in loader.micro_batches(step):
            list(loader.validation())
            found.append(micro.images)
    assert len(alone) == 5
    assert all(map(torch.equal, alone, found))


def test_validation_that_is_left_early_leaves_nothing_taken(standing):
    loader, _ = standing
    for _ in range(30):
        batches = loader.validation()
        next(batches)
        batches.close()
    assert len(list(loader.validation())) == 2


def test_images_stay_as_they_are_for_as_long_as_they_are_kept(standing):
    loader, _ = standing
    kept, copies = [], []
    for index in range(60):  # far more than there are slots
        for micro in loader.micro_batches(Step(index, 40 * index, 40, 0.0, 0)):
            kept.append(micro.images)
            copies.append(micro.images.clone())
    assert all(map(torch.equal, kept, copies))


def test_a_step_that_nobody_foresaw_frees_what_was_read_for_another(packs):
    with loading(packs / "jpeg.arrow") as (loader, _):
        slots = loader._decoders.slots
        free = len(slots._free)
        for turn in range(40):  # each time other positions than those read ahead
            for micro in loader.micro_batches(Step(turn, 4000 * turn, 40, 0.0, 0)):
                assert micro.first == 4000 * turn
        del micro
        gc.collect()
        read_ahead = len(loader._reading)

        def all_free():
            loader._decoders.exchange(wait=True)
            return len(slots._free) >= free - read_ahead

        until(all_free)
        assert len(slots._free) == free - read_ahead


# --- what goes wrong


def test_a_bad_image_is_named_as_by_threads(packs, tmp_path):
    data = bytearray((packs / "jpeg.arrow").read_bytes())
    at = data.find(bytes(Pack(packs / "jpeg.arrow").record(4))) + 50
    data[at] ^= 1
    (tmp_path / "a.arrow").write_bytes(data)
    said = []
    for who in ("always", "never"):
        with loading(tmp_path / "a.arrow", processes=who) as (loader, run):
            with pytest.raises(UserError, match=r"image 4 \(train/ant/.*checksum") as error:
                for step in run:
                    list(loader.micro_batches(step))
            said.append(str(error.value))
    assert said[0] == said[1]


def test_images_that_are_gone_when_the_processes_open_them(packs, tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes((packs / "jpeg.arrow").read_bytes())
    config = replace(CONFIG, data=replace(PHOTOS, path=str(path)))
    train, _ = open_sources(config)
    path.unlink()
    loader = StepLoader(train, None, config, ALONE, torch.float32)
    with contextlib.closing(loader), pytest.raises(UserError, match="there is no file"):
        list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))


@pytest.mark.parametrize("which", ["one", "first", pytest.param("all", marks=pytest.mark.systems)])
def test_a_process_that_is_killed_ends_the_run_in_words(packs, decoding, which):
    """Also the first one, although the others still decode."""
    with loading(packs / "jpeg.arrow") as (loader, _):
        list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
        first, *others = started(loader)
        assert sorted([first, *others]) == decoding()
        for process in {"all": [first, *others], "one": others[1:], "first": [first]}[which]:
            os.kill(process, signal.SIGKILL)
        words = {
            "all": r"processes ended \(exit status -9\)",
            "one": rf"killed by signal 9|process {others[1]} ended",
            "first": r"processes ended \(exit status -9\)",
        }[which]
        with pytest.raises(RunFailed, match=words):
            read_on(loader)
    until(lambda: not decoding())


def test_nobody_waits_for_a_process_that_the_first_cannot_report_any_more(packs, decoding):
    with loading(packs / "jpeg.arrow") as (loader, _):
        list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
        first, *others = started(loader)
        stop(others)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"processes ended \(exit status -9\)"):
            read_on(loader)
    until(lambda: not decoding())


@pytest.mark.parametrize(
    "stopped",
    [[0], [1, 2], *(pytest.param(which, marks=pytest.mark.systems) for which in ([1], [0, 1, 2]))],
    ids=str,
)
def test_processes_that_are_stopped_are_noticed_and_named(packs, decoding, monkeypatch, stopped):
    monkeypatch.setattr(pool, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.2)
    with loading(packs / "jpeg.arrow") as (loader, _):
        list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
        chosen = [started(loader)[number] for number in stopped]
        stop(chosen)
        names = ", ".join(map(str, chosen))
        with pytest.raises(RunFailed, match=rf"process {names} has been stopped for 0.5 s"):
            read_on(loader)
    until(lambda: not decoding())


def test_a_short_stop_is_no_failure(standing):
    loader, _ = standing
    list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
    processes = started(loader)
    stop(processes)
    looked = loader._decoders._looked
    held = loader._decoders.split(TRAINING).submit(4000, 40)
    until(lambda: held.done() or loader._decoders._looked != looked, "a look at them")
    assert loader._decoders._stopped_since is not None
    for process in processes:
        os.kill(process, signal.SIGCONT)
    assert len(held.result().labels) == 40
    looked = loader._decoders._looked
    until(lambda: loader._decoders.exchange(wait=True) or loader._decoders._looked != looked)
    assert loader._decoders._stopped_since is None


def test_they_start_in_any_folder_with_any_number_of_files_open(packs, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('not the library')")
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with loading(packs / "jpeg.arrow") as (loader, _):
            assert loader._decoders._replies > 1024
            assert len(list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))) == 1
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signal_to_the_whole_group_does_not_reach_them(standing):
    """A run that is asked to stop finishes its step first, and needs images for that."""
    loader, _ = standing
    list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
    for process in started(loader):
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGINT)
    assert len(list(loader.micro_batches(Step(1, 40, 80, 0.0, 0)))) == 2


def test_processes_end_with_the_loader_and_with_a_killed_owner(packs, decoding):
    """Those too that stand still then: they are a group of their own, and the system continues one
    that nobody is left for."""
    with loading(packs / "jpeg.arrow") as (loader, _):
        list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
    until(lambda: not decoding())
    script = f"""
import os, signal, torch
from test_decoders import *
with loading({str(packs / "jpeg.arrow")!r}) as (loader, _):
    list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))
    stop(started(loader)[:2])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | here)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not decoding())


def test_a_script_without_a_main_guard_is_not_run_again(packs, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"""
print("once", flush=True)
from test_decoders import *
with loading({str(packs / "jpeg.arrow")!r}) as (loader, _):
    print(len(list(loader.micro_batches(Step(0, 0, 40, 0.0, 0)))))
""")
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, script], env=os.environ | here, capture_output=True, text=True
    )
    assert done.stdout.split() == ["once", "1"], done.stderr


# --- who reads


def test_processes_are_started_where_there_is_enough_to_read(packs):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / "set"), processes="auto"))
    train, val = open_sources(config)
    for epochs, expected in ((2, False), (50_000 // len(train) + 1, True)):
        loader = StepLoader(train, val, replace(config, epochs=epochs), ALONE, torch.float32)
        with contextlib.closing(loader):
            assert (loader._decoders is not None) == expected


# --- slots


def test_a_slot_is_free_again_when_the_last_tensor_on_it_is_gone():
    slots = Slots(Layout("numbers", 4, 2, 1), 2, pinned=False)
    slot = slots.take()
    room = slots.buffer(slot, 3)
    part = room.images[1:]
    del room
    gc.collect()
    assert slot not in slots._free
    del part
    gc.collect()
    assert slot in slots._free
    kept = [slots.buffer(slots.take(), 3) for _ in range(20)]
    assert slots.free == 2  # those for reading: what is kept beyond the few is a copy
    del kept
    gc.collect()
    assert slots.free == 6
    slots.close()


@pytest.mark.parametrize("form", ["numbers", "bytes", "crops"])
def test_a_layout_keeps_images_labels_and_shapes_apart(form):
    layout = Layout(form, 5, 3, 3, torch.float64)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    room = layout.views(memory, 4)
    room.labels.copy_(torch.arange(4) - 2)
    room.images.fill_(7)
    if room.shapes is not None:
        room.shapes.copy_(torch.arange(8).view(4, 2))
        assert room.shapes.tolist() == torch.arange(8).view(4, 2).tolist()
    assert room.labels.tolist() == [-2, -1, 0, 1] and (room.images == 7).all()
    assert room.rows(1, 3).labels.tolist() == [-1, 0]
    whole = Layout(form, 5, 3, 3, torch.float64).views(memory, 5)
    assert (whole.images[4] == 0).all() and whole.labels[4] == 0


def test_crops_are_sent_as_they_are_unless_they_are_too_large(packs):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow"), size=32))
    train, _ = open_sources(config)
    layout = Layout("crops", 40, 32, 3)
    with_processes = Decoders(config, layout, 1, 3, pinned=False)
    room = with_processes.split(TRAINING).submit(0, 40).result()
    sizes = {tuple(shape) for shape in room.shapes.tolist()}
    areas = [height * width * 3 for height, width in sizes]
    assert max(areas) <= layout.image_bytes and len(sizes) > 10 and (32, 32) in sizes
    order, positions = Order(config.seed, len(train), True), torch.arange(40)
    expected, labels = train.read(order.indices(positions), order.draws(positions))
    assert torch.equal(room.labels, labels)
    for crop, (height, width), right in zip(
        room.images, room.shapes.tolist(), expected, strict=True
    ):
        found = torch.empty(3, 32, 32, dtype=torch.uint8)
        bring_to_size(crop[: height * width * 3].view(height, width, 3).numpy(), found)
        assert torch.equal(found, right)
    with_processes.close()


# --- rows below a crop


KINDS = [
    {},
    {"subsampling": 0},
    {"subsampling": 1},
    {"progressive": True},
    {"restart_marker_rows": 1},
    {"restart_marker_blocks": 3},
]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_not_decoded_below_a_crop_changes_nothing_above(mode, options):
    generator = numpy.random.default_rng(0)
    noise = Image.fromarray(generator.integers(0, 256, (203, 150, 3), numpy.uint8)).convert(mode)
    written = io.BytesIO()
    noise.save(written, "JPEG", quality=90, **options)
    data = written.getvalue()
    head = head_of(data)
    met = set()
    for size in (200, 64, 16, 4, 1):
        for lower in {*range(1, 204, 9), 16, 32, 15, 31, 17, 203}:
            box = [3, int(generator.integers(0, lower)), 140, lower]
            found = region(data, head, box, 3, size, Workspace(), trusted=True)
            again = region(data, head, box, 3, size, Workspace(), trusted=False)
            assert numpy.array_equal(found, again)
            factor = scaling(min(137, lower - box[1]), size)
            met.add(factor)
            whole = pixels(data, 3, factor)
            upper = round(box[1] * whole.shape[0] / 203)
            assert numpy.array_equal(
                found,
                whole[upper:, round(3 * whole.shape[1] / 150) :][
                    : found.shape[0], : found.shape[1]
                ],
            )
    assert met == {1, 2, 4, 8}


def test_what_is_not_trusted_is_decoded_to_its_end():
    data = bytearray(simplejpeg.encode_jpeg(pictures.pixels(1, 200, 200)))
    data[-400:-300] = bytes(100)
    head = head_of(data)
    box, size = [0, 0, 50, 20], 20
    assert region(data, head, box, 3, size, Workspace(), trusted=True).shape == (20, 50, 3)
    with pytest.raises(BadImage):
        region(data, head, box, 3, size, Workspace(), trusted=False)


def test_a_jpeg_in_a_folder_is_trusted_once_it_was_found_whole(tmp_path, monkeypatch):
    root = pictures.folder(tmp_path / "set", each=3, val=1, size=(70, 90))
    bad = bytearray((root / "train/ant/1.JPEG").read_bytes())
    bad[-200:-100] = bytes(100)
    (root / "train/ant/1.JPEG").write_bytes(bad)
    config = replace(CONFIG, data=replace(PHOTOS, path=str(root), crop_area=(0.1, 0.2)))
    train, _ = open_sources(config)
    asked = []

    def noted(*arguments):
        asked.append(arguments[-1])
        return region(*arguments)

    monkeypatch.setattr("megabatch.data.decoded.region", noted)
    good, draws = torch.tensor([0, 2]), crop_draws(0, torch.arange(2))
    first, second = (train.read(good, draws)[0] for _ in range(2))
    assert asked == [False, False, True, True] and torch.equal(first, second)
    for _ in range(2):  # the damaged one never is
        with pytest.raises(UserError, match=r"ant/1\.JPEG cannot be read"):
            train.read(torch.tensor([1]), draws[:1])
    assert asked[4:] == [False, False]
