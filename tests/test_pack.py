"""Packing: every kind of source, odd images, interruptions, determinism, and damaged files."""

import errno
import gzip
import io
import itertools
import json
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib

import numpy
import pictures
import pyarrow
import pytest
import scipy.io
from PIL import Image
from pyarrow import parquet
from waiting import PATIENCE_SECONDS

from megabatch.cli import main
from megabatch.data.jpeg import Encoding
from megabatch.data.jpeg import pixels as decoded
from megabatch.data.origins import open_origin
from megabatch.data.packs import making, writing
from megabatch.data.packs.making import pack
from megabatch.data.packs.reading import About, Pack, PackError, verify_pack
from megabatch.data.packs.writing import Index
from megabatch.errors import UserError


def packed(source, out, encoding=Encoding(), **options):  # noqa: B008
    result = pack(open_origin(source), source.name, out, encoding, **options)
    return Pack(out) if result.path else result


@pytest.fixture
def source(tmp_path):
    return pictures.folder(tmp_path / "set")


# --- what is in a pack


def test_a_pack_holds_the_files_to_the_byte_in_order_of_class_and_name(source, tmp_path):
    found = packed(source, tmp_path / "a.arrow")
    files = [f for part in ("train", "val") for f in sorted((source / part).rglob("*.JPEG"))]
    assert [bytes(found.record(i)) for i in range(len(found))] == [f.read_bytes() for f in files]
    assert [found.name(i) for i in range(len(found))] == [str(f.relative_to(source)) for f in files]
    assert found.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [0, 0, 1, 1, 2, 2]
    assert found.about.splits == {"train": (0, 15), "val": (15, 21)}
    assert found.about.classes == ["ant", "bee", "cat"]
    assert found.about.counts == {"train": [5, 5, 5], "val": [2, 2, 2]}
    assert found.about.encoding == {"kind": "jpeg", "size": 0, "quality": 90}
    assert found.about.source == "folder set" and found.about.shape == (48, 64, 3)


def test_any_arrow_reader_reads_it(source, tmp_path):
    found = packed(source, tmp_path / "a.arrow")
    with pyarrow.memory_map(str(tmp_path / "a.arrow")) as file:
        table = pyarrow.ipc.open_file(file).read_all()
        table.validate(full=True)
        assert table["label"].to_pylist() == found.labels.tolist()
        images = table["image"].to_pylist()
        assert [zlib.crc32(image) for image in images] == table["crc32"].to_pylist()
        assert table["name"].to_pylist() == [found.name(i) for i in range(len(found))]


def test_the_same_source_gives_the_same_bytes_for_any_number_of_threads(source, tmp_path):
    for name, threads in (("a", 1), ("b", 3)):
        packed(source, tmp_path / f"{name}.arrow", Encoding(size=24), threads=threads)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_smaller_jpegs_have_the_shortest_side_asked_for_and_small_ones_stay_untouched(tmp_path):
    root = pictures.folder(tmp_path / "set", each=2, val=1, size=(48, 64))
    tiny = pictures.encoded(99, 20, 30)
    (root / "train/ant/tiny.JPEG").write_bytes(tiny)
    found = packed(root, tmp_path / "a.arrow", Encoding(size=24, quality=95))
    images = {found.name(i): bytes(found.record(i)) for i in range(len(found))}
    assert images["train/ant/tiny.JPEG"] == tiny
    small = decoded(images["train/ant/0.JPEG"], 3)
    assert small.shape == (24, 32, 3)
    reference = Image.fromarray(pictures.pixels(0, 48, 64)).resize((32, 24), Image.BICUBIC)
    assert abs(small.astype(int) - numpy.asarray(reference)).mean() < 4
    assert found.about.shape is None  # 24 x 32 and 20 x 30


def test_a_raw_pack_holds_the_middle_square(source, tmp_path):
    found = packed(source, tmp_path / "a.arrow", Encoding("raw", 16))
    assert found.about.shape == (16, 16, 3)
    pixel = numpy.frombuffer(found.record(0), numpy.uint8).reshape(16, 16, 3)
    whole = Image.open(source / "train/ant/0.JPEG").resize((21, 16), Image.BICUBIC)
    assert abs(pixel.astype(int) - numpy.asarray(whole)[:, 2:18]).mean() < 3


