"""Time of one training step by images in a pass, on one GPU: what planner/pace.py is held to.

bf16 by autocast, channels last, fused SGD, the whole step one CUDA graph; torchvision's nets. The
lines with "forward" are evaluation: forward passes alone.

    python results/planner/passes.py > results/planner/passes-h200.jsonl
"""

import json
import sys
import time

import torch
import torchvision

SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
EAGER = (
    "resnet50",
    "resnet152",
    "vgg16",
    "alexnet",
    "vit_b_16",
    "convnext_tiny",
    "efficientnet_b0",
)
COMPILED = {"resnet50": (8, 16, 32, 128), "vit_b_16": (16, 128)}


def step_of(net, images, labels, compiled):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9, fused=True)
    torch._dynamo.reset()
    forward = torch.compile(net, dynamic=False) if compiled else net

    def train():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return train


def forward_of(net, images):
    def evaluate():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            net(images)

    return evaluate


def captured(work):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def kernels(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def seconds_of(work, least=0.4):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    found = []
    while sum(found) < least or len(found) < 3:
        began = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / 5)
    return sorted(found)[len(found) // 2]


def measure(name, images, compiled):
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(weights=None).cuda()
    net = net.to(memory_format=torch.channels_last)
    batch = torch.randn(images, 3, 224, 224, device="cuda")
    batch = batch.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (images,), device="cuda")
    work = step_of(net, batch, labels, compiled)
    row = {"model": name, "images": images, "compiled": compiled}
    row["seconds"] = seconds_of(captured(work))
    if not compiled and images == 32:
        row["kernels"] = kernels(work)
    if not compiled:
        net.eval()
        row["forward"] = seconds_of(captured(forward_of(net, batch)))
    return row


def main():
    torch.backends.cudnn.benchmark = True
    began = time.time()
    todo = [(name, size, False) for name in EAGER for size in SIZES]
    todo += [(name, size, True) for name, sizes in COMPILED.items() for size in sizes]
    for name, size, compiled in todo:
        if time.time() - began > 560:
            print("out of time", file=sys.stderr)
            break
        try:
            print(json.dumps(measure(name, size, compiled)), flush=True)
        except Exception as error:  # one size that fails must not cost the others
            print(name, size, compiled, repr(error)[:200], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()


main()
