"""Every kernel compiles, to the end, for Hopper and Blackwell, on a machine without a GPU: with the
arguments that its tests give it. What the interpreter takes Triton's compiler may refuse."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch

pytest.importorskip("triton", reason="Triton is not installed: no kernel was compiled")

pytestmark = [pytest.mark.systems, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PACKAGE = Path(megabatch.__file__).parent
CAPABILITIES = (90, 100)
RESIZED = """
import pytest, torch

@pytest.mark.parametrize("channels", [1, 3])
def test_resize(channels):
    from megabatch.kernels.resize import resize_boxes, resize_crops

    resize_crops(torch.zeros(2, 300, dtype=torch.uint8), torch.ones(2, 2), 16, channels)
    images = torch.zeros(2, 8, 8, channels, dtype=torch.uint8)
    resize_boxes(images, torch.arange(2), torch.ones(2, 4), 16)
"""


class Unasserted(ast.NodeTransformer):
    """What is asserted is computed all the same: it may launch a kernel."""

    def visit_Assert(self, node):
        return ast.copy_location(ast.Expr(node.test), node)


def launched():
    """The functions of Triton's that a host calls."""
    found = set()
    for path in (PACKAGE / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        kernels = {
            each.name
            for each in tree.body
            if isinstance(each, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(mark) for mark in each.decorator_list)
        }
        calls = [each.func for each in ast.walk(tree) if isinstance(each, ast.Call)]
        names = {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}
        found |= {f"megabatch.kernels.{path.stem}.{name}" for name in kernels & names}
    return found


def test_every_kernel_compiles_for_chips_that_are_not_here(tmp_path):
    tests = Unasserted().visit(ast.parse((HERE.parent / "test_fused_kernels.py").read_text()))
    (tmp_path / "test_launches.py").write_text(ast.unparse(tests))
    (tmp_path / "test_resize.py").write_text(RESIZED)
    running = []
    for capability in CAPABILITIES:
        environ = {
            **os.environ,
            "CAPABILITY": str(capability),
            "FOUND": str(tmp_path / f"{capability}.json"),
            "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, HERE.parent, HERE))),
            "TRITON_CACHE_DIR": str(tmp_path / f"cache-{capability}"),
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, "-m", "pytest", "-q", "-p", "compiling", "-p", "no:cacheprovider"]
        line += ["--assert=plain", "-c", os.devnull, "--rootdir", tmp_path, tmp_path]
        running.append(
            subprocess.Popen(
                line,
                cwd=tmp_path,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    ended = [(process.communicate()[0], process.returncode) for process in running]
    for capability, (said, status) in zip(CAPABILITIES, ended, strict=True):
        assert status == 0, said
        found = json.loads((tmp_path / f"{capability}.json").read_text())
        assert set(found) == launched()