def test_raw_without_a_size_needs_images_of_one_size(source, tmp_path):
    assert packed(source, tmp_path / "a.arrow", Encoding("raw")).about.shape == (48, 64, 3)
    (source / "train/ant/other.JPEG").write_bytes(pictures.encoded(1, 40, 40))
    with pytest.raises(UserError, match="one size, but there are 40 x 40 and 64 x 48: give --size"):
        packed(source, tmp_path / "b.arrow", Encoding("raw"))


def test_a_share_is_held_out_by_hash_where_there_is_no_val(tmp_path):
    root = pictures.folder(tmp_path / "set", each=10, val=0)
    found = packed(root, tmp_path / "a.arrow", val_share=0.2)
    assert found.about.splits == {"train": (0, 24), "val": (24, 30)}
    names = [found.name(i) for i in range(30)]
    assert len(set(names)) == 30 and names[:24] == sorted(names[:24])
    assert names[24:] == sorted(names[24:]) != sorted(names)[24:]
    with pytest.raises(UserError, match="val part of its own"):
        packed(pictures.folder(tmp_path / "two"), tmp_path / "b.arrow", val_share=0.2)
    with pytest.raises(UserError, match="leaves nothing"):
        packed(root, tmp_path / "c.arrow", val_share=0.001)


# --- odd images


def one_odd(tmp_path, name, data):
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    (root / "train/ant" / name).write_bytes(data)
    return root


def stored(tmp_path, name, data, encoding=Encoding()):  # noqa: B008
    found = packed(one_odd(tmp_path, name, data), tmp_path / "a.arrow", encoding)
    return next(
        bytes(found.record(i)) for i in range(len(found)) if found.name(i).endswith("/" + name)
    )


def test_cmyk_becomes_rgb(tmp_path):
    data = pictures.encoded(3, mode="CMYK")
    kept = stored(tmp_path, "odd.JPEG", data)
    assert kept != data
    expected = numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert abs(decoded(kept, 3) - expected).mean() < 4


def test_greyscale_is_kept_and_read_as_colour(tmp_path):
    data = pictures.encoded(3, mode="L")
    assert stored(tmp_path, "odd.JPEG", data) == data
    found = decoded(data, 3)
    assert found.shape == (48, 64, 3) and (found[:, :, 0] == found[:, :, 2]).all()


def test_sixteen_bits_are_read_by_their_upper_eight(tmp_path):
    ramp = (numpy.arange(48 * 64, dtype=numpy.uint16).reshape(48, 64) * 21).astype(numpy.uint16)
    out = io.BytesIO()
    Image.fromarray(ramp).save(out, "PNG")
    kept = stored(tmp_path, "odd.png", out.getvalue(), Encoding(quality=100))
    assert abs(decoded(kept, 1)[:, :, 0].astype(int) - (ramp >> 8)).max() <= 3


