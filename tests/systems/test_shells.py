"""Completion in the shells themselves: zsh and fish offer what they should."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.systems


def script(shell):
    line = [sys.executable, "-m", "megabatch.cli", "completion", shell]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("megabatch tra", "train"), ("megabatch train mik", "mikami2018"),
     ("megabatch train digits --data.si", "--data.size")],
)  # fmt: skip
def test_fish_completes(tmp_path, typed, offered):
    (tmp_path / "m.fish").write_text(script("fish"))
    line = ["fish", "--command", f"source {tmp_path}/m.fish; complete --do-complete '{typed}'"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert offered in done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("tra", "train"), ("train mik", "mikami2018"), ("train digits --data.si", "--data.size")],
)
def test_zsh_completes(tmp_path, typed, offered):
    """compadd is asked what it was given, without a terminal to complete in."""
    asked = f"""
    {script("zsh")}
    compadd() {{ shift; print -l -- "$@" }}
    _files() {{ }}
    words=(megabatch {typed}); CURRENT=$#words
    _megabatch
    """
    (tmp_path / "asked.zsh").write_text(asked)
    done = subprocess.run(["zsh", "-f", tmp_path / "asked.zsh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()
