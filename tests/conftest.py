"""Many small processes share the machine's cores here: one thread each, and nobody is timed. And
what several files of tests begin with."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from megabatch import launch

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # no GPU: kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

from run_folders import Outside, real_run  # not before Triton is told

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: what fails here fails again. With --hypothesis-profile new they are
# drawn anew.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True)
settings.load_profile("same")

# DDP and torch's optimizers import the compiler, and files of tests import pytest: once, and not in
# each worker that is forked.
launch.PRELOAD += ["torch._dynamo", "pytest"]


def pytest_collection_finish():
    """What is imported and collected now stays: who collects garbage need not walk over a million
    objects of it each time. Of what tests leave behind nothing is hidden."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def short_tmp():
    """A folder for a process's temporary files: sockets' names in it are short."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as path:
        yield Path(path)
