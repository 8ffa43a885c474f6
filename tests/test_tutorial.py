"""The tutorial's commands, one after the other, on small images of the same kinds."""

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy
import pictures
import pytest
from test_docs import ROOT, commands

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [words for words in commands(TUTORIAL) if words[0] == "megabatch"]


def cifar(path, each=48):
    """An archive of CIFAR-10's binary version, with few images in each batch."""
    generator = numpy.random.default_rng(0)
    with tarfile.open(path, "w:gz") as archive:
        for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
            rows = generator.integers(0, 256, (each, 3073), dtype=numpy.uint8)
            rows[:, 0] = numpy.arange(each) % 10
            put(archive, f"cifar-10-batches-bin/{name}", rows.tobytes())
        names = "\n".join(f"class{n}" for n in range(10))
        put(archive, "cifar-10-batches-bin/batches.meta.txt", names.encode())


def put(archive, name, data):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def fashion(folder):
    folder.mkdir()
    generator = numpy.random.default_rng(1)
    for part, count in (("train", 200), ("t10k", 40)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=numpy.uint8)
        labels = (numpy.arange(count) % 10).astype(numpy.uint8)
        for kind, head, values in (
            ("images-idx3", (2051, count, 28, 28), images),
            ("labels-idx1", (2049, count), labels),
        ):
            data = numpy.array(head, dtype=">i4").tobytes() + values.tobytes()
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))


def smaller(words):
    """The same command for little time: an epoch, one worker, a batch of what there is."""
    given = {"--epochs": "1", "--workers": "1", "--batch": "64"}
    before = ["", *words]
    return [given.get(last, word) for last, word in zip(before, words, strict=False)]


@pytest.mark.timeout(900)
@pytest.mark.systems
def test_the_tutorial_from_beginning_to_end(tmp_path):
    pictures.folder(tmp_path / "pictures", classes=("ant", "bee"), each=40, val=4)
    assert (tmp_path / "pictures" / "val" / "ant").is_dir()
    some = next((tmp_path / "pictures" / "val" / "ant").iterdir())
    some.rename(some.with_name("0.jpg"))
    cifar(tmp_path / "cifar-10-binary.tar.gz")
    fashion(tmp_path / "fashion-mnist")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
    assert len(COMMANDS) >= 14
    for words in COMMANDS:
        line = [sys.executable, "-m", "megabatch.cli", *smaller(words[1:])]
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        assert "Traceback" not in done.stderr
        assert max(map(len, done.stdout.splitlines()), default=0) < 400
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("pictures", "cifar10", "fashion"))
    assert {path.name for path in tmp_path.glob("*.arrow")} == {
        "pictures.arrow", "cifar10.arrow", "fashion.arrow",
    }  # fmt: skip


def test_pages_that_it_leads_to_are_there():
    for target in re.findall(r"\]\(([\w.-]+\.md)\)", TUTORIAL):
        assert (Path(ROOT) / "docs" / target).is_file()
