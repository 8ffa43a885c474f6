"""Many small processes share the machine's cores here: one thread each."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
