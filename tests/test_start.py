"""What a run must not import: torch's compiler alone takes seconds of every worker's start."""

import subprocess
import sys

RUN = """
import sys
import megabatch as mb
from dataclasses import replace

for deterministic in (False, True):
    config = replace(mb.recipes.digits(), deterministic=deterministic)
    mb.train(config.resized(epochs=0.1), quiet=True, out=f"{deterministic}")
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
assert not heavy, heavy
"""


def test_a_run_does_not_import_the_compiler(tmp_path):
    subprocess.run([sys.executable, "-c", RUN], check=True, cwd=tmp_path)
