"""Where a step's time goes on one GPU: its kernels by what they take, ours beside the rival's.

    python benchmarks/where_gpu.py [CASE ...] [--span N] [--muon] [--no-rival] [--top 25]

Cases are step_gpu.py's. A line is a kernel: milliseconds and launches in a step. `busy` is how much
of a step some kernel runs, `host` what the host takes for its calls.
"""

import argparse
from collections import Counter
from dataclasses import replace

import torch
from step_gpu import CASES, GPU, measured, settings
from torch.profiler import ProfilerActivity, profile

from megabatch.bench.rivals import plain_step
from megabatch.bench.step import one_worker

STEPS = 3


def told(name, batch, step, top):
    found = measured(step, batch, 1.0)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    taken, launches, spans = Counter(), Counter(), []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            begin, end = event.time_range.start, event.time_range.end
            taken[event.name] += (end - begin) / 1e3 / STEPS
            launches[event.name] += 1 / STEPS
            spans.append((begin, end))
    print(
        f"\n{name}: {found['ms']:.2f} ms a step, busy {busy(spans) / 1e3 / STEPS:.2f}, "
        f"host {found['host_ms']:.2f}, all kernels {sum(taken.values()):.2f} in "
        f"{sum(launches.values()):.0f} launches"
    )
    for kernel, ms in taken.most_common(top):
        print(f"  {ms:8.3f} {launches[kernel]:6.1f}  {kernel[:110]}")


def busy(spans):
    """Microseconds in which at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("cases", nargs="*", default=["1024"], help=", ".join(CASES))
    flags.add_argument("--span", type=int)
    flags.add_argument("--muon", action="store_true")
    flags.add_argument("--no-rival", action="store_true")
    flags.add_argument("--top", type=int, default=25)
    arguments = flags.parse_args()
    torch.backends.cudnn.benchmark = True
    for case in arguments.cases:
        model, size, batch, micro, span, precision, half_weights, beside = CASES[case]
        span = arguments.span or span
        chosen = settings(model, size, batch, micro, span, precision, half_weights)
        if arguments.muon:
            muon = replace(chosen.optimizer, name="muon", form="paper", eps=0.0)
            chosen = replace(chosen, optimizer=muon)
        with one_worker(chosen, GPU) as step:
            told(f"ours {case}", batch, step, arguments.top)
        torch.cuda.empty_cache()
        if beside and not arguments.no_rival:
            torch._dynamo.reset()
            told(f"rival {case}", batch, plain_step(chosen, GPU, compiled=True), arguments.top)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
