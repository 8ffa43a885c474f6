"""MLPerf's own checker accepts the log of a run, under the open rules that have a ResNet."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.systems, pytest.mark.timeout(600)]
RULES = "4.0.0"


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    """The checker in a folder of its own; of what it asks for, it needs yaml alone for this."""
    folder = tmp_path_factory.mktemp("mlperf")
    install = ["pip", "install", "--quiet", "--no-deps", "--target", folder, "mlperf-logging"]
    subprocess.run([sys.executable, "-m", *map(str, install)], check=True)
    inherited = os.environ.get("PYTHONPATH", "")
    environ = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{inherited}"}

    def check(log):
        line = ["-m", "mlperf_logging.compliance_checker", "--usage", "training"]
        line += ["--ruleset", RULES, "--log_output", folder / "said.log", log]
        return subprocess.run(
            [sys.executable, *map(str, line)], env=environ, capture_output=True, text=True
        )

    return check


def test_the_checker_accepts_a_run(checker, tmp_path):
    line = ["train", "digits", "--epochs", "2", "--workers", "2", "--device", "cpu"]
    line += ["--log-mlperf", "--out", tmp_path / "run"]
    subprocess.run([sys.executable, "-m", "megabatch.cli", *map(str, line)], check=True)
    log = tmp_path / "run" / "mlperf.log"
    said = checker(log)
    assert said.returncode == 0 and "SUCCESS" in said.stderr, said.stdout + said.stderr

    # And it is strict: a log without a needed line is refused.
    lines = log.read_text().splitlines(keepends=True)
    for missing in ("eval_accuracy", "run_stop", "train_samples"):
        poor = tmp_path / "poor.log"
        poor.write_text("".join(one for one in lines if f'"{missing}"' not in one))
        assert checker(poor).returncode != 0, missing
