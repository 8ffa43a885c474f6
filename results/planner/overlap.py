"""How much longer a ResNet-50 step takes beside a kernel that holds some multiprocessors, as NCCL's
do: so many thread blocks of 512 threads that read two arrays, add and write, on a stream of high
priority.

    python results/planner/overlap.py
"""

import json
import time

import torch
import torchvision
import triton
import triton.language as tl

BLOCK, PIECES = 8192, 4096


@triton.jit
def add(a, b, rounds, block: tl.constexpr):
    first, apart, inside = tl.program_id(0), tl.num_programs(0), tl.arange(0, block)
    for turn in range(rounds):
        at = ((turn * apart + first) % 4096) * block + inside
        tl.store(b + at, tl.load(a + at) + tl.load(b + at))


def step_of(images):
    net = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    batch = torch.randn(images, 3, 224, 224, device="cuda")
    batch = batch.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (images,), device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 1e-6, 0.9, fused=True)

    def train():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(net(batch), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            train()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    return graph


def milliseconds(graph, steps, blocks=0, rounds=0):
    """Of a step, and of the kernel beside it (which must last longer than the steps)."""
    began, ended, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    torch.cuda.synchronize()
    if blocks:
        with torch.cuda.stream(BESIDE):
            first.record()
            add[(blocks,)](FROM, TO, rounds, BLOCK, num_warps=16)
            last.record()
        time.sleep(0.002)
    began.record()
    for _ in range(steps):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / steps, first.elapsed_time(last) if blocks else 0.0


torch.backends.cudnn.benchmark = True
FROM = torch.zeros(PIECES * BLOCK, device="cuda", dtype=torch.float16)
TO, BESIDE = FROM.clone(), torch.cuda.Stream(priority=-1)
for images in (16, 50, 204, 400):
    graph = step_of(images)
    for _ in range(3):
        milliseconds(graph, 5)
    steps = max(3, int(150 / milliseconds(graph, 5)[0]))
    alone = min(milliseconds(graph, steps)[0] for _ in range(5))
    for blocks in (8, 16, 24):
        milliseconds(graph, 1, blocks, 20000)
        rounds = int(20000 * alone * steps * 2.5 / milliseconds(graph, 1, blocks, 20000)[1])
        beside = min(milliseconds(graph, steps, blocks, rounds)[0] for _ in range(3))
        row = {"n": images, "ctas": blocks, "alone_ms": alone, "beside_ms": beside}
        print(json.dumps(row | {"slower": beside / alone - 1}), flush=True)
