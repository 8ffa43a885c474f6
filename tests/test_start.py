"""What a run must not import: torch's compiler alone takes seconds of every worker's start."""

import subprocess
import sys

RUN = """
import sys
import megabatch as mb
from dataclasses import replace

config = replace(mb.recipes.digits(), deterministic={deterministic})
mb.train(config.resized(epochs=0.1), quiet=True, out={out!r})
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
assert not heavy, heavy
"""


def test_a_run_does_not_import_the_compiler(tmp_path):
    for deterministic in (False, True):
        out = str(tmp_path / str(deterministic))
        code = RUN.format(deterministic=deterministic, out=out)
        subprocess.run([sys.executable, "-c", code], check=True)
