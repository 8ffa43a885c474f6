"""Many small processes share the machine's cores here: one thread each. And what several files of
tests begin with."""

import os
import shutil

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # no GPU: kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

from run_folders import Outside, real_run  # not before Triton is told


@pytest.fixture(scope="module")
def outside():
    """Finds what is written elsewhere than where it is allowed."""
    watching = Outside()
    yield watching
    watching.allowed = None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a real run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    real_run(out, keep=1, ema=0.9)
    return out
