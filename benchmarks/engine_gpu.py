"""Claim: the trainer's step adds little to a plain loop's on one GPU: ResNet-50, bf16.

The same model, precision and optimizer twice: a plain loop (backward, step), and the trainer's step
(buckets, squared norms, control vector, counts, moving averages, a step that may not count).
Medians, each step waited for.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import nn

import megabatch as mb
from megabatch.bench.step import one_worker


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
    gpu = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    micro = arguments.micro
    net = mb.models.build("resnet50", 1000).to(gpu)
    images = torch.randn(micro, 3, 224, 224, device=gpu)
    labels = torch.randint(0, 1000, (micro,), device=gpu)
    optimizer = mb.LARS(mb.parameter_groups(net, 5e-5), lr=0.1)

    def plain():
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    data = mb.Data("synthetic", size=224, channels=3, classes=1000)
    config = mb.Config(
        model="resnet50", batch=micro, micro=micro, span=micro, precision="bf16", data=data
    )
    for _ in range(5):
        plain()
    without = step_seconds(plain, 4 * arguments.rounds)
    with one_worker(config.check(), gpu) as trainers:
        for _ in range(5):
            trainers()
        with_engine = step_seconds(trainers, 4 * arguments.rounds)
    a, b = statistics.median(without), statistics.median(with_engine)
    rows = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "micro": arguments.micro,
        "plain_ms": a * 1e3,
        "trainer_ms": b * 1e3,
        "added": b / a - 1,
    }
    print(f"plain {a * 1e3:.2f} ms, trainer's {b * 1e3:.2f} ms: {b / a - 1:+.2%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
