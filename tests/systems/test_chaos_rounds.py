"""A short chaos of the real job: workers killed, stopped and delayed, checkpoints damaged, the disk
filled, on a schedule from a seed; the end is bit for bit that of the undisturbed run."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(1500)]


def test_a_job_under_fire_ends_as_if_nothing_had_happened():
    ran = subprocess.run(
        [sys.executable, "-m", "megabatch.cli", "chaos", "digits", "--seed", "7", "--rounds", "3",
         "--faults", "3", "--epochs", "2", "--workers", "3", "--json"],
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["rounds"], found["equal"]) == (3, 3)
    assert found["faults"] >= 8  # the last may be due when the run is over
    assert len(found["kinds"]) >= 6
