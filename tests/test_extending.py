"""docs/extending.md: each diff changes one file, applies to the package, and does its work."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

import megabatch
from megabatch.errors import UserError, WorkerFailed
from megabatch.launch import run_local

PACKAGE = Path(megabatch.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(part, kind):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


def run(command, where, text=None):
    found = subprocess.run(
        command,
        cwd=where,
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(where)},
        timeout=PATIENCE_SECONDS,
    )
    assert found.returncode == 0, found.stderr + found.stdout
    return found


def test_these_are_extensions_of_one_file():
    assert list(EXAMPLES) == [
        "An all-reduce", "A wiring", "A model", "An optimiser", "An origin", "A fused kernel",
    ]  # fmt: skip
    for part in EXAMPLES.values():
        (diff,) = blocks(part, "diff")
        assert len(re.findall(r"^\+\+\+ ", diff, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_worked_example_works(name, tmp_path):
    if name == "A fused kernel":
        pytest.importorskip("triton", reason="Triton is not installed: no kernel was tried")
    shutil.copytree(PACKAGE, tmp_path / "megabatch", ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = blocks(EXAMPLES[name], "diff")
    # Lines may have moved, what they say may not.
    run(["git", "apply", "--unidiff-zero", "-"], tmp_path, diff)
    # One process for all of it: torch is loaded once.
    code = [
        f"import megabatch; assert megabatch.__file__.startswith({str(tmp_path)!r})",
        *blocks(EXAMPLES[name], "python"),
        "from megabatch.cli import main",
    ]
    for line in "".join(blocks(EXAMPLES[name], "")).splitlines():
        _, *words = shlex.split(line)
        code.append(f"assert main({words!r}) == 0")
    run([sys.executable, "-c", "\n".join(code)], tmp_path)


def test_the_examples_are_not_there_already():
    """Without its diff an example fails: what it shows is the diff's work."""
    for name in EXAMPLES.keys() - {"An origin"}:
        code = "\n".join(blocks(EXAMPLES[name], "python"))
        with pytest.raises((UserError, WorkerFailed)):
            run_local(1, exec, code, {})
