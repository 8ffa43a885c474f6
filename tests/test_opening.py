"""Opening folders and archives as people have them: messy, damaged, or hostile."""

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace

import pictures
import pytest
import torch
from ranks import run_ranks

from megabatch.batch import Step, steps
from megabatch.cli import main
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.jpeg import Encoding
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.data.origins import expanding, open_origin
from megabatch.data.packs.making import pack
from megabatch.errors import UserError
from megabatch.launch import run_local

PHOTOS = Data(size=12, channels=3, crop_area=(0.2, 1.0), threads=2)
CONFIG = Config(batch=12, micro=4, span=4, epochs=2, data=PHOTOS)
ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


def config_of(path, **data):
    return replace(CONFIG, data=replace(PHOTOS, path=str(path), **data))


# --- what lies about in folders


def test_hidden_files_are_passed_over_and_others_are_named(tmp_path):
    root = pictures.folder(tmp_path / "set", each=4, val=0)
    clean, _ = open_sources(config_of(root))
    assert clean.notes == ()
    (root / "ant/._0.JPEG").write_bytes(b"\0\5\26\7")
    (root / "ant/.DS_Store").write_bytes(b"x")
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX/._ant").write_bytes(b"x")
    (root / ".git").mkdir()
    assert open_sources(config_of(root))[0].notes == ()
    for name in ("notes.txt", "Thumbs.db", "a.heic", "list.csv"):
        (root / "bee" / name).write_bytes(b"x")
    train, _ = open_sources(config_of(root))
    (note,) = train.notes
    assert note.startswith("passed over 4 files that are no images: ") and "bee/Thumbs.db" in note
    assert (train.classes, len(train)) == (clean.classes, len(clean))
    (root / "dog [x]").mkdir()
    assert open_sources(config_of(root))[0].notes[1] == "1 class without images: dog [x]"


def test_folders_inside_a_class_are_named_as_what_they_are(tmp_path):
    """Their images are not seen, which nobody learns from files that are no images."""
    root = pictures.folder(tmp_path / "set", each=4, val=0)
    clean, _ = open_sources(config_of(root))
    (root / "bee/more").mkdir()
    shutil.copy(next((root / "bee").glob("*.JPEG")), root / "bee/more")
    (root / "bee/list.csv").write_bytes(b"x")
    train, _ = open_sources(config_of(root))
    assert train.notes == (
        f"passed over 1 file that is no image: {root}/bee/list.csv",
        f"passed over 1 folder inside a class: {root}/bee/more: images lie straight in CLASS/",
    )
    assert len(train) == len(clean)


def test_a_single_class_is_warned_of(tmp_path):
    """It would be learnt to 100 % at once."""
    root = pictures.folder(tmp_path / "set", each=30, val=0)
    for folder in [path for path in root.iterdir() if path.name != "ant"]:
        shutil.rmtree(folder)
    (note,) = open_sources(config_of(root))[0].notes
    assert note.startswith("warning: ant is the only class, so that there is nothing to learn")


def test_colour_that_the_model_does_not_see_gets_a_note(tmp_path):
    pictures.packed(tmp_path, each=4, val=1, size=(16, 16), raw=12)
    for name in ("set", "jpeg.arrow", "raw.arrow"):
        assert open_sources(config_of(tmp_path / name))[0].notes == ()
        (note,) = open_sources(config_of(tmp_path / name, channels=1))[0].notes
        assert note.startswith("the images are in colour but seen in grey: --data.channels 3")
    for image in (tmp_path / "set").rglob("*.JPEG"):
        image.write_bytes(pictures.encoded(len(image.name), 16, 16, mode="L"))
    pack(open_origin(tmp_path / "set"), "set", tmp_path / "grey.arrow", Encoding("raw", 12))
    for name in ("set", "grey.arrow"):
        assert open_sources(config_of(tmp_path / name, channels=1))[0].notes == ()


def test_the_names_of_classes_are_known_from_folders_packs_and_data_sets(tmp_path):
    root = pictures.folder(tmp_path / "set", each=4, val=0)
    (root / "bee").rename(root / "[b] bee")
    names = tuple(open_origin(root).classes)
    assert "[b] bee" in names
    packed = pack(open_origin(root), "set", tmp_path / "a.arrow", Encoding("jpeg", 0, 90))
    own = [(torch.zeros(3, 12, 12), 0)] * 20
    named = type("Named", (list,), {"classes": ["cat", "dog"]})(own)
    for config, data, known in (
        (config_of(root), None, names),
        (config_of(packed.path), None, names),
        (CONFIG, named, ("cat", "dog")),
        (CONFIG, own, ()),
        (replace(CONFIG, data=Data("digits")), None, tuple("0123456789")),
        (replace(CONFIG, data=Data("synthetic")), None, ()),
    ):
        assert [part.class_names for part in open_sources(config, data)] == [known, known]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "BMP", "TIFF", "PNG"])
