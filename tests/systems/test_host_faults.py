"""A host is lost and a link is cut under a run of torchrun's, in emulated hosts: it ends by itself,
bit for bit as undisturbed, every step taken once.

Needs root; iproute2 is installed if it is missing. results/faults has many more of them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import faults_hosts

pytestmark = [pytest.mark.systems, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def iproute2():
    if shutil.which("tc") is None:
        subprocess.run(["apt-get", "install", "-y", "-q", "iproute2"], check=True)


def test_a_lost_host_and_a_cut_link_leave_a_run_as_it_was(tmp_path):
    (run,) = faults_hosts.trial(tmp_path, losses=1, cuts=1, count=3, epochs=5, seed=SEED, a_run=2)
    assert run.wrong is None
    assert sorted(fault.split()[2] for fault in run.struck) == ["cut", "lost"]
    assert not any(fault.startswith("host 0 ") for fault in run.struck)
    assert run.relaunched == 0 and max(run.worlds) == 3 and min(run.worlds) < 3


SEED = 3
"""neither is of the host that the others meet by"""
