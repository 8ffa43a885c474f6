"""The command as tests give it: in this process, which has torch already, or in one of its own."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from subprocess import CompletedProcess

from waiting import PATIENCE_SECONDS

from megabatch.cli import main

MEGABATCH = [sys.executable, "-m", "megabatch.cli"]


def megabatch(*arguments, cwd=None):
    """What `megabatch ...` returns and prints. Local workers are processes all the same; what they
    print themselves is not caught here."""
    words, out, err = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or os.getcwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(words)
        except SystemExit as end:  # of a verb's --help
            status = end.code
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())


def megabatch_process(*arguments, cwd=None, **options):
    """The same by a process of its own, workers' words and all."""
    words = [*MEGABATCH, *map(str, arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, timeout=PATIENCE_SECONDS, **options
    )


def at_terminal(*arguments, cwd=None, columns=80):
    """The lines that it writes to a terminal so wide, without colours."""
    ours, theirs = pty.openpty()
    environ = {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}
    words = [*MEGABATCH, *map(str, arguments)]
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs) as end:
        process = subprocess.Popen(words, stdout=end, cwd=cwd, env=os.environ | environ)
        end.close()
        found = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while some := terminal.read(1 << 16):
                found += some
    assert process.wait(PATIENCE_SECONDS) == 0
    return found.decode().splitlines()


def last_json(result, status=0):
    assert result.returncode == status, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
