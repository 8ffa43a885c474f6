"""Commands whose standard streams are closed, full, of few letters, or left by who read them."""

import os
import subprocess
import sys

import pytest

from megabatch.host.streams import Outlived

MEGABATCH = f"exec {sys.executable} -m megabatch.cli"
PREPARED = "import os, sys; from megabatch.host.streams import prepare; prepare(); "


def shell(line, **environ):
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=os.environ | environ
    )


def test_closed_streams_are_no_error(tmp_path):
    done = shell(f"{MEGABATCH} runs {tmp_path} <&- >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{MEGABATCH} runs {tmp_path}/none <&- >&- 2>&-")
    assert (done.returncode, done.stderr) == (2, "")


def test_a_file_never_takes_the_place_of_a_closed_stream():
    code = PREPARED + "sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    assert shell(f"exec {sys.executable} -c '{code}' <&- >&- 2>&-").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["--help", "runs .", "doctor --help"])
def test_a_result_that_cannot_be_written_is_one_sentence(verb, unbuffered):
    done = shell(f"{MEGABATCH} {verb} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert "cannot be written (No space left on device)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_letters_that_a_stream_does_not_have_are_written_out():
    code = PREPARED + 'print("caf\\u00e9")'
    done = shell(f"{sys.executable} -c '{code}'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\n")


@pytest.mark.parametrize("where", ["/dev/full", "| true"])
def test_progress_that_nobody_hears_is_no_error(where, tmp_path):
    """Said more than once, and by print: the second time nothing is left of the first."""
    code = PREPARED + "[print('how far', file=sys.stderr, flush=True) for _ in range(99)]"
    code += f"; open({str(tmp_path / 'done')!r}, 'w')"
    (tmp_path / "code.py").write_text(code)
    redirected = f"2>&1 {where}" if where.startswith("|") else f"2>{where}"
    done = shell(f"{sys.executable} {tmp_path / 'code.py'} {redirected}", PYTHONPATH=os.getcwd())
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "done").exists()


def test_a_stream_is_as_it_was_until_it_is_lost():
    reader, writer = os.pipe()
    with open(writer, "w", buffering=1) as stream:
        outlived = Outlived(stream)
        print("heard", file=outlived)
        assert os.read(reader, 100) == b"heard\n"
        assert outlived.fileno() == writer
        assert not outlived.isatty()
        os.close(reader)
        print("not heard", file=outlived)
        outlived.flush()
