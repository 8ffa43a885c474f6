"""The script of `megabatch launch --hosts`, between two hosts: namespaces with an sshd each.

Needs root, iproute2 and openssh-server, which scripts/install-systems.sh installs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import hosts  # noqa: E402

pytestmark = [pytest.mark.systems, pytest.mark.timeout(600)]

MEGABATCH = [sys.executable, "-m", "megabatch.cli"]
TRAIN = ["train", "digits", "--deterministic"]
SETTINGS = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """
Host *
    IdentityFile {folder}/key
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two hosts that can log in at each other: their names, addresses and the words for ssh."""
    folder = tmp_path_factory.mktemp("ssh")
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert sshd, "sshd is missing: scripts/install-systems.sh installs it"
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (folder / "client").write_text(CLIENT.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, empty, to be in before a login
    with contextlib.ExitStack() as ending:
        names = ending.enter_context(hosts.hosts(2, "1gbit"))
        addresses = [hosts.address(index) for index in range(2)]
        for name, address in zip(names, addresses, strict=True):
            settings = folder / f"sshd-{name}"
            settings.write_text(SETTINGS.format(address=address, folder=folder))
            log = ending.enter_context((folder / f"log-{name}").open("w"))
            line = ["ip", "netns", "exec", name, sshd, "-D", "-e", "-f", settings]
            daemon = subprocess.Popen(line, stderr=log)
            ending.callback(end, daemon)
        ssh = f"ssh -F {folder}/client"
        for address in addresses:
            until(lambda at=address: login(names[0], ssh, at), f"a login at {address}")
        yield names, addresses, ssh


def end(process):
    process.terminate()
    process.wait(PATIENCE_SECONDS)


def login(name, ssh, address):
    line = ["ip", "netns", "exec", name, *ssh.split(), address, "true"]
    return subprocess.run(line, capture_output=True).returncode == 0


def script(folder, addresses, *line):
    """As launch writes it for that line of train or study."""
    path = folder / "run.sh"
    words = ["launch", "--hosts", ",".join(addresses), "--workers", "2", "--cpu"]
    command = [*MEGABATCH, *words, "--script", path, *line]
    subprocess.run([*map(str, command)], check=True, cwd=folder)
    return path


def begun(network, path):
    names, _, ssh = network
    inherited = os.environ.get("PYTHONPATH", "")
    variables = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 PYTHONPATH={ROOT}:{inherited}"
    environ = os.environ | {"SSH": ssh, "VARIABLES": variables}
    return subprocess.Popen(
        ["ip", "netns", "exec", names[0], "sh", path],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def summary(out):
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    line = [*MEGABATCH, *TRAIN, "--epochs", "6", "--workers", "1", "--device", "cpu", "--out", out]
    subprocess.run([*map(str, line)], check=True)
    return summary(out)["weights_sha256"]


def test_two_hosts_train_stop_and_go_on(network, alone, tmp_path):
    out = tmp_path / "run"
    path = script(tmp_path, network[1], *TRAIN, "--epochs", "6", "--out", out)
    with begun(network, path) as process:
        until(lambda: (out / "checkpoints").is_dir(), "a checkpoint")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0
    assert summary(out)["ended"] == "stopped", said
    with begun(network, path) as process:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    assert "resumed at step" in said
    assert (summary(out)["world"], summary(out)["weights_sha256"]) == (4, alone)
    assert not [*tmp_path.glob(".launch*")]


def test_two_hosts_run_a_study(network, tmp_path):
    out = tmp_path / "study"
    line = ["study", "digits", "--batches", "64,128", "--epochs", "1", "--out", out]
    path = script(tmp_path, network[1], *line)
    with begun(network, path) as process:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    assert json.loads((out / "study.json").read_text())["ended"] == "finished"
    assert [summary(out / run)["world"] for run in ("64-s0", "128-s0")] == [4, 4]


def test_a_host_that_cannot_be_reached_ends_it(network, tmp_path):
    """The others wait for it as torchrun does; told to stop, they end."""
    path = script(tmp_path, [network[1][0], "10.77.0.99"], *TRAIN, "--epochs", "1")
    with begun(network, path) as process:
        until(lambda: [*tmp_path.glob(".launch*-0")], "torchrun")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0
