"""The planner against real messages: hosts are network namespaces behind a slow link (root, Linux).

Links are measured by single steps of rings and written to machine.json. Then steps are run that
were not measured (other sizes, plans, grids, bucket sizes and worlds) and compared with what the
planner says of them. Backward is a sleep, so that two cores can play many workers; every byte is
real.

    python results/planner/emulated.py [--hosts 4 --each 2 --rate 40mbit]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BRIDGE, NET = "mbplan", "10.77.0"
MEASURED = 200_000  # bytes: a message of the size that the pieces of a bucket have

# (world, grid, plan, bytes of each bucket, share of backward at which each is ready, backward)
Case = tuple[int, tuple[int, int], str, list[int], list[float], float]


def cases(hosts: int, each: int) -> list[Case]:
    """What is run: all-reduces alone, then steps whose buckets leave during backward."""
    found: list[Case] = []
    world = hosts * each
    for nbytes in (50_000, 200_000, 800_000):
        found.append((world, (1, world), "ring", [nbytes], [1.0], 0.0))
        found.append((world, (1, world), "halving_doubling", [nbytes], [1.0], 0.0))
        for plan in ("torus", "hierarchical", "three_phase", "blueconnect"):
            found.append((world, (hosts, each), plan, [nbytes], [1.0], 0.0))
        found.append((world, (each, hosts), "torus", [nbytes], [1.0], 0.0))
    for world, grid in ((2 * each, (2, each)), (3 * each, (3, each))):
        for plan in ("ring", "torus", "hierarchical"):
            shape = (1, world) if plan == "ring" else grid
            found.append((world, shape, plan, [600_000], [1.0], 0.0))
    world = hosts * each
    for count in (2, 4, 8):
        for plan, grid in (("torus", (hosts, each)), ("ring", (1, world))):
            ready = [(k + 1) / count for k in range(count)]
            found.append((world, grid, plan, [800_000 // count] * count, ready, 0.25))
    return found


# --- one worker ---------------------------------------------------------------------------------


def run_plan(plan: Any, grid: tuple[int, int], tensor: Any, rank: int, group: Any) -> None:
    """The messages of a plan, step by step: all sends of a step go before its receives."""
    from itertools import groupby

    import torch
    import torch.distributed as dist

    from megabatch.plans import stages

    for stage in stages(plan, *grid):
        for _, moves in groupby(stage.moves(rank), key=lambda move: move.step):
            sent, received = [], []
            for move in moves:
                part = tensor[slice(*move.slice.bounds(len(tensor)))]
                if move.action == "send":
                    sent.append(dist.isend(part, move.peer, group=group))
                else:
                    arrived = torch.empty_like(part)
                    received.append((move, part, arrived, dist.irecv(arrived, move.peer, group)))
            for move, part, arrived, work in received:
                work.wait()
                if move.op == "add":
                    part += arrived
                else:
                    part.copy_(arrived)
            for work in sent:
                work.wait()


def run_step(case: Case, rank: int, group: Any) -> float:
    """Seconds from the beginning of backward to the arrival of the last bucket."""
    import torch
    import torch.distributed as dist

    from megabatch.planner.run import PLANNED

    world, grid, plan, sizes, ready, backward = case
    buckets = [torch.ones(nbytes // 4) for nbytes in sizes]
    full: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def lane() -> None:
        while (bucket := full.get()) is not None:
            run_plan(PLANNED[plan], grid, bucket, rank, group)

    dist.barrier(group)
    began = time.perf_counter()
    thread = threading.Thread(target=lane)
    thread.start()
    for bucket, share in zip(buckets, ready, strict=True):
        time.sleep(max(0.0, began + share * backward - time.perf_counter()))
        full.put(bucket)
    full.put(None)
    thread.join()
    taken = time.perf_counter() - began
    assert all(bool((bucket == world).all()) for bucket in buckets), "the sum is wrong"
    return taken


def least_of(measure: Any, times: int, group: Any) -> float:
    """Of so many repetitions the quickest, each by its slowest worker: what else runs on the box
    only ever adds."""
    import torch
    import torch.distributed as dist

    measure()
    found = []
    for _ in range(times):
        slowest = torch.tensor([measure()], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found.append(float(slowest))
    return min(found)


def shift(hosts: int, each: int, workers: int, nbytes: int, rank: int, swap: bool = False) -> float:
    """One message from some workers of each host to those of the next (swap: of its pair)."""
    import torch
    import torch.distributed as dist

    host, place = divmod(rank, each)
    there, back = (host ^ 1, host ^ 1) if swap else ((host + 1) % hosts, (host - 1) % hosts)
    mine, theirs = torch.ones(2, max(1, nbytes // 4))
    # Large ones several times in a row: workers that begin late must not have the wire alone.
    rounds = 1 if nbytes < 1000 else 6

    def once() -> float:
        dist.barrier()
        if place >= workers or host >= hosts or there >= hosts:
            return 0.0
        began = time.perf_counter()
        for _ in range(rounds):
            sent = dist.isend(mine, there * each + place)
            dist.irecv(theirs, back * each + place).wait()
            sent.wait()
        return (time.perf_counter() - began) / rounds

    return least_of(once, 25 if rounds == 1 else 6, dist.group.WORLD)


def links_of(hosts: int, each: int, rank: int) -> dict[str, Any]:
    """By single steps of rings: one worker of a host, all of them, both ways at once; inside."""
    latency = shift(hosts, each, 1, 4, rank)
    flow = MEASURED / (shift(hosts, each, 1, MEASURED, rank) - latency)
    everyone = shift(hosts, each, each, MEASURED, rank) - latency
    both_ways = shift(hosts, each, each, MEASURED, rank, swap=True) - latency
    nic = max(flow, each * MEASURED / everyone)
    network = {
        "latency_seconds": latency,
        "bytes_per_second": nic,
        "flow_bytes_per_second": flow,
        "duplex": min(1.0, everyone / both_ways),
    }
    if each == 1:
        return {"network": network}
    # inside a host the workers are each other's hosts
    near, far = (shift(each, 1, 1, nbytes, rank) for nbytes in (4, 20 * MEASURED))
    node = {"latency_seconds": near, "bytes_per_second": 20 * MEASURED / (far - near)}
    return {"node": node, "network": network}


def work(rank: int, hosts: int, each: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(f"{NET}.1", 29511, hosts * each, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=hosts * each)
    links = links_of(hosts, each, rank)
    groups = {
        world: dist.new_group(list(range(world)))
        for world in sorted({case[0] for case in cases(hosts, each)})
    }
    rows = []
    for case in cases(hosts, each):
        if rank < case[0]:
            group = groups[case[0]]
            taken = least_of(lambda case=case, group=group: run_step(case, rank, group), 7, group)
            rows.append({"case": case, "seconds": taken})
        dist.barrier()
    if rank == 0:
        print(json.dumps({"links": links, "rows": rows}), flush=True)
    dist.destroy_process_group()


# --- the hosts ----------------------------------------------------------------------------------


def shell(words: str, quiet: bool = False) -> None:
    subprocess.run(words.split(), check=not quiet, stderr=subprocess.DEVNULL if quiet else None)


def set_up(hosts: int, rate: str) -> None:
    shell(f"ip link add {BRIDGE} type bridge")
    shell(f"ip link set {BRIDGE} mtu 9000 up")
    for host in range(hosts):
        name = f"{BRIDGE}{host}"
        shell(f"ip netns add {name}")
        shell(f"ip link add {name} mtu 9000 type veth peer name eth0 mtu 9000 netns {name}")
        shell(f"ip link set {name} master {BRIDGE} up")
        shell(f"ip -n {name} link set lo up")
        shell(f"ip -n {name} link set eth0 up")
        shell(f"ip -n {name} addr add {NET}.{host + 1}/24 dev eth0")
        shell(f"ip netns exec {name} tc qdisc add dev eth0 root handle 1: tbf rate {rate} "
              f"burst 20kb latency 2s")  # fmt: skip
        # Acknowledgements must not wait behind data, as they do not in a real NIC's short
        # queue; and a lane that was idle must not start slowly.
        for setting in (
            "tcp_limit_output_bytes=30000",
            "tcp_slow_start_after_idle=0",
            "tcp_rmem=4096 4194304 8388608",
            "tcp_wmem=4096 4194304 8388608",
        ):
            sysctl = ["ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{setting}"]
            subprocess.run(sysctl, check=True)


def take_down(hosts: int) -> None:
    for host in range(hosts):
        shell(f"ip netns del {BRIDGE}{host}", quiet=True)
    shell(f"ip link del {BRIDGE}", quiet=True)


def measure(hosts: int, each: int, rate: str) -> dict[str, Any]:
    take_down(hosts)
    set_up(hosts, rate)
    try:
        workers = []
        for rank in range(hosts * each):
            name = f"{BRIDGE}{rank // each}"
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(rank),
                       "--hosts", str(hosts), "--each", str(each)]  # fmt: skip
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            workers.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        said = [worker.communicate(timeout=500)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed")
        measured: dict[str, Any] = json.loads(said[0])
        return measured
    finally:
        take_down(hosts)


# --- the comparison -----------------------------------------------------------------------------


def predict(case: Case, machine: Any) -> float:
    from megabatch.planner.price import price
    from megabatch.planner.run import PLANNED
    from megabatch.planner.step import Bucket, send

    _, grid, plan, sizes, ready, backward = case
    full = [Bucket(float(n), share) for n, share in zip(sizes, ready, strict=True)]
    return send(full, price(PLANNED[plan], *grid, machine), 0.0, backward)[-1].end


def compare(measured: dict[str, Any], each: int, rate: str, folder: Path) -> str:
    from megabatch.planner.machine import load, update

    file = folder / "machine.json"
    file.unlink(missing_ok=True)
    update(file, {
        "name": "emulated", "workers_per_node": each, "links": measured["links"],
        "host": {"emulated": f"network namespaces, tbf rate {rate}, MTU 9000"},
        "sources": {"links": "results/planner/emulated.py, single steps of rings"},
    })  # fmt: skip
    machine = load(str(file))
    lines = [
        "| workers | grid | plan | buckets | backward | measured | planner | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for row in measured["rows"]:
        world, grid, plan, sizes, _, backward = case = row["case"]
        said = predict(case, machine)
        errors.append(said / row["seconds"] - 1)
        lines.append(
            f"| {world} | {grid[0]} x {grid[1]} | {plan} | {len(sizes)} x {sizes[0]:,} B "
            f"| {1e3 * backward:.0f} ms | {1e3 * row['seconds']:.1f} ms | {1e3 * said:.1f} ms "
            f"| {errors[-1]:+.0%} |"
        )
    sizes = sorted(abs(error) for error in errors)
    summary = f"median error {statistics.median(sizes):.0%}, worst {sizes[-1]:.0%}"
    return "\n".join([summary + f", {len(sizes)} rows", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--rate", default="40mbit")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--again", action="store_true", help="compare what was measured before")
    flags = parser.parse_args()
    if flags.rank is not None:
        work(flags.rank, flags.hosts, flags.each)
        return
    file = HERE / "emulated.json"
    if not flags.again:
        file.write_text(json.dumps(measure(flags.hosts, flags.each, flags.rate)) + "\n")
    table = compare(json.loads(file.read_text()), flags.each, flags.rate, HERE)
    (HERE / "emulated.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
