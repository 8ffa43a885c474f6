"""Many small processes share the machine's cores here: one thread each, and nobody is timed."""

import os
import shutil

from hypothesis import HealthCheck, settings

from megabatch import launch

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # no GPU: kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

# The same examples every time: what fails here fails again. With --hypothesis-profile new they are
# drawn anew.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True)
settings.load_profile("same")

# DDP and torch's optimizers import the compiler: once, and not in each worker that is forked.
launch._PRELOAD.append("torch._dynamo")
