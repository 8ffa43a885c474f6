"""What stands beside the code: one version, a licence, files that the container file copies."""

import re
import tomllib
from pathlib import Path

import megabatch
from megabatch.cli import VERBS

ROOT = Path(megabatch.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once_and_told_alike():
    assert PROJECT["project"]["dynamic"] == ["version"]
    told = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert told == {"attr": "megabatch.version.__version__"}
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert cited == newest == megabatch.__version__


def test_the_licence_is_apaches_whole_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert [n for n in range(1, 10) if re.search(rf"^   {n}\. ", text, re.MULTILINE)] == [
        *range(1, 10)
    ]
    assert "END OF TERMS AND CONDITIONS" in text


def test_what_the_container_copies_is_there():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert "megabatch" in copied
    for name in copied:
        assert (ROOT / name).exists(), name


def test_the_container_installs_extras_that_exist_and_what_triton_compiles_with():
    text = (ROOT / "Containerfile").read_text()
    (extras,) = re.findall(r"megabatch-\*\.whl\)\[([\w,]+)\]", text)
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
    assert "install --yes --no-install-recommends g++" in text
    # What its comments tell to type names verbs that exist.
    told = re.findall(r"^#   (?:podman|docker) run .* megabatch (\w+)", text, re.MULTILINE)
    assert told and {*told} <= {*VERBS}
    # With its registry: podman asks, or refuses, where a short name may mean several.
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(base.startswith("docker.io/library/") for base in bases)


def test_the_container_is_built_from_what_git_holds():
    """Neither an environment nor what Python caches goes to the builder."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", ".git", "runs", "**/__pycache__"} <= {*ignored}


def test_every_dependency_is_pinned_for_tests():
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(name for names in extras.values() for name in names),
    ]
    assert {re.split(r"[<>=\[ ]", name)[0] for name in wanted} <= pinned
    everywhere = {name for extra in ("demo", "export") for name in extras[extra]}
    assert everywhere <= set(extras["dev"])
