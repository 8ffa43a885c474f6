"""The compilers that kernels need while a run begins: Triton's on a GPU, torch.compile's on a CPU.

Like the rest they are tried: a small file is compiled against Python's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from megabatch import kernels
from megabatch.doctor.child import first_line
from megabatch.doctor.finding import Finding, FindingState

PART = "compiler"
GET = "apt-get install g++, and python3-dev for the system's own Python"
_LEFT_OUT = "kernels of our own and torch.compile are left out: torch's kernels run instead, slower"


def check_compiler(facts: dict[str, Any]) -> Finding:
    if facts["error"]:
        return Finding(PART, "missing", "not tried without torch")
    if facts["gpus"]:
        return _for_triton()
    cxx = os.environ.get("CXX") or shutil.which("g++")
    state: FindingState = "limited" if cxx else "missing"
    trouble = _trouble(cxx, ".cpp") if cxx else "no C++ compiler"
    if trouble:
        costs = "only --compile always: the net then runs as it is, as it does by default"
        return Finding(PART, state, trouble, costs, GET)
    return Finding(PART, "works", f"{cxx} compiles, for --compile always")


def _for_triton() -> Finding:
    if lacking := kernels.lacking():
        remedy = GET if kernels.installed() else "pip install triton"
        return Finding(PART, "limited", lacking, _LEFT_OUT, remedy)
    cc = kernels.c_compiler()
    assert cc is not None, "Triton lacks nothing"
    if trouble := _trouble(cc, ".c"):
        return Finding(PART, "limited", trouble, "the first of Triton's kernels fails", GET)
    return Finding(PART, "works", f"{cc} compiles, for Triton's kernels")


def _trouble(compiler: str, suffix: str) -> str:
    """Why a file that includes Python.h cannot be made a library; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"small{suffix}")
        source.write_text("#include <Python.h>\nint small(void) { return 0; }\n")
        headers = f"-I{kernels.python_headers()}"
        library = source.with_suffix(".so")
        command = [compiler, str(source), "-shared", "-fPIC", headers, "-o", str(library)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {first_line(error)}"
    errors = (line for line in done.stderr.splitlines() if "error" in line.lower())
    return f"{compiler} fails: {next(errors, first_line(done.stderr))}" if done.returncode else ""
