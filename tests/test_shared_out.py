"""A pack shared out over all workers' memory: the same images, from memory alone, by threads or by
processes, and what past epochs took is given back."""

import contextlib
import gc
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy
import pictures
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from waiting import until

from megabatch.batch import Stage, Step, steps
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data import shared
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.packs.reading import Pack
from megabatch.data.pool import TRAINING, VALIDATION, Decoders
from megabatch.data.shared import Areas, FromArea
from megabatch.data.slots import Layout
from megabatch.errors import UserError
from megabatch.keyed import shuffled

IMAGES = 27
PHOTOS = Data(size=12, channels=3, crop_area=(0.2, 1.0), flip=True, threads=1, shared="always")
CONFIG = Config(batch=8, micro=4, span=4, epochs=4, stages=(Stage(1.3, 16),), data=PHOTOS)
ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return pictures.packed(
        tmp_path_factory.mktemp("packs"), each=IMAGES // 3, val=3, size=(30, 40), raw=20
    )


@contextlib.contextmanager
def loading(cluster, path, **data):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(path), **data))
    train, val = open_sources(config)
    loader = StepLoader(train, val, config, cluster, torch.float32)
    try:
        yield loader
    finally:
        loader.close()


def run(*at):
    return list(steps(CONFIG.all_stages, IMAGES, CONFIG.epochs, *at))


def unforeseen():
    """Steps that the config does not have, as when the batch follows the noise."""
    seen, found = 0, []
    for index, batch in enumerate((8, 16, 4, 12, 24, 4, 16, 8)):
        found.append(Step(index, seen, batch, 0.0, 0))
        seen += batch
    return found


def read(cluster, path, steps_, **data):
    """Of each micro-batch of a worker: position, images, labels."""
    with loading(cluster, path, **data) as loader:
        return [
            (micro.first, micro.images.clone(), micro.labels.clone())
            for step in steps_
            for micro in loader.micro_batches(step)
        ]


def read_from_memory_alone(cluster, path, steps_, **data):
    """The same from a pack whose images are overwritten once each worker has its part, in several
    rounds of the exchange."""
    before, shared._ROUND_BYTES = shared._ROUND_BYTES, 3000
    with loading(cluster, path, **data) as loader:
        if data["processes"] == "never":  # threads may read further ahead than exchanges go
            loader._most_ahead = loader._ahead
        dist.barrier()
        if cluster.rank == 0:
            place, length, _ = Pack(path)._places["image"]
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(bytes(length))
        dist.barrier()
        found = []
        for step in steps_:
            for micro in loader.micro_batches(step):
                found.append((micro.first, micro.images.clone(), micro.labels.clone()))
    shared._ROUND_BYTES = before
    return found


def assert_same(results, expected):
    rows = sorted((row for found in results for row in found), key=lambda row: row[0])
    assert [first for first, *_ in rows] == [first for first, *_ in expected]
    for (_, images, labels), (_, images_, labels_) in zip(rows, expected, strict=True):
        assert torch.equal(images, images_) and torch.equal(labels, labels_)


# --- the same images


@pytest.mark.parametrize(
    "world, name, at, who",
    [
        (2, "jpeg.arrow", (0, 0), "always"),
        (2, "raw.arrow", (3, 24), "always"),
        (2, "jpeg.arrow", (0, 0), "never"),
        (2, "raw.arrow", (3, 24), "never"),
        (3, "jpeg.arrow", (4, 32), "never"),
        pytest.param(3, "jpeg.arrow", (4, 32), "always", marks=pytest.mark.systems),
    ],
)
def test_a_pack_shared_out_is_the_same_pack(packs, tmp_path, world, name, at, who):
    copy = tmp_path / name
    copy.write_bytes((packs / name).read_bytes())
    results = run_ranks(
        with_keywords, world, read_from_memory_alone, (copy, run(*at)), {"processes": who}
    )
    assert_same(results, read(ALONE, packs / name, run(*at)))


def with_keywords(cluster, function, arguments, keywords):
    return function(cluster, *arguments, **keywords)


def test_steps_that_nobody_foresaw_come_from_the_pack(packs):
    expected = read(ALONE, packs / "jpeg.arrow", unforeseen())
    for who in ("always", "never"):
        results = run_ranks(
            with_keywords,
            2,
            read,
            (packs / "jpeg.arrow", unforeseen()),
            {"processes": who},
        )
        assert_same(results, expected)


def test_one_worker_alone_shares_with_nobody(packs):
    name = packs / "jpeg.arrow"
    assert_same([read(ALONE, name, run(), processes="always")], read(ALONE, name, run()))


# --- memory


def received_maps(process):
    """How many areas a process maps."""
    return Path(f"/proc/{process}/maps").read_text().count("megabatch-received")