def test_exif_rotation_is_ignored_as_everywhere_in_this_field(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = pictures.encoded(3, exif=exif.tobytes())
    assert stored(tmp_path, "odd.JPEG", data) == data
    assert decoded(data, 3).shape == (48, 64, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA", "1"])
def test_a_png_called_jpeg_is_read_for_what_it_is(tmp_path, mode):
    data = pictures.encoded(3, kind="PNG", mode=mode)
    kept = stored(tmp_path, "odd.JPEG", data, Encoding(quality=95))
    assert kept[:2] == b"\xff\xd8"
    expected = numpy.asarray(Image.open(io.BytesIO(data)).convert("RGBA").convert("RGB"))
    assert abs(decoded(kept, 3).astype(int) - expected).mean() < (30 if mode in "1P" else 6)


def test_names_in_any_script_very_long_ones_and_ones_that_are_no_utf8(tmp_path):
    root = pictures.folder(tmp_path / "set", each=1, val=1)
    where = os.fsencode(root / "train/ant")
    names = ["\N{SNOWMAN} f\xfcr".encode() + b".JPEG", b"x" * 250 + b".JPEG", b"\xff\xfe.JPEG"]
    for number, name in enumerate(names):
        with open(os.path.join(where, name), "wb") as file:
            file.write(pictures.encoded(number))
    found = packed(root, tmp_path / "a.arrow")
    assert {found.name(i).split("/")[-1] for i in range(4)} == {
        "0.JPEG", "\N{SNOWMAN} f\xfcr.JPEG", "x" * 250 + ".JPEG", "\\xff\\xfe.JPEG",
    }  # fmt: skip


def test_links_are_followed_and_dangling_ones_are_bad(tmp_path):
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    (root / "train/ant/link.JPEG").symlink_to(root / "train/bee/0.JPEG")
    (root / "train/dog").symlink_to(root / "train/cat")
    found = packed(root, tmp_path / "a.arrow")
    assert found.about.classes == ["ant", "bee", "cat", "dog"] and len(found) == 9 + 3
    (root / "train/ant/dangling.JPEG").symlink_to(root / "nowhere")
    result = packed(root, tmp_path / "b.arrow")
    assert [bad.name for bad in result.bad] == ["train/ant/dangling.JPEG"]
    assert result.bad[0].reason == "No such file or directory"


def test_links_that_lead_to_themselves_are_no_folders(tmp_path):
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    for name in ("train/circle", "train/ant/circle"):
        (root / name).symlink_to("circle")
    origin = open_origin(root)
    assert origin.classes == ["ant", "bee", "cat"] and len(origin.labels) == 6 + 3
    assert any("circle" in note for note in origin.notes)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "set/bee"), "bee.*check its permi"),
        (OSError(errno.EIO, "Input/output error", "set/bee"), "bee cannot be read: Input/output"),
        (OSError("nothing more is known"), "set cannot be read: nothing more"),
    ],
)
def test_folders_that_cannot_be_looked_through_are_named(
    tmp_path, monkeypatch, capsys, mistake, words
):
    root = pictures.folder(tmp_path / "set", each=2, val=1)

    def scandir(path):
        raise mistake

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=words):
        open_origin(root)
    assert main(["pack", str(root), str(tmp_path / "a.arrow")]) == 2
    assert re.search(words, capsys.readouterr().err)


BAD = {
    "truncated.JPEG": pictures.encoded(1)[:-200],
    "empty.JPEG": b"",
    "text.JPEG": b"not a picture",
    "head.JPEG": b"\xff\xd8\xff\xe0 nothing more",
    "half.png": pictures.encoded(1, kind="PNG")[:300],
}


def test_unreadable_images_are_listed_and_no_pack_is_made(tmp_path, capsys):
    root = pictures.folder(tmp_path / "set", each=2, val=1)
    for name, data in BAD.items():
        (root / "train/bee" / name).write_bytes(data)
    out = tmp_path / "a.arrow"
    assert main(["pack", str(root), str(out), "--json"]) == 1
    said = capsys.readouterr()
    assert not out.exists() and "--skip-bad 5" in said.err
    listed = dict(json.loads(said.out.splitlines()[-1])["bad"])
    assert set(listed) == {f"train/bee/{name}" for name in BAD}
    assert listed["train/bee/empty.JPEG"] == "the file is empty"
    assert "Premature end" in listed["train/bee/truncated.JPEG"]
    assert all(name in said.err for name in BAD)

    assert main(["pack", str(root), str(out), "--skip-bad", "4"]) == 1
    assert main(["pack", str(root), str(out), "--skip-bad", "5"]) == 0
    found = Pack(out)
    assert len(found) == 9 and found.about.skipped == 5
    assert found.about.splits == {"train": (0, 6), "val": (6, 9)}
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]


# --- other sources


def test_tiny_imagenets_own_layout(tmp_path):
    root = tmp_path / "tiny"
    for wnid in ("n01", "n02"):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for number in range(2):
            path = root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            path.write_bytes(pictures.encoded(number))
    (root / "val/images").mkdir(parents=True)
    (root / "test/images").mkdir(parents=True)
    for number in range(3):
        (root / f"val/images/val_{number}.JPEG").write_bytes(pictures.encoded(10 + number))
    lines = [f"val_{n}.JPEG\t{'n02' if n < 2 else 'n01'}\t0\t0\t62\t62\n" for n in range(3)]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    found = packed(root, tmp_path / "a.arrow")
    assert found.about.source.startswith("Tiny ImageNet")
    assert found.labels.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert bytes(found.record(6)) == pictures.encoded(12)
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\n")
    with pytest.raises(UserError, match=r"line 1 of .* names no class"):
        open_origin(root)