def test_other_kinds_of_pictures_are_read_and_packed(tmp_path, kind):
    root = pictures.folder(tmp_path / "set", each=4, val=0)
    data = pictures.encoded(3, 40, 50, kind)
    (root / f"ant/new.{kind.lower()}").write_bytes(data)
    train, val = open_sources(config_of(root), cluster=ALONE)
    assert len(train) + len(val) == 13
    for part in (train, val):
        part.read(torch.arange(len(part)), None)
    pack(open_origin(root), "set", tmp_path / "a.arrow", Encoding())
    # One that is cut off is found before the first step.
    (root / f"ant/new.{kind.lower()}").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=rf"1 unreadable image: ant/new\.{kind.lower()} \("):
        open_sources(config_of(root), cluster=ALONE)


def test_a_tenth_is_held_out_by_pack_and_train_alike(tmp_path):
    root = pictures.folder(tmp_path / "set", each=10, val=0)
    pack(open_origin(root), "set", tmp_path / "a.arrow", Encoding())
    parts = [open_sources(config_of(path)) for path in (root, tmp_path / "a.arrow")]
    for train, val in parts:
        assert (len(train), len(val)) == (27, 3)
    held = [val.read(torch.arange(3), None) for _, val in parts]
    assert torch.equal(held[0][0], held[1][0]) and torch.equal(held[0][1], held[1][1])


# --- images that cannot be read


BAD = ["train/ant/1.JPEG", "train/bee/3.JPEG", "train/cat/0.JPEG", "val/ant/1.JPEG"]


