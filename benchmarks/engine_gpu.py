"""Claim: the bucket engine adds little to a ResNet-50 step on one GPU.

The same model, precision and optimizer twice: a plain loop (backward, step), and through the engine
(buckets, squared norms, control vector, a step that may not count). Medians, each step waited for.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import nn

import megabatch as mb
from megabatch.cluster import Cluster
from megabatch.sync.buckets import GradientSum


def step_seconds(step, rounds):
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--micro", type=int, default=256)
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    cluster = Cluster.from_env()
    torch.backends.cudnn.benchmark = True
    net = mb.models.build("resnet50", 1000).to(cluster.device, memory_format=torch.channels_last)
    shape = (arguments.micro, 3, 224, 224)
    images = torch.randn(shape, device=cluster.device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (arguments.micro,), device=cluster.device)
    optimizer = mb.LARS(mb.parameter_groups(net, 5e-5), lr=0.1)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(net(images), labels)

    def plain():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = None
    control = torch.zeros(3, device=cluster.device)

    def through_engine():
        engine.begin(1)
        engine.backward(loss(), control)
        good = torch.isfinite(engine.finish()[0])
        engine.scale(None, good)
        optimizer.step(good=good)

    for _ in range(5):
        plain()
    without = step_seconds(plain, 4 * arguments.rounds)
    # The engine's hooks stay on the parameters, so the plain loop goes first.
    engine = GradientSum(net, cluster, control=3, tree=False)
    for _ in range(5):
        through_engine()
    with_engine = step_seconds(through_engine, 4 * arguments.rounds)
    a, b = statistics.median(without), statistics.median(with_engine)
    rows = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "micro": arguments.micro,
        "plain_ms": a * 1e3,
        "engine_ms": b * 1e3,
        "added": b / a - 1,
    }
    print(f"plain {a * 1e3:.2f} ms, engine {b * 1e3:.2f} ms: {b / a - 1:+.2%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
