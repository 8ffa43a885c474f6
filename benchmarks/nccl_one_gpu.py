"""NCCL for real on one GPU: every plan exact, and communication seen under backward in a profile.

    python benchmarks/nccl_one_gpu.py --ranks 2 4 --out results/nccl

NCCL refuses two ranks on one GPU of one host; each rank here says that it is another host
(NCCL_HOSTID) and talks over sockets on loopback. Speed means nothing in this setting, order does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from megabatch import models
from megabatch.cluster import Cluster
from megabatch.plans import PLANS, through
from megabatch.plans.phase import Via
from megabatch.sync.ddp import GradSync
from megabatch.sync.execute import Pipeline

VIAS = get_args(Via)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 7, 1009, 300_007)


def launch(ranks: int, out: Path, port: int) -> int:
    """Start the ranks, each as a host of its own; the first status that is not 0, or 0."""
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            # Kernels of all ranks must fit on the one GPU together.
            "NCCL_MAX_NCHANNELS": "2",
        }
        command = [sys.executable, __file__, "--worker", "--out", str(out)]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
        return next((process.returncode for process in processes if process.poll()), 0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def work(out: Path) -> None:
    cluster = Cluster.from_env(device="cuda")
    report = {
        "ranks": cluster.world,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "exact": exact(cluster),
        "ddp": ddp(cluster),
        "overlap": overlap(cluster, out),
    }
    if cluster.first:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (out / f"nccl-{cluster.world}-ranks.json").write_text(text)
        print(text, flush=True)
    cluster.barrier()
    cluster.leave()


def exact(cluster: Cluster) -> dict[str, int]:
    """Every plan on every grid against the sum of integers; raises on the first difference."""
    world, count = cluster.world, 0
    for y in (y for y in range(1, world + 1) if world % y == 0):
        on_grid = replace(cluster, grid=(y, world // y))
        pipeline = Pipeline(on_grid, lanes=2, segment_bytes=1 << 18)
        for (name, plan), via in product(PLANS.items(), VIAS):
            for length, dtype in product(LENGTHS, DTYPES):
                tensor = values(cluster.rank, length, dtype)
                pipeline.submit(through(plan, via), tensor).wait()
                want = torch.stack([values(r, length, dtype) for r in range(world)]).sum(0)
                if not torch.equal(tensor, want):
                    raise SystemExit(f"{name} via {via} on {y} rows: {length} x {dtype} is wrong")
                count += 1
        if cluster.first:
            print(f"{world} ranks, {y} rows: all plans exact", flush=True)
    return {"cases": count}


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(length, device="cuda") * (rank + 3) + rank) % 11).to(dtype)


def ddp(cluster: Cluster) -> dict[str, float]:
    """Distance in norm of gradients through GradSync from those of plain DDP, by wire."""
    distances = {}
    plain = gradients(DistributedDataParallel(network()), cluster)
    for wire in ("fp32", "fp16", "bf16"):
        model = DistributedDataParallel(network())
        GradSync(cluster, "torus", wire).attach(model)
        ours = gradients(model, cluster)
        distances[wire] = ((ours - plain).norm() / plain.norm()).item()
    assert distances["fp32"] < 1e-6 and max(distances.values()) < 1e-2, distances
    return distances


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 900), nn.ReLU(), nn.Linear(900, 900)).cuda()


def gradients(model: nn.Module, cluster: Cluster) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(cluster.rank)
    images = torch.randn(16, 300, device="cuda", generator=generator)
    for _ in range(3):
        model.zero_grad()
        model(images).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def overlap(cluster: Cluster, out: Path) -> dict[str, Any]:
    """Share of the time of communication kernels in which other kernels ran too."""
    model = DistributedDataParallel(models.build("resnet50", 1000, 3, 224).cuda())
    GradSync(cluster, "torus").attach(model)
    images = torch.randn(16, 3, 224, 224, device="cuda")
    for _ in range(3):
        model(images).square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        model(images).square().mean().backward()
        torch.cuda.synchronize()
    if cluster.first:
        out.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(out / f"trace-{cluster.world}-ranks.json"))
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    ours = [(start, end) for name, start, end in kernels if "nccl" in name.lower()]
    others = [(start, end) for name, start, end in kernels if "nccl" not in name.lower()]
    busy = sum(end - start for start, end in ours)
    shared = sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in ours
        for other_start, other_end in merged(others)
    )
    last_compute = max((end for _, end in others), default=0)
    return {
        "nccl_kernels": len(ours),
        "nccl_ms": busy / 1e3,
        "shared_with_compute_ms": shared / 1e3,
        "began_before_last_compute_kernel": sum(start < last_compute for start, _ in ours),
    }


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that touch made one, so that no moment counts twice."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=Path("results/nccl"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        work(flags.out)
        return 0
    for index, ranks in enumerate(flags.ranks):
        status = launch(ranks, flags.out, 29600 + index)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