@pytest.fixture
def messy(tmp_path):
    """Four of 24 images are unreadable, each in another way; the last only in its middle."""
    root = pictures.folder(tmp_path / "messy", each=6, val=2, size=(70, 90))
    (root / BAD[0]).write_bytes(b"")
    whole = (root / BAD[1]).read_bytes()
    (root / BAD[1]).write_bytes(whole[: len(whole) // 2])
    (root / BAD[2]).unlink()
    (root / BAD[2]).symlink_to("nowhere")
    spoilt = bytearray((root / BAD[3]).read_bytes())
    spoilt[-300:-200] = bytes(100)
    (root / BAD[3]).write_bytes(spoilt)
    return root


def test_all_unreadable_images_are_counted_before_the_first_step(messy, capsys):
    with pytest.raises(UserError) as error:
        open_sources(config_of(messy), cluster=ALONE)
    words = str(error.value)
    assert words.startswith(
        f"{messy} has 3 unreadable images: train/ant/1.JPEG (the file is empty)"
    )
    assert words.endswith("leave them out with --data.skip-bad 3; from Python, Data(skip_bad=3)")
    assert "\n" not in words
    # With a number every image is decoded, and the damage inside one is found too.
    with pytest.raises(
        UserError, match=r"has 4 unreadable images: .*, \.\.\.; .*--data.skip-bad 4"
    ):
        open_sources(config_of(messy, skip_bad=3), cluster=ALONE)
    command = ["train", "digits", "--data.path", str(messy), "--data.source", "folder"]
    assert main([*command, "--workers", "1"]) == 2
    assert "3 unreadable images" in capsys.readouterr().err


def read_all(cluster, path, processes="never"):
    """Positions, images and labels of this worker, and the labels it validates."""
    config = config_of(path, skip_bad=4, processes=processes)
    train, val = open_sources(config, cluster=cluster)
    with StepLoader(train, val, config, cluster, torch.float32) as loader:
        rows = [
            (micro.first, micro.images.clone(), micro.labels.clone())
            for step in steps(config.all_stages, len(train), config.epochs)
            for micro in loader.micro_batches(step)
        ]
        valid = [labels.tolist() for _, labels in loader.validation()]
    return rows, valid, train.notes, len(train), len(val)


def test_images_are_left_out_alike_on_any_number_of_workers_and_by_processes(messy):
    rows, valid, notes, train, val = read_all(ALONE, messy)
    assert (train, val) == (15, 5) and sum(map(len, valid)) == 5
    assert len(notes) == 1 and notes[0].startswith("left out 4 unreadable images: train/ant/1.JPEG")
    worlds = [run_ranks(read_all, 3, messy), [read_all(ALONE, messy, "always")]]
    for found in worlds:
        theirs = sorted((row for part in found for row in part[0]), key=lambda row: row[0])
        assert [row[0] for row in theirs] == [row[0] for row in rows]
        for (_, images, labels), (_, images_, labels_) in zip(theirs, rows, strict=True):
            assert torch.equal(images, images_) and torch.equal(labels, labels_)
        assert {part[2] for part in found} == {notes}


def test_a_part_without_a_readable_image(tmp_path):
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    for path in (root / "val").rglob("*.JPEG"):
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match="none of the 3 val images"):
        open_sources(config_of(root, skip_bad=9), cluster=ALONE)


def test_skipping_is_for_folders():
    for data in (Data(skip_bad=1), Data(path="a.arrow", skip_bad=1)):
        with pytest.raises(UserError, match=r"data\.skip_bad leaves unreadable images of a folder"):
            open_sources(Config(data=data))


# --- hostile files


def test_pipes_and_devices_that_are_called_images_are_no_trap(tmp_path):
    root = pictures.folder(tmp_path / "set", each=6, val=0)
    os.mkfifo(root / "ant/pipe.jpg")
    (root / "ant/zero.jpg").symlink_to("/dev/zero")
    (root / "ant/folder.jpg").mkdir()
    with pytest.raises(UserError, match="has 3 unreadable images"):
        open_sources(config_of(root), cluster=ALONE)
    train, val = open_sources(config_of(root, skip_bad=3), cluster=ALONE)
    assert len(train) + len(val) == 18
    with (root / "huge.arrow").open("wb") as file:
        file.truncate(10**12)
    for pack_ in ("ant/pipe.jpg", "ant/zero.jpg", "ant", "huge.arrow"):
        (tmp_path / "link.arrow").unlink(missing_ok=True)
        (tmp_path / "link.arrow").symlink_to(root / pack_)
        with pytest.raises(UserError, match=r"link\.arrow"):
            open_sources(config_of(tmp_path / "link.arrow"))


@pytest.mark.parametrize("name", ["../../../secret.JPEG", "/etc/passwd", "..", "", "a/../b"])
def test_names_in_tiny_imagenets_annotations_stay_in_their_folder(tmp_path, name):
    root = pictures.folder(tmp_path / "tiny", each=2, val=0)
    os.renames(root, tmp_path / "set/train")
    val = tmp_path / "set/val"
    (val / "images").mkdir(parents=True)
    (val / "val_annotations.txt").write_text(f"{name}\tant\t0\t0\t1\t1\n")
    with pytest.raises(UserError, match=r"line 1 of .*val_annotations\.txt names no file in"):
        open_origin(tmp_path / "set")


GIGABYTES = 2_300_000_000


def bomb(path, head):
    """A few megabytes that expand to gigabytes."""
    chunk = gzip.compress(bytes(1 << 24), 1)
    with path.open("wb") as file:
        file.write(gzip.compress(head))
        for _ in range(GIGABYTES >> 24):
            file.write(chunk)


def tar_head(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf()


BOMBS = {
    "cifar-10-python.tar.gz": tar_head("data_batch_1", GIGABYTES),
    "cifar-100-binary.tar.gz": tar_head("readme", GIGABYTES),
    "cifar-10-binary.tar.gz": tar_head("pax", GIGABYTES, tarfile.XHDTYPE),
    "train-images-idx3-ubyte.gz": b"\0\0\x08\x03"
    + (2933673).to_bytes(4, "big")
    + b"\0\0\0\x1c" * 2,
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_expands_without_end_is_one_sentence_in_little_memory(tmp_path, name):
    bomb(tmp_path / name, BOMBS[name])
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\0")
    assert (tmp_path / name).stat().st_size < 20 << 20
    path = tmp_path if "idx" in name else tmp_path / name
    script = f"""
import resource, sys
from pathlib import Path
from megabatch.data.origins import open_origin
from megabatch.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_origin(Path({str(path)!r}))
except UserError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mebibytes, words = done.stdout.split(maxsplit=1)
    assert "expands to more than" in words and len(words.splitlines()) == 1
    assert int(mebibytes) < 3 * expanding.bound_of(tmp_path / name) >> 20


def test_what_is_packed_well_is_no_bomb(tmp_path):
    """Black digits compress a thousandfold: a small file may."""
    head = b"\0\0\x08\x03" + (60_000).to_bytes(4, "big") + b"\0\0\0\x1c" * 2
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(head + bytes(60_000 * 784))
    labels = b"\0\0\x08\x01" + (60_000).to_bytes(4, "big") + bytes(60_000)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    assert len(open_origin(tmp_path).labels) == 60_000


def test_a_tar_in_a_tar_in_disguise(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(out.getvalue())
    with pytest.raises(UserError, match="cannot be read"):
        open_origin(tmp_path)


# --- a pack that shrinks


def read_on_while_it_is_cut_off(path, processes):
    config = config_of(path, processes=processes, resident="never")
    train, val = open_sources(config)
    with StepLoader(train, val, config, ALONE, torch.float32) as loader:
        list(loader.micro_batches(Step(0, 0, 12, 0.0, 0)))
        os.truncate(path, 5000)
        for index in range(1, 1000):
            list(loader.micro_batches(Step(index, 12 * index, 12, 0.0, 0)))


@pytest.mark.parametrize("processes", ["never", "always"])
@pytest.mark.parametrize("name", ["jpeg.arrow", "raw.arrow"])
def test_a_pack_that_is_cut_off_while_it_is_read_is_named(tmp_path, name, processes):
    path = pictures.packed(tmp_path, each=30, val=5, size=(70, 90), raw=64) / name
    # In a process of its own: a map of the file would end it by SIGBUS.
    with pytest.raises(UserError, match="is damaged: it was cut off while it was in use"):
        run_local(1, read_on_while_it_is_cut_off, path, processes)
    with pytest.raises(UserError, match="5,000 bytes and should have"):
        open_sources(config_of(path))