def decoding(group):
    """The processes of a group that decode (the one it is called after only waits)."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ProcessLookupError):
            if folder.name.isdigit() and os.getpgid(process := int(folder.name)) == group:
                found.append(process)
    return [process for process in found if process != group]


def at_rest(group):
    """How many areas each process that decodes maps, once none of them is between two: who reads
    the list of its maps while it changes finds both."""
    found = [received_maps(process) for process in decoding(group)]
    return found if max(found) <= 1 else None


def memory_of_epochs(cluster, path):
    """After each epoch: bytes that are taken, bytes that should be, areas mapped here and in each
    process; and areas mapped here after the end."""
    found = []
    with loading(cluster, path, processes="always", threads=2) as loader:
        records = loader._source.records
        group = loader._decoders._process.pid
        for step in run():
            for _ in loader.micro_batches(step):
                pass
            # The first of them may have read it all before the second was there.
            until(lambda: len(decoding(group)) == 2, "two processes that decode")
            areas = [exchange.result() for exchange in records._epochs.values()]
            records._thread.submit(int).result()  # past ones were dropped by then
            taken = os.fstat(records.file).st_blocks * 512
            live = sum(-(-area.nbytes // 4096) * 4096 for area in areas)
            theirs = until(lambda: at_rest(group), "processes that map one area at most")
            found.append((step.seen // IMAGES, taken, live, received_maps(os.getpid()), theirs))
            del areas
    del records, loader
    gc.collect()
    return found, received_maps(os.getpid())


def test_what_past_epochs_took_is_given_back(packs):
    for found, after in run_ranks(memory_of_epochs, 2, packs / "jpeg.arrow"):
        assert {epoch for epoch, *_ in found} == {0, 1, 2, 3}
        for _, taken, live, ours, theirs in found:
            assert 0 < taken == live
            assert ours <= 2 and len(theirs) == 2
        assert any(max(theirs) == 1 for *_, theirs in found)
        assert after == 0


# --- areas and processes, without workers


class Exchanging:
    """Stands for SharedOut: the images of epoch 0 are received when the test says so."""

    def __init__(self, path):
        self.pack, self._areas = Pack(path), Areas()
        self.file = self._areas.file
        self.first = Future()

    def by_epoch(self, first, last):
        return [(first, last, first // IMAGES)]

    def received(self, epoch):
        return epoch > 0 or self.first.done()

    def area(self, epoch):
        return None if epoch > 0 else self.first.result()

    def receive(self, spoilt=None):
        numbers = numpy.arange(IMAGES)[::-1].copy()
        area, room = self._areas.add(numbers, self.pack.lengths()[numbers])
        room[:] = numpy.frombuffer(b"".join(map(self.pack.record, numbers)), numpy.uint8)
        if spoilt is not None:
            image = area.get(spoilt)
            image[len(image) // 2] ^= 1
        self.first.set_result(area)


@pytest.fixture
def exchanging(packs):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow")))
    source = Exchanging(packs / "jpeg.arrow")
    decoders = Decoders(config, Layout("bytes", 4, 12, 3), 1, 3, False, source)
    yield source, decoders
    decoders.close()
    source._areas.close()


def expected_labels(source, positions):
    return torch.from_numpy(source.pack.labels[shuffled(CONFIG.seed, positions, IMAGES).numpy()])


def test_only_what_was_not_received_yet_is_held_back(exchanging):
    source, decoders = exchanging
    training, validation = decoders.split(TRAINING), decoders.split(VALIDATION)
    slots = decoders.slots.free
    held, cancelled = training.submit(0, 4), training.submit(4, 4)
    assert decoders._held == [held, cancelled] and not held.done()
    cancelled.cancel()
    assert decoders.slots.free == slots - 1
    # What needs no exchange overtakes it.
    assert validation.submit(0, 4).result().labels.tolist() == [0, 0, 0, 1]
    unknown = training.submit(IMAGES, 4)
    labels = unknown.result().labels
    assert labels.tolist() == expected_labels(source, torch.arange(IMAGES, IMAGES + 4)).tolist()
    source.receive()
    labels = held.result().labels
    assert labels.tolist() == expected_labels(source, torch.arange(4)).tolist()


def test_an_exchange_that_failed_is_reported_by_what_needs_it(exchanging):
    source, decoders = exchanging
    batch = decoders.split(TRAINING).submit(0, 4)
    source.first.set_exception(RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        batch.result()


def test_a_byte_that_changed_in_memory_is_found_and_named(exchanging):
    source, decoders = exchanging
    spoilt = int(shuffled(CONFIG.seed, torch.arange(2, 3), IMAGES))
    source.receive(spoilt)
    name = source.pack.name(spoilt)
    with pytest.raises(UserError, match=rf"image {spoilt} \({name}\) .* checksum"):
        decoders.split(TRAINING).submit(0, 4).result()


def test_slots_of_unwanted_micro_batches_are_waited_for(exchanging):
    source, decoders = exchanging
    source.receive()
    training = decoders.split(TRAINING)
    for _ in range(5):
        for batch in [training.submit(0, 4) for _ in range(3)]:
            batch.cancel()
    labels = training.submit(4, 4).result().labels
    assert labels.tolist() == expected_labels(source, torch.arange(4, 8)).tolist()


def test_a_place_is_never_used_twice_and_reads_as_nothing_when_given_back(packs):
    source = Exchanging(packs / "jpeg.arrow")
    source.receive()
    area = source.first.result()
    there = FromArea(source.pack, source.file)
    there.look_in(area.place, area.nbytes)
    assert bytes(there.record(5)) == bytes(source.pack.record(5))
    kept = area.get(5)  # what looks at an area keeps it
    where, source.first = (area.place, area.nbytes), Future()
    del area
    gc.collect()
    assert bytes(kept) == bytes(source.pack.record(5))
    del kept
    gc.collect()
    assert os.fstat(source.file).st_blocks == 0
    source.receive()
    assert source.first.result().place >= sum(where)
    there.look_in(0, 0)
    there.look_in(*where)
    assert there._area.get(5) is None and bytes(there.record(5)) == bytes(source.pack.record(5))
    source._areas.close()


def config_of(packs):
    return replace(CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow")))


def test_an_area_of_no_images():
    areas = Areas()
    none = numpy.empty(0, numpy.int64)
    area, room = areas.add(none, none)
    assert len(room) == 0 and area.get(0) is None
    areas.close()
