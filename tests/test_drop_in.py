"""The examples: everybody's loops with our pieces in them, on one worker and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LINES = {
    "ddp_loop.py": [*TORCHRUN, "ddp_loop.py"],
    "ddp_loop.py alone": ["ddp_loop.py"],
    "accelerate_loop.py": [*TORCHRUN, "accelerate_loop.py"],
    "lightning_loop.py": ["lightning_loop.py", "2"],
}
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def run(line):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *line], cwd=EXAMPLES, capture_output=True, text=True, env=environ
    )


@pytest.mark.systems
@pytest.mark.parametrize("which", LINES)
def test_the_loop_learns(which):
    done = run(LINES[which])
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6, done.stdout
    assert losses[-1] < 1.0 < losses[0] or losses[-1] < losses[0] / 2, losses


@pytest.mark.parametrize("file", sorted({line.split()[0] for line in LINES}))
def test_twenty_lines_of_ours_at_most(file):
    lines = (EXAMPLES / file).read_text().splitlines()
    ours = [line for line in lines if "# megabatch" in line]
    assert 5 <= len(ours) <= 20
    # What is ours is marked: no other line uses the package but for a model to have one.
    for line in lines:
        if "mb." in line and "# megabatch" not in line:
            assert re.search(r"mb\.(models\.build|Data|Loader\b|Cluster\b)", line), line
