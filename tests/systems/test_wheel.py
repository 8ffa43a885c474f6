"""What pip gives: the wheel, made from the sdist, in an environment that holds nothing else.

Needs a package index (or a folder of wheels) that pip knows, and a few minutes.
"""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import megabatch

pytestmark = [pytest.mark.systems, pytest.mark.timeout(1800)]

ROOT = Path(megabatch.__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist): `build` makes the wheel out of the sdist, so what that lacks would be
    missed."""
    out = tmp_path_factory.mktemp("dist")
    environ = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, ROOT],
        check=True, env=environ, stdout=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of an empty environment into which the wheel was installed, and how to run
    there."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "venv", with_pip=True)
    bin_folder = home / "venv" / "bin"
    environ = {
        name: v for name, v in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environ |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(home)}
    pip = [bin_folder / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{built[0]}[demo]"], check=True, env=environ, timeout=900)
    return bin_folder, environ


def run(installed, folder, *words):
    return subprocess.run(
        [installed[0] / "megabatch", *map(str, words)],
        capture_output=True, text=True, cwd=folder, env=installed[1], timeout=300,
    )  # fmt: skip


def test_the_wheel_holds_every_module_and_the_licence(built):
    with zipfile.ZipFile(built[0]) as wheel:
        held = set(wheel.namelist())
        (about,) = (n for n in held if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(about).decode())
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "megabatch").rglob("*.py")}
    assert {n for n in held if n.endswith(".py")} == here
    assert "megabatch/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert metadata["Version"] == megabatch.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(metadata.get_all("Provides-Extra")) == set(extras)


def test_the_sdist_can_be_tested_and_holds_no_litter(built):
    with tarfile.open(built[1]) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    for name in (
        "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "docs/README.md",
        "tests/conftest.py", "tests/systems/test_wheel.py", "scripts/install-systems.sh",
    ):  # fmt: skip
        assert name in held, name
    assert not [
        name for name in held if "__pycache__" in name or name.startswith((".venv", "runs/"))
    ]


def test_the_demo_trains_where_nothing_else_is_installed(installed, tmp_path):
    result = run(installed, tmp_path, "train", "digits", "--epochs", "4", "--workers", "2",
                 "--device", "cpu", "--out", "run", "--json")  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["ended"] == "finished" and summary["top1"] > 0.3
    for words in (["report", "run"], ["runs", "."], ["watch", "run"], ["export", "run"]):
        result = run(installed, tmp_path, *words)
        assert result.returncode == 0, (words, result.stderr)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "report.html", "run.safetensors"}


def test_what_an_extra_brings_is_named_where_it_is_missing(installed, tmp_path):
    run(installed, tmp_path, "train", "digits", "--epochs", "1", "--workers", "1",
        "--device", "cpu", "--out", "run")  # fmt: skip
    result = run(installed, tmp_path, "export", "run", "--to", "onnx")
    assert result.returncode == 2 and "pip install 'megabatch[export]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_version_is_told_and_is_one(installed, tmp_path):
    result = run(installed, tmp_path, "--version")
    assert result.stdout == f"megabatch {megabatch.__version__}\n"