def tar_of(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize("labels", ["devkit", "text"])
def test_ilsvrc2012_as_it_was_published(tmp_path, labels):
    root = tmp_path / "ilsvrc"
    root.mkdir()
    inner = {
        f"{wnid}.tar": tar_of({f"{wnid}_{n}.JPEG": pictures.encoded(10 * c + n) for n in range(3)})
        for c, wnid in enumerate(["n02", "n01"])
    }
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": pictures.encoded(50 + n) for n in (2, 1)}
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of(val))
    with pytest.raises(UserError, match="has no labels for"):
        open_origin(root)
    if labels == "text":
        (root / "imagenet_2012_validation_synset_labels.txt").write_text("n02\nn01\n")
    else:
        meta, kind = io.BytesIO(), [("ILSVRC2012_ID", "O"), ("WNID", "O")]
        rows = numpy.array([(1, "n02"), (2, "n01")], dtype=kind)
        scipy.io.savemat(meta, {"synsets": rows})
        files = {
            "ILSVRC2012_devkit_t12/data/meta.mat": meta.getvalue(),
            "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n",
        }
        devkit = gzip.compress(tar_of(files))
        (root / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit)
    found = packed(root, tmp_path / "a.arrow")
    assert found.about.classes == ["n01", "n02"]
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert [bytes(found.record(i)) for i in (0, 3, 6, 7)] == [
        pictures.encoded(seed) for seed in (10, 0, 51, 52)
    ]


def test_parquet_as_hugging_face_lays_it_out(tmp_path):
    root = tmp_path / "hf/data"
    root.mkdir(parents=True)
    features = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    for name, labels in (
        ("train-00000-of-00002", [0, 1, 0]),
        ("train-00001-of-00002", [1, 1]),
        ("validation-00000-of-00001", [1, 0]),
        ("test-00000-of-1", [-1]),
    ):
        seeds = [len(name) + n for n in range(len(labels))]
        images = [{"bytes": pictures.encoded(seed), "path": "x"} for seed in seeds]
        table = pyarrow.table({"image": images, "label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
        parquet.write_table(table, root / f"{name}.parquet", row_group_size=2)
    found = packed(tmp_path / "hf", tmp_path / "a.arrow", threads=2)
    assert found.about.classes == ["cat", "dog"]
    assert found.about.splits == {"train": (0, 5), "val": (5, 7)}
    assert found.labels.tolist() == [0, 1, 0, 1, 1, 1, 0]
    assert bytes(found.record(2)) == pictures.encoded(len("train-00000-of-00002") + 2)
    (root / "train-00002.parquet").write_bytes(b"PAR1 damaged PAR1")
    with pytest.raises(UserError, match="is not parquet with columns"):
        open_origin(tmp_path / "hf")


def of_labels(labels, images=None):
    images = [{"bytes": b"x" * 40}] * len(labels) if images is None else images
    return pyarrow.table({"image": images, "label": labels})


MANY = 100_000


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (of_labels(pyarrow.array([], pyarrow.int64()), []), "has no training images with labels"),
        (of_labels(pyarrow.array([None, 1])), "has no training images with labels"),
        (of_labels([1 << 40]), "there is no class 1099511627776"),
        (of_labels([-(1 << 40)]), "has no training images with labels"),
        (of_labels([(1 << 31) - 1]), "there is no class 2147483647"),
        (of_labels([1.5]), "its labels are double, not whole numbers"),
        (
            of_labels([0] * MANY, pyarrow.array([{"bytes": None}] * MANY)),
            "it claims more images than it has bytes",
        ),
    ],
)
def test_parquet_that_lies_is_refused(tmp_path, table, words):
    path = tmp_path / "a.parquet"
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        if len(table):  # otherwise it has not even an empty group of rows
            writer.write_table(table)
    with pytest.raises(UserError, match=words):
        open_origin(path)


