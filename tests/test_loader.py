"""The loader: every image once an epoch, one order for any number of workers, from any position."""

import contextlib
import json
import shutil
import time
from dataclasses import replace

import pictures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from megabatch.batch import Stage, Step, steps
from megabatch.cli import main
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data import augment, resident
from megabatch.data.jpeg import Encoding
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources, staged
from megabatch.data.origins import open_origin
from megabatch.data.packs.making import pack
from megabatch.data.packs.reading import Pack
from megabatch.data.source import InMemory, InWords
from megabatch.errors import UserError

PHOTOS = Data(size=12, channels=3, crop_area=(0.2, 1.0), flip=True, threads=2)
CONFIG = Config(batch=8, micro=4, span=4, epochs=5, data=PHOTOS)


def worker(rank=0, world=1):
    return Cluster(rank, world, rank, world, torch.device("cpu"), (1, world))


class Numbered(InMemory):
    """Image n is the number n in one pixel."""

    def __init__(self, images):
        numbers = torch.arange(images, dtype=torch.float32)
        super().__init__(numbers.view(-1, 1, 1, 1), torch.arange(images), classes=10)


def stream(source, config, world, at=(0, 0)):
    """Of each step on: step -> [(position, label), ...] over all workers."""
    found = {}
    with contextlib.ExitStack() as ending:
        loaders = [
            ending.enter_context(StepLoader(source, None, config, worker(r, world), torch.float32))
            for r in range(world)
        ]
        for step in steps(config.all_stages, len(source), config.epochs, *at):
            rows = []
            for loader in loaders:
                for micro in loader.micro_batches(step):
                    assert micro.first == int(micro.positions[0])
                    rows += zip(micro.positions.tolist(), micro.labels.tolist(), strict=True)
            found[step.index] = (step, sorted(rows))
    return found


@settings(max_examples=25, deadline=None)
@given(
    images=st.integers(5, 60),
    micro=st.integers(1, 6),
    batches=st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 3)),
    world=st.integers(1, 5),
    seed=st.integers(0, 2**33),
)
def test_every_image_once_an_epoch_whatever_the_batches_and_workers(
    images, micro, batches, world, seed
):
    stages = (Stage(1.0, batches[1] * micro), Stage(2.2, batches[2] * micro))
    config = replace(
        CONFIG, batch=batches[0] * micro, micro=micro, span=1, epochs=4, stages=stages, seed=seed
    )
    source = Numbered(images)
    rows = [row for _, some in stream(source, config, world).values() for row in some]
    positions = [position for position, _ in rows]
    assert positions == list(range(len(rows)))
    labels = [label for _, label in rows]
    for epoch in range(4):
        part = labels[epoch * images : (epoch + 1) * images]
        assert sorted(part) == list(range(images))
    assert rows == [row for _, some in stream(source, config, 1).values() for row in some]


