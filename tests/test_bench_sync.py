"""megabatch bench sync: links by steps of rings, and the machine.json that the planner reads."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from megabatch.bench import links
from megabatch.bench.slowest import slowest
from megabatch.cli import main
from megabatch.cluster import Cluster
from megabatch.planner import load
from megabatch.sync.choice import measured


def walked(cluster, stride, rounds):
    """What arrives if each worker sends its rank to the one a stride further on."""
    to, source = (cluster.rank + stride) % cluster.world, (cluster.rank - stride) % cluster.world
    received = torch.full((100,), -1.0)
    links._walk((to, source), torch.full((100,), float(cluster.rank)), received, rounds)
    return received.unique().tolist()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_step_of_a_ring_goes_from_each_to_its_neighbour(stride):
    assert run_ranks(walked, 4, stride, 3) == [[(rank - stride) % 4] for rank in range(4)]


def late(cluster):
    return slowest(lambda: time.sleep(0.2 * (cluster.rank == 2)), cluster)


def test_the_slowest_worker_counts_for_all():
    taken = run_ranks(late, 4)
    assert len(set(taken)) == 1
    assert taken[0] >= 0.2


def two_hosts(cluster):
    links._LARGEST = links._FIRST  # the shape of what is found, not its size
    return links.links(replace(cluster, local_world=2))


def test_links_of_all_levels_are_found_and_the_same_on_all_workers():
    first, *others = run_ranks(two_hosts, 4)
    assert all(other == first for other in others)
    assert set(first) == {"node", "network"}
    assert all(value > 0 for level in first.values() for value in level.values())


def slept_and_worked(cluster):
    """What is found if a sum keeps each worker asleep, and then busy for so long, and a large
    one for longer."""

    class Slow:
        def sum(self, plan, tensor):
            time.sleep(0.01)
            until = time.process_time() + (0.02 if tensor.nbytes < 1e4 else 0.1)
            while time.process_time() < until:
                pass

    links._SUMS = (5, 5)
    return links.sending(cluster, Slow())


def test_the_work_of_a_message_is_processor_time_and_not_waiting():
    first, second = run_ranks(slept_and_worked, 2)
    assert first == second
    # two messages a sum of two workers
    assert first["message_core_seconds"] == pytest.approx(0.01, rel=0.2)
    assert first["byte_core_seconds"] == pytest.approx(0.04 / (64 << 10), rel=0.2)


def test_gpus_are_not_held_up_by_sending():
    assert links.sending(Cluster(0, 2, 0, 2, torch.device("cuda"), (1, 2)), None) is None


@pytest.mark.parametrize(("shared_rate", "host_rate"), [(5e6, 5e6), (1e6, 4e6)])
def test_flows_that_share_a_link_are_told_from_one_alone(monkeypatch, shared_rate, host_rate):
    """Seen by the second worker of a host, which looks on while the first ones send."""

    def step(neighbours, nbytes, rounds, cluster):
        if neighbours == (0, 0):  # the other worker of the same host
            return 1e-4 + nbytes / 1e9
        alone = neighbours is None
        return 3e-4 + (nbytes / 4e6 if alone else 2 * nbytes / shared_rate)

    monkeypatch.setattr(links, "_step", step)
    found = links.links(Cluster(1, 4, 1, 2, torch.device("cpu"), (2, 2)))
    assert found["node"] == pytest.approx(
        {"latency_seconds": 1e-4, "bytes_per_second": 1e9}, rel=0.01
    )
    assert found["network"] == pytest.approx(
        {
            "latency_seconds": 3e-4,
            "bytes_per_second": host_rate,  # never less than one flow gets
            "flow_bytes_per_second": 4e6,
        },
        rel=0.01,
    )


def test_a_slow_link_is_not_made_to_carry_large_messages(monkeypatch):
    asked = []

    def step(neighbours, nbytes, rounds, cluster):
        asked.append(nbytes)
        return 1e-3 + nbytes / 5e6

    monkeypatch.setattr(links, "_step", step)
    links.links(Cluster(0, 2, 0, 1, torch.device("cpu"), (2, 1)))
    assert max(asked) == 4 * links._FIRST


def test_bench_sync_and_bench_step_make_a_machine_that_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = ["bench", "sync", "--workers", "2", "--sizes", "4096", "--repeats", "2"]
    assert main([*bench, "--device", "cpu"]) == 0
    assert main(["bench", "step", "--micro", "8", "--seconds", "0.05", "--device", "cpu"]) == 0
    found = load("machine.json")
    assert (found.workers_per_node, found.network) == (2, None)
    assert found.node.latency_seconds < 1 < found.node.bytes_per_second
    assert 0 < found.sending.message_core_seconds < 1
    assert found.sending.cores == len(os.sched_getaffinity(0))
    assert measured("machine.json", (1, 2)).rows  # what plan="auto" reads
    capsys.readouterr()
    assert main(["plan", "digits", "--machine", "machine.json", "--gpus", "1,2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row["exposed_seconds"] > 0 for row in rows if row["gpus"] == 2)