@pytest.mark.parametrize(
    "names", [["a.parquet"], ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]]
)
def test_pipes_in_place_of_data_are_not_waited_for(tmp_path, names):
    for name in names:
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError):
        open_origin(tmp_path)


def cifar_rows(seed, count, classes):
    generator = numpy.random.default_rng(seed)
    return (
        generator.integers(0, 256, (count, 3072), numpy.uint8),
        generator.integers(0, classes, count).tolist(),
    )


def as_python_2_pickled(rows, labels):
    """The bytes that Python 2 and the numpy of 2009 wrote: protocol 2, text for bytes."""
    table = {"data": rows, "labels": labels, "batch_label": "x"}
    raw = pickle.dumps(table, protocol=2)
    return raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("archive", [True, False])
def test_cifar_10(tmp_path, version, archive):
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    files, rows, labels = {}, [], []
    for seed, name in enumerate(names):
        some, numbers = cifar_rows(seed, 4, 10)
        rows.append(some)
        labels += numbers
        if version == "binary":
            column = numpy.array(numbers, numpy.uint8)[:, None]
            files[f"{name}.bin"] = numpy.concatenate([column, some], 1).tobytes()
        else:
            files[name] = as_python_2_pickled(some, numbers)
    words = [f"word{n}" for n in range(10)]
    if version == "binary":
        files["batches.meta.txt"] = "\n".join(words).encode()
    else:
        files["batches.meta"] = pickle.dumps({"label_names": words}, protocol=2)
    if archive:
        source = tmp_path / f"cifar-10-{version}.tar.gz"
        source.write_bytes(gzip.compress(tar_of({f"inside/{n}": d for n, d in files.items()})))
    else:
        source = tmp_path / "cifar"
        source.mkdir()
        for name, data in files.items():
            (source / name).write_bytes(data)
    found = packed(source, tmp_path / "a.arrow")
    assert found.about.shape == (32, 32, 3) and found.about.encoding["kind"] == "raw"
    assert found.about.splits == {"train": (0, 20), "val": (20, 24)}
    assert found.labels.tolist() == labels and found.about.classes == words
    expected = numpy.concatenate(rows).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    for index in range(24):
        assert bytes(found.record(index)) == expected[index].tobytes()


