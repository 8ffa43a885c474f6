"""Many small processes share the machine's cores here: one thread each."""

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # no GPU: kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
