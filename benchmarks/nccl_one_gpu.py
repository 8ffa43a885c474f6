"""NCCL for real on one GPU: every plan exact, and communication seen under backward in a profile;
a deterministic run ends with one hash, twice by one rank and by several.

    python benchmarks/nccl_one_gpu.py --ranks 2 4 --out results/nccl

NCCL refuses two ranks on one GPU of one host; each rank here says that it is another host
(NCCL_HOSTID) and talks over sockets on loopback. Speed means nothing in this setting, order does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from machine import on_gpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import MicroBatch
from megabatch.parts import assemble, prepared
from megabatch.plans import PLANS, through
from megabatch.plans.phase import VIAS
from megabatch.step import train_step
from megabatch.sync.ddp import GradSync
from megabatch.sync.execute import Pipeline
from megabatch.workers.process import compute_settings

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 7, 1009, 300_007)
RUN = (
    "train mlperf --deterministic --model resnet50 --precision bf16 --batch 256 --micro 32 "
    "--span 32 --data.source synthetic --data.size 64 --data.images 4137 --data.val-share 0.01 "
    "--epochs 1 --lr.warmup 0 --eval-every 0 --save-every 0 --json"
)


def launch(ranks: int, port: int, words: list[str], stdout: IO[str] | None = None) -> int:
    """Start the ranks, each as a host of its own; the first status that is not 0, or 0. With
    `stdout`, what the first of them prints goes there, and that of the others nowhere."""
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
        to = stdout if rank == 0 or stdout is None else subprocess.DEVNULL
        processes.append(subprocess.Popen([sys.executable, *words], env=environment, stdout=to))
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


def hashes(ranks: list[int], port: int) -> dict[str, Any]:
    """Of the weights that a deterministic run ends with, for each number of ranks."""
    found = []
    for index, count in enumerate(ranks):
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as out:
            words = ["-m", "megabatch.cli", *RUN.split(), "--out", f"{folder}/run"]
            if launch(count, port + index, words, out):
                raise SystemExit(f"the deterministic run failed on {count} ranks")
            out.seek(0)
            summary = json.loads(out.read().splitlines()[-1])
        found.append({"ranks": count, "weights_sha256": summary["weights_sha256"]})
    return {**on_gpu(), "run": f"megabatch {RUN}", "runs": found}


def work(out: Path) -> None:
    cluster = Cluster.from_env(device="cuda")
    report = {
        "ranks": cluster.world,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "exact": exact(cluster),
        "ddp": ddp(cluster),
        "overlap": overlap(cluster),
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


def overlap(cluster: Cluster) -> dict[str, Any]:
    """When the trainer's buckets leave during backward, and what the step waits for after it."""
    config = Config(
        model="resnet50", batch=256 * cluster.world, micro=256, span=256, precision="bf16",
        graphs="never", data=Data("synthetic", size=224, channels=3, classes=1000),
    ).check()  # fmt: skip
    with contextlib.ExitStack() as ending:
        ending.enter_context(compute_settings(config, cluster))
        net = ending.enter_context(prepared(config, cluster, 1000))
        parts = ending.enter_context(assemble(config, cluster, net))
        micro = MicroBatch(
            torch.randn(256, 3, 224, 224, device="cuda"),
            torch.randint(1000, (256,), device="cuda"),
            torch.arange(256, device="cuda"),
            256 * cluster.rank,
        )

        def step() -> None:
            train_step(parts, [micro], config.batch, lr=0.0, momentum=0.9)
            torch.cuda.synchronize()

        for _ in range(5):
            step()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    begin = next(end for _, end, name in kernels if name == "_cross_entropy")
    after = next(start for start, _, name in kernels if name == "_norms")  # LARS
    ours = [(start, end) for start, end, name in kernels if "nccl" in name.lower()]
    backward = [end for start, end, name in kernels if start < after and "nccl" not in name.lower()]
    length = max(backward) - begin
    return {
        "how": parts.run.how,
        "nccl_kernels": len(ours),
        "backward_ms": length / 1e3,
        "first_leaves_at": (ours[0][0] - begin) / length,
        "nccl_ms": sum(end - start for start, end in ours) / 1e3,
        "exposed_ms": max(0.0, max(end for _, end in ours) - max(backward)) / 1e3,
    }


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
        words = [__file__, "--worker", "--out", str(flags.out)]
        if status := launch(ranks, 29600 + index, words):
            return status
    found = hashes([1, 1, *flags.ranks], 29700)
    (flags.out / "nccl-one-hash.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(len({run["weights_sha256"] for run in found["runs"]}) > 1)


if __name__ == "__main__":
    sys.exit(main())