def test_cifar_100_has_a_coarse_label_in_front_of_the_fine_one(tmp_path):
    source = tmp_path / "cifar"
    source.mkdir()
    for name in ("train.bin", "test.bin"):
        rows = [bytes([7, 42 + n]) + bytes([n]) * 3072 for n in range(3)]
        (source / name).write_bytes(b"".join(rows))
    found = packed(source, tmp_path / "a.arrow")
    assert found.labels.tolist() == [42, 43, 44] * 2


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_that_would_execute_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "cifar"
    source.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        (source / name).write_bytes(pickle.dumps({"data": Bomb(), "labels": [1]}, protocol=2))
    with pytest.raises(UserError, match=r"no plain CIFAR pickle.*mkdir"):
        open_origin(source)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files(tmp_path, zipped):
    source = tmp_path / "mnist"
    source.mkdir()
    images, labels = {}, {}
    for part, count in (("train", 6), ("t10k", 2)):
        images[part] = numpy.arange(count * 4 * 5, dtype=numpy.uint8).reshape(count, 4, 5)
        labels[part] = numpy.arange(count, dtype=numpy.uint8) % 3
        for what, array in (("images", images[part]), ("labels", labels[part])):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            data = head + array.tobytes()
            name = f"{part}-{what}-idx{array.ndim}-ubyte"
            (source / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    found = packed(source, tmp_path / "a.arrow")
    assert found.about.shape == (4, 5, 1) and len(found.about.classes) == 3
    assert bytes(found.record(7)) == images["t10k"][1].tobytes()
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


# --- interruptions


def test_packing_goes_on_where_it_stopped_and_ends_with_the_same_bytes(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(making, "PART", 4)
    packed(source, tmp_path / "whole.arrow")
    origin = open_origin(source)
    read, count = origin.read, 0

    def stops_at_the_eleventh(index):
        nonlocal count
        count += 1
        if count == 11:
            raise KeyboardInterrupt
        return read(index)

    monkeypatch.setattr(origin, "read", stops_at_the_eleventh)
    with pytest.raises(KeyboardInterrupt):
        pack(origin, "set", tmp_path / "a.arrow", Encoding())
    assert not (tmp_path / "a.arrow").exists() and (tmp_path / "a.arrow.parts").is_dir()
    monkeypatch.setattr(origin, "read", read)
    assert pack(origin, "set", tmp_path / "a.arrow", Encoding()).parts_kept == 2
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "whole.arrow").read_bytes()
    assert not (tmp_path / "a.arrow.parts").exists()


def test_parts_of_other_images_or_settings_and_broken_ones_are_made_again(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(making, "PART", 4)
    (source / "train/cat/bad.JPEG").write_bytes(b"bad")
    out = tmp_path / "a.arrow"
    assert packed(source, out).path is None
    (source / "train/cat/bad.JPEG").unlink()
    (source / "train/ant/0.JPEG").write_bytes(pictures.encoded(77))
    images = tmp_path / "a.arrow.parts/000001.images"
    images.write_bytes(images.read_bytes()[:-1])
    result = pack(open_origin(source), "set", out, Encoding())
    assert result.parts_kept == 1  # of six: 0 changed, 1 broken, 3 and later moved up
    found = Pack(out)
    assert bytes(found.record(0)) == pictures.encoded(77)
    assert verify_pack(out, 1).bad == []


def test_a_part_that_rots_on_disk_is_noticed_before_it_is_joined(source, tmp_path, monkeypatch):
    (source / "train/cat/bad.JPEG").write_bytes(b"bad")
    assert packed(source, tmp_path / "a.arrow").path is None
    images = tmp_path / "a.arrow.parts/000000.images"
    data = bytearray(images.read_bytes())
    data[1000] ^= 1
    images.write_bytes(data)
    with pytest.raises(OSError, match="was damaged while packing"):
        packed(source, tmp_path / "a.arrow", skip_bad=1)
    assert not (tmp_path / "a.arrow").exists()
    assert len(packed(source, tmp_path / "a.arrow", skip_bad=1)) == 21


def test_a_full_disk_is_one_sentence_and_leaves_no_file(source, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "write", full)
    assert main(["pack", str(source), str(tmp_path / "a.arrow")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "goes on from there" in said
    assert not (tmp_path / "a.arrow").exists()
    monkeypatch.undo()
    assert main(["pack", str(source), str(tmp_path / "a.arrow")]) == 0


def test_two_cannot_pack_into_one_file(source, tmp_path):
    with making._locked(tmp_path / "a.arrow.parts"), pytest.raises(UserError, match="another"):
        packed(source, tmp_path / "a.arrow")


def test_killed_while_packing(tmp_path):
    root = pictures.folder(tmp_path / "set", each=40, val=0, size=(300, 400))
    deadline = time.monotonic() + PATIENCE_SECONDS
    for attempt in itertools.count():  # one that is busy elsewhere may see only the end of it
        assert time.monotonic() < deadline
        out = tmp_path / f"{attempt}.arrow"
        command = [sys.executable, "-m", "megabatch.cli", "pack", str(root), str(out),
                   "--size", "200", "--threads", "1"]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(out.parent.glob(f"{out.name}.parts/*.images")):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL and not out.exists():
            break
    assert not out.exists()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    assert verify_pack(out, 1).bad == []


# --- the command's words


def test_it_says_at_once_what_it_reads(tmp_path, capsys):
    """An archive is read whole before its first image is packed."""
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(gzip.compress(tar_of({"inside/data_batch_1.bin": b"short"})))
    assert main(["pack", str(archive), str(tmp_path / "a.arrow")]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.splitlines()[0] == f"reading {archive}"


def test_mistakes_are_one_sentence_each(source, tmp_path, capsys):
    (tmp_path / "there.arrow").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    for arguments, words in (
        ([], "pack needs a source"),
        ([str(source), "a.zip"], "ends with .arrow"),
        ([str(source), str(tmp_path / "no/a.arrow")], "there is no folder"),
        ([str(tmp_path / "no"), str(tmp_path / "a.arrow")], "there is no"),
        (
            [str(tmp_path / "nothing"), str(tmp_path / "a.arrow")],
            "no set of images that is known here",
        ),
        ([str(source), str(tmp_path / "there.arrow")], "exists already"),
        ([str(source), str(tmp_path / "a.arrow"), "--quality", "0"], "--quality is 0"),
        (["--verify", str(tmp_path / "no.arrow")], "there is no file"),
        (["--verify", str(tmp_path / "there.arrow")], "cannot be read as a pack"),
    ):
        assert main(["pack", *arguments]) == 2, arguments
        said = capsys.readouterr().err
        *before, last = said.splitlines()
        assert words in last and all(line.startswith("looking through") for line in before), said


def test_verify_reads_every_byte(source, tmp_path, capsys):
    out = tmp_path / "a.arrow"
    found = packed(source, out)
    assert main(["pack", "--verify", str(out), "--json"]) == 0
    said, result = capsys.readouterr().out.splitlines()
    assert said == f"{out}: all 21 images are good"
    assert json.loads(result)["images"] == 21
    good = out.read_bytes()
    place = good.find(bytes(found.record(3)))
    for at, words in (
        (place + 100, "train/ant/3.JPEG is damaged"),
        (len(good) - 40, "Arrow frame"),
    ):
        data = bytearray(good)
        data[at : at + 8] = b"damaged!"
        out.write_bytes(data)
        assert main(["pack", "--verify", str(out)]) == 1
        assert words in capsys.readouterr().err


# --- damage


def mutations(data, count, seed):
    """Flipped bits, overwritten and zeroed stretches, cuts, repeats and foreign bytes."""
    random_ = random.Random(seed)
    for _ in range(count):
        found = bytearray(data)
        # Half of the blows fall on the head, the index and the footer, which are small.
        at = random_.randrange(len(found)) if random_.random() < 0.5 else random_.choice(
            [random_.randrange(4096), len(found) - 1 - random_.randrange(4096)]
        )  # fmt: skip
        at = min(max(at, 0), len(found) - 1)
        length = random_.choice([1, 4, 64, 1000])
        kind = random_.randrange(6)
        if kind == 0:
            found[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            found[at : at + length] = random_.randbytes(len(found[at : at + length]))
        elif kind == 2:
            found[at : at + length] = bytes(len(found[at : at + length]))
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = found[at : at + length]
        else:
            del found[at : at + length]
        yield bytes(found)


def test_500_mutated_packs_are_refused_or_read_right(tmp_path):
    root = pictures.folder(tmp_path / "set", each=4, val=2, size=(16, 24))
    path = tmp_path / "a.arrow"
    found = packed(root, path)
    right = [(bytes(found.record(i)), int(found.labels[i])) for i in range(len(found))]
    data, refused, read = path.read_bytes(), 0, 0
    mutated = tmp_path / "mutated.arrow"
    for change in mutations(data, 500, seed=5):
        mutated.write_bytes(change)
        try:
            pack_ = Pack(mutated)
        except PackError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        for index, image in enumerate(right):
            try:
                assert (bytes(pack_.record(index)), int(pack_.labels[index])) == image
                read += 1
            except PackError as error:
                assert "checksum" in str(error)
                refused += 1
    assert refused > 300 and read > 100


def test_500_mutated_jpegs_are_refused_or_read_whole(tmp_path):
    """In a folder nothing but the JPEG itself can tell: a picture of the right size or a
    reason."""
    from megabatch.data.jpeg import BadImage, head_of

    outcomes = {"read": 0, "refused": 0}
    for change in mutations(pictures.encoded(3, 64, 80), 500, seed=6):
        try:
            height, width, _ = head_of(change)
            assert decoded(change, 3).shape == (height, width, 3)
            decoded(change, 1, factor=8)
            outcomes["read"] += 1
        except BadImage as error:
            assert str(error) and "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_a_pack_of_a_later_format_says_so(source, tmp_path):
    path = tmp_path / "a.arrow"
    packed(source, path)
    data = path.read_bytes().replace(b"megabatch pack 1 ", b"megabatch pack 2 ")
    path.write_bytes(data)
    with pytest.raises(PackError, match="newer than this megabatch reads"):
        Pack(path)


# --- size


def sparse_pack(path, images, each):
    """A pack of many large images of zeros, which take no room on disk."""
    zeros = zlib.crc32(bytes(each))
    index = Index(
        sizes=numpy.full(images, each, numpy.int64),
        labels=numpy.arange(images, dtype=numpy.int32) % 10,
        crcs=numpy.full(images, zeros, numpy.uint32),
        names=["x"] * images,
    )
    about = About(
        source="zeros",
        encoding={"kind": "raw", "size": 0},
        shape=(each // 3, 1, 3),
        classes=[str(n) for n in range(10)],
        splits={"train": (0, images - 10), "val": (images - 10, images)},
        counts={},
    )

    def skip_over(file):
        file.seek(images * each, os.SEEK_CUR)

    with open(path, "wb") as file:
        writing.write(file, about, index, skip_over)


# What a process and those it started hold beside mapped files, in bytes.
MEMORY = """
import os, pathlib

def held(process):
    lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    said = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return sum(int(said[name]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024

def family(process):
    below = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return held(process) + sum(family(child) for child in below)
"""


@pytest.mark.systems
def test_a_million_large_images_need_little_memory(tmp_path):
    """In a process of its own, with processes that decode for it: what all of them hold."""
    sparse_pack(tmp_path / "a.arrow", 1_000_000, 3 * 12_000)
    assert (tmp_path / "a.arrow").stat().st_size > 36e9
    script = f"""{MEMORY}
import torch
from megabatch.config import Config, Data
from megabatch.cluster import Cluster
from megabatch.batch import Step
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
before = held(os.getpid())
data = Data(path={str(tmp_path / "a.arrow")!r}, size=8, channels=3, threads=2)
config = Config(batch=64, micro=32, data=data, epochs=20).check()
train, val = open_sources(config)
loader = StepLoader(train, val, config, Cluster.from_env(device="cpu"), torch.float32)
assert loader.readers == "processes"
for step in range(8):
    for micro in loader.micro_batches(Step(step, 64 * step + 10**6, 64, 1.0, 0)):
        assert micro.images.shape == (32, 3, 8, 8)
print(family(os.getpid()) - before)
loader.close()
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 512 << 20


def peak_of_packing(root, out):
    """Of a process that packs: the most memory it had, in bytes."""
    script = f"""
from pathlib import Path
from megabatch.cli import main
assert main(["pack", {str(root)!r}, {str(out)!r}]) == 0
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.systems
def test_packing_a_million_images_would_take_less_than_a_gigabyte(tmp_path):
    """By what thousands more of them take, of names as long as ImageNet's."""
    peaks = []
    (tmp_path / "one.JPEG").write_bytes(pictures.encoded(1, 24, 32))
    for count in (1_000, 11_000):
        root = tmp_path / f"set{count}"
        for part, images in (("train", count), ("val", 1)):
            folder = root / part / "n01440764"
            folder.mkdir(parents=True)
            for number in range(images):
                os.link(tmp_path / "one.JPEG", folder / f"n01440764_{number}.JPEG")
        peaks.append(peak_of_packing(root, tmp_path / f"{count}.arrow"))
    each = max(0, peaks[1] - peaks[0]) / 10_000
    assert peaks[0] + 1_281_167 * each < 1 << 30, (peaks, each)


@pytest.mark.systems
def test_packing_large_images_keeps_few_of_them_in_memory(tmp_path):
    """40 pictures of 12 million pixels would be 1.4 GB decoded; a few at a time are."""
    picture = pictures.encoded(1, 3000, 4000)
    for part, images in (("train", 40), ("val", 1)):
        folder = tmp_path / "set" / part / "ant"
        folder.mkdir(parents=True)
        for number in range(images):
            (folder / f"{number}.JPEG").write_bytes(picture)
    assert peak_of_packing(tmp_path / "set", tmp_path / "a.arrow") < 1 << 30
