"""Emulated hosts: they come and go, limit what they send, and the benches run in them.

Needs root; iproute2 is installed if it is missing.
"""

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

from megabatch import plans  # noqa: E402
from megabatch.sync.choice import measured  # noqa: E402

pytestmark = pytest.mark.systems


@pytest.fixture(scope="module", autouse=True)
def iproute2():
    if shutil.which("tc") is None:
        subprocess.run(["apt-get", "install", "-y", "-q", "iproute2"], check=True)


def ours(process):
    """Namespaces and links that a process has made and that are still there."""
    made = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    made += subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    return [word for word in made.split() if word.startswith(f"{hosts.PREFIX}{process}")]


def test_hosts_come_and_go_whatever_happens():
    with pytest.raises(KeyError), hosts.hosts(2, "100mbit") as names:
        assert len(names) == 2
        assert len(ours(os.getpid())) >= 5  # two namespaces, two links, one switch
        raise KeyError
    assert ours(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_takes_them_down_too(number):
    command = [
        sys.executable,
        hosts.__file__,
        "--hosts",
        "2",
        "--workers",
        "1",
        "--",
        "sleep",
        "10000",
    ]
    process = subprocess.Popen(command)
    until(lambda: len(ours(process.pid)) >= 5, "the hosts", process)
    process.send_signal(number)
    process.wait(PATIENCE_SECONDS)
    if number == signal.SIGKILL:  # then the next run does it
        assert ours(process.pid) != []
        with hosts.hosts(1, "100mbit"):
            pass
    assert ours(process.pid) == []


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.CannotEmulate, match="need root"), hosts.hosts(2, "100mbit"):
        pass


def test_the_first_failure_ends_all_workers():
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(10000)"
    with hosts.hosts(2, "100mbit") as names:
        assert hosts.run(names, 1, [sys.executable, "-c", script], PATIENCE_SECONDS) == 7


SUM = """if True:
    import torch, torch.distributed as dist
    from megabatch.plans.names import named
    from megabatch.cluster import Cluster
    from megabatch.sync.execute import execute
    cluster = Cluster.from_env(device="cpu")
    tensor = torch.ones(NBYTES // 4)
    if "PLAN" == "backend":
        dist.all_reduce(tensor)
    else:
        execute(named("PLAN", "gloo"), tensor, cluster)
    assert tensor.eq(cluster.world).all()
    cluster.leave()
    """


@pytest.mark.parametrize("plan", ["backend", "ring:ring", "ring:halving_doubling"])
def test_interfaces_count_the_bytes_that_were_priced(plan):
    nbytes, count = 12_000_000, 3
    script = SUM.replace("NBYTES", str(nbytes)).replace("PLAN", plan)
    via = "ring" if plan == "backend" else plan.split(":")[1]
    with hosts.hosts(count, "400mbit") as names:
        before = [hosts.sent_bytes(name) for name in names]
        assert hosts.run(names, 1, [sys.executable, "-c", script], PATIENCE_SECONDS) == 0
        sent = [hosts.sent_bytes(name) - first for name, first in zip(names, before, strict=True)]
    priced = plans.wire(plans.through(plans.RING, via), nbytes, count, 1).sent
    for counted, price in zip(sent, priced, strict=True):
        assert price <= counted <= 1.03 * price


def test_the_bench_runs_in_hosts_and_its_choice_can_be_used(tmp_path):
    machine, out = tmp_path / "machine.json", tmp_path / "sync.json"
    bench = [sys.executable, "-m", "megabatch.cli", "bench", "sync", "--repeats", "3"]
    files = ["--machine", str(machine), "--out", str(out)]
    command = [*bench, "--sizes", "65536", "2000000", *files]
    with hosts.hosts(2, "200mbit") as names:
        assert hosts.run(names, 2, command, PATIENCE_SECONDS) == 0
    report = json.loads(out.read_text())
    assert report["grid"] == [2, 2]
    seconds = {(row["plan"], row["nbytes"]): row["seconds"] for row in report["rows"]}
    # 200 Mbit/s leave no plan below the time of its bytes: half of the tensor each way, twice.
    assert all(taken > 0.06 for (plan, nbytes), taken in seconds.items() if nbytes == 2_000_000)
    links = json.loads(machine.read_text())["links"]
    assert 10e6 < links["network"]["bytes_per_second"] < 26.5e6 < links["node"]["bytes_per_second"]

    assert measured(machine, (2, 2)).plan(65536) in {
        plans.through(plan, via)
        for plan in plans.PLANS.values()
        for via in ("ring", "halving_doubling")
    }