@settings(max_examples=10, deadline=None)
@given(images=st.integers(7, 40), world=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_run_can_go_on_from_every_position(images, world, seed):
    config = replace(CONFIG, epochs=2, stages=(Stage(0.7, 12),), seed=seed)
    source = Numbered(images)
    whole = stream(source, config, 1)
    for index, (step, _) in whole.items():
        again = stream(source, config, world, (index, step.seen))
        assert again == {k: v for k, v in whole.items() if k >= index}


def test_epochs_differ_in_order():
    rows = [row for _, some in stream(Numbered(50), CONFIG, 1).values() for row in some]
    labels = [label for _, label in rows]
    assert labels[:50] != labels[50:100] != labels[100:150]


def test_a_batch_that_nobody_foresaw_is_read_all_the_same():
    """As when the batch follows the noise."""
    source = Numbered(40)
    loader = StepLoader(source, None, CONFIG, worker(), torch.float32)
    seen, rows = 0, []
    for index, batch in enumerate((8, 16, 4, 12, 8)):
        for micro in loader.micro_batches(Step(index, seen, batch, 0.0, 0)):
            rows += micro.positions.tolist()
        seen += batch
    loader.close()
    assert rows == list(range(48))


# --- packs


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return pictures.packed(tmp_path_factory.mktemp("packs"), each=9, val=3, size=(30, 40), raw=20)


def read(path, world=1, at=(0, 0), **data):
    config = replace(CONFIG, epochs=2, data=replace(PHOTOS, path=str(path), **data))
    train, _ = open_sources(config)
    found = []
    with contextlib.ExitStack() as ending:
        loaders = [
            ending.enter_context(StepLoader(train, None, config, worker(r, world), torch.float32))
            for r in range(world)
        ]
        for step in steps(config.all_stages, len(train), config.epochs, *at):
            for loader in loaders:
                found += [
                    (micro.first, micro.images, micro.labels)
                    for micro in loader.micro_batches(step)
                ]
    found.sort(key=lambda row: row[0])
    return torch.cat([images for _, images, _ in found]), torch.cat([row[2] for row in found])


def test_the_numbers_do_not_depend_on_workers_threads_or_store(packs):
    images, labels = read(packs / "jpeg.arrow")
    assert images.shape[1:] == (3, 12, 12) and len(images) == 56
    for other in (
        read(packs / "jpeg.arrow", world=3),
        read(packs / "jpeg.arrow", threads=5),
        read(packs / "set"),
    ):
        assert torch.equal(images, other[0]) and torch.equal(labels, other[1])
    later = read(packs / "jpeg.arrow", world=2, at=(3, 24))
    assert torch.equal(images[24:], later[0]) and torch.equal(labels[24:], later[1])


def test_colour_augmentation_too_is_the_same_for_any_number_of_workers(packs):
    settings_ = {"jitter": (0.4, 0.4, 0.4), "lighting": 0.1}
    one, three = (read(packs / "jpeg.arrow", world=world, **settings_)[0] for world in (1, 3))
    assert torch.equal(one, three)
    assert not torch.equal(one, read(packs / "jpeg.arrow")[0])


def test_resident_images_are_the_same_but_for_rounding(packs):
    images, labels = read(packs / "raw.arrow")
    found, found_labels = read(packs / "raw.arrow", resident="always")
    assert torch.equal(labels, found_labels)
    steps_ = (images - found).abs() * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255
    assert steps_.max() < 1.5  # one step of 256 at the most


@pytest.mark.parametrize("images_at_once", [0, 1, 5, 1000])
def test_resident_images_come_in_any_portions(packs, images_at_once, monkeypatch):
    whole, _ = read(packs / "raw.arrow", resident="always")
    monkeypatch.setattr("megabatch.data.resident._SLAB_BYTES", images_at_once * 20 * 20 * 3)
    monkeypatch.setattr("megabatch.data.resident._RUN", 2)
    assert torch.equal(read(packs / "raw.arrow", resident="always")[0], whole)


@pytest.mark.parametrize("shape", [(9, 3, 5, 5), (9, 1, 8, 8), (9, 3, 7, 4), (0, 3, 5, 5)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_images_in_words_are_the_same_images(shape, dtype):
    source = InMemory(torch.rand(shape).mul(255).to(dtype), torch.arange(shape[0]), 10)
    words = InWords(source, torch.device("cpu"))
    indices = torch.randperm(shape[0])[:4]
    for found, wanted in zip(words.read(indices, None), source.read(indices, None), strict=True):
        assert torch.equal(found, wanted)
    assert words.read(indices, None)[0][:1].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(words.images, source.images) and len(words) == len(source)


def test_images_that_lie_on_a_device_are_not_brought_there_again(monkeypatch):
    """A study brings them there once, and each of its runs asks for them."""
    # Also where the device is no GPU.
    monkeypatch.setattr(InMemory, "on", lambda source, device: InWords(source, device))
    source = InMemory(torch.zeros(9, 3, 5, 5, dtype=torch.uint8), torch.arange(9), 10)
    placed = source.part(torch.arange(4)).on(torch.device("cpu"))
    again = placed.on(torch.device("cpu"))
    assert isinstance(placed._source, InWords) and again._source is placed._source


def test_a_callers_default_dtype_moves_no_pixel():
    begin, end = torch.tensor([0.0, 3.0]), torch.tensor([500.0, 400.0])
    plain = resident._weights(begin, end, 500, 224)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(resident._weights(begin, end, 500, 224), plain)
        assert augment._of_bytes((0.485, 0.456), 2, torch.device("cpu")).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_cannot_be_resident_says_why(packs, tmp_path):
    with pytest.raises(UserError, match=r"data\.resident is for packs"):
        read(packs / "set", resident="always")
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    (root / "train/ant/other.JPEG").write_bytes(pictures.encoded(1, 20, 20))
    pack(open_origin(root), "set", tmp_path / "a.arrow", Encoding())
    with pytest.raises(UserError, match="no pack of one size"):
        read(tmp_path / "a.arrow", resident="always")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_counts_every_image_once(packs, world):
    config = replace(CONFIG, data=replace(PHOTOS, path=str(packs / "jpeg.arrow")))
    _, val = open_sources(config)
    expected = val.read(torch.arange(9), None)[1]
    loaders = [StepLoader(None, val, config, worker(r, world), torch.float32) for r in range(world)]
    parts = [list(loader.validation()) for loader in loaders]
    for loader in loaders:
        loader.close()
    labels = torch.cat([labels for part in parts for _, labels in part])
    assert torch.equal(labels, expected)


def test_a_bad_image_ends_the_run_with_its_name(packs, tmp_path):
    data = bytearray((packs / "jpeg.arrow").read_bytes())
    whole = Pack(packs / "jpeg.arrow")
    at = data.find(bytes(whole.record(4))) + 50
    data[at] ^= 1
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(UserError, match=r"image 4 \(train/ant/4\.JPEG\) .* checksum"):
        read(tmp_path / "a.arrow")


def test_waiting_is_measured_and_reads_further_ahead():
    class Slow(Numbered):
        instant = False

        def read(self, indices, draws):
            time.sleep(0.02)
            return super().read(indices, draws)

    source = Slow(400)
    config = replace(CONFIG, data=replace(PHOTOS, threads=1))
    with StepLoader(source, None, config, worker(), torch.float32) as loader:
        run = iter(steps(config.all_stages, 400, 1e9))
        # One that is busy elsewhere may find images there for a while.
        until(lambda: list(loader.micro_batches(next(run))) and loader._ahead > 2, "a wait")
        assert loader.waited_seconds > 0.001
        assert loader.busy_seconds >= 0.02


# --- staging


def test_a_pack_is_staged_once_and_again_when_it_changed(packs, tmp_path):
    local = tmp_path / "local"
    copy = staged(packs / "raw.arrow", local)
    assert copy.read_bytes() == (packs / "raw.arrow").read_bytes()
    before = copy.stat().st_mtime_ns
    assert staged(packs / "raw.arrow", local).stat().st_mtime_ns == before
    copy.write_bytes(b"half a pack")
    assert (
        Pack(staged(packs / "raw.arrow", local)).fingerprint
        == Pack(packs / "raw.arrow").fingerprint
    )
    one, _ = read(packs / "raw.arrow")
    two, _ = read(packs / "raw.arrow", local_copy=str(local))
    assert torch.equal(one, two)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be staged"):
        staged(packs / "raw.arrow", tmp_path / "file")


# --- the bench


@pytest.mark.systems
def test_the_bench_measures_every_contender_on_the_same_images(packs, tmp_path, capsys):
    images = tmp_path / "set"
    shutil.copytree(packs / "set", images)
    some = next(images.rglob("*.JPEG"))
    some.with_name("broken.jpg").write_bytes(some.read_bytes()[:40])
    some.with_name("._hidden.jpg").write_bytes(b"of another system")

    def bench(*flags):
        command = ["bench", "loader", "--images", str(images), "--device", "cpu"]
        return main([*command, "--size", "16", "--small", "24", "--resident", "12", *flags])

    quick = ["--threads", "1", "--micro", "4", "--seconds", "0.02", "--turns", "1"]
    assert bench(*quick, "--out", str(tmp_path / "b.json"), "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "b.json").read_text())
    rows = {(row["images"], row["loader"]): row for row in result["rows"]}
    assert len(rows) == 13 and all(row["rate"] > 0 for row in rows.values())
    assert rows["originals", "limit: decoding alone"]["of_limit"] == 1
    assert rows["24 px", "DataLoader, Pillow"]["of_dataloader"] == 1
    assert bench("--micro", "64") == 2
    assert "128 are needed for batches of 64" in capsys.readouterr().err
