"""Where a step's time goes on one GPU: its kernels by what they take, ours beside the rival's.

    python benchmarks/where_gpu.py [CASE ...] [--span N] [--muon] [--no-rival] [--top 25]
    python benchmarks/where_gpu.py --run [CASE ...]
    python benchmarks/where_gpu.py --pack tiny.arrow [--batch 4096] [--optimizer lars]

Cases are step_gpu.py's. A line is a kernel: milliseconds and launches in a step. `busy` is how much
of a step some kernel runs, `host` what the host takes for its calls. With --run, or a pack of Tiny
ImageNet: steps of a real run, and what the host did while the GPU had nothing to do.
"""

import argparse
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import torch
from step_gpu import CASES, GPU, measured, settings
from torch.profiler import ProfilerActivity, profile

import megabatch as mb
from megabatch.bench.rivals import plain_step
from megabatch.bench.step import one_worker
from megabatch.study.arms import ARMS

STEPS = 3
FIRST = 20
"""steps of a run that are not told"""


def told(name, batch, step, top):
    found = measured(step, batch, 1.0)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if on_device(event)]
    print(
        f"\n{name}: {found['ms']:.2f} ms a step, busy {busy(kernels):.2f}, "
        f"host {found['host_ms']:.2f}"
    )
    list_kernels(kernels, top)


def on_device(event):
    return event.device_type == torch.autograd.DeviceType.CUDA


def list_kernels(kernels, top):
    taken, launches = Counter(), Counter()
    for event in kernels:
        taken[event.name] += (event.time_range.end - event.time_range.start) / 1e3 / STEPS
        launches[event.name] += 1 / STEPS
    print(f"all kernels {sum(taken.values()):.2f} ms in {sum(launches.values()):.0f} launches")
    for kernel, ms in taken.most_common(top):
        print(f"  {ms:8.3f} {launches[kernel]:6.1f}  {kernel[:110]}")


def busy(kernels):
    """Milliseconds of a step in which at least one of them runs."""
    return sum(end - begin for begin, end in merged(kernels)) / 1e3 / STEPS


def merged(kernels):
    """When some of them run: [begin, end] in microseconds."""
    found = []
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in kernels):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


class Watch:
    """A logger that has some steps of a run profiled."""

    def __init__(self):
        self.profile = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
        self.steps = 0

    def begin(self, about):
        pass

    def write(self, kind, record):
        if kind != "train":
            return
        self.steps += 1
        if self.steps == FIRST:
            self.profile.start()
        elif self.steps == FIRST + STEPS:
            self.profile.stop()

    def end(self, summary):
        pass


def from_a_pack(pack, batch, optimizer):
    config = mb.recipes.tiny30(batch)
    if optimizer:
        config = ARMS[optimizer].change(config)
    return replace(config, data=replace(config.data, path=pack)), 100_000


def synthetic(config):
    images = 8 * config.batch
    data = replace(config.data, images=images, val_share=0.01)
    return replace(config, data=data, lr=replace(config.lr, warmup=0.0)), images


def told_of_a_run(config, images, top):
    epochs = (FIRST + 10) * config.batch / images
    config = replace(config, eval_every=0).resized(epochs=epochs)
    watch = Watch()
    mb.train(config, quiet=True, loggers=[watch])
    events = watch.profile.events()
    kernels = [event for event in events if on_device(event)]
    runs = merged(kernels)
    took = (runs[-1][1] - runs[0][0]) / 1e3 / STEPS
    name = f"{config.model} with {config.optimizer.name} at {config.batch}"
    print(f"\n{name}: {took:.2f} ms a step, busy {busy(kernels):.2f}")
    list_kernels(kernels, top)
    gaps = [(one[1], other[0]) for one, other in pairwise(runs) if other[0] - one[1] > 50]
    print(f"gaps of more than 0.05 ms: {sum(e - b for b, e in gaps) / 1e3 / STEPS:.2f} ms a step")
    meanwhile = Counter()
    for begin, end in gaps:
        for event in events:
            if on_device(event):
                continue
            both = min(end, event.time_range.end) - max(begin, event.time_range.start)
            if both > 0:
                meanwhile[event.name] += both / 1e3 / STEPS
    for name, ms in meanwhile.most_common(top):
        print(f"  {ms:8.3f}  {name[:110]}")


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("cases", nargs="*", default=["1024"], help=", ".join(CASES))
    flags.add_argument("--span", type=int)
    flags.add_argument("--muon", action="store_true")
    flags.add_argument("--no-rival", action="store_true")
    flags.add_argument("--top", type=int, default=25)
    flags.add_argument("--run", action="store_true", help="steps of a real run instead")
    flags.add_argument("--pack", help="Tiny ImageNet's, for such a run")
    flags.add_argument("--batch", type=int, default=4096)
    flags.add_argument("--optimizer", help="an arm of the study's, lars or sgd")
    arguments = flags.parse_args()
    if arguments.pack:
        chosen = from_a_pack(arguments.pack, arguments.batch, arguments.optimizer)
        told_of_a_run(*chosen, arguments.top)
        return
    torch.backends.cudnn.benchmark = True
    for case in arguments.cases:
        model, size, batch, micro, span, precision, half_weights, beside = CASES[case]
        span = arguments.span or span
        chosen = settings(model, size, batch, micro, span, precision, half_weights)
        if arguments.muon:
            muon = replace(chosen.optimizer, name="muon", form="paper", eps=0.0)
            chosen = replace(chosen, optimizer=muon)
        if arguments.run:
            told_of_a_run(*synthetic(chosen), arguments.top)
            continue
        with one_worker(chosen, GPU) as step:
            told(f"ours {case}", batch, step, arguments.top)
        torch.cuda.empty_cache()
        if beside and not arguments.no_rival:
            torch._dynamo.reset()
            told(f"rival {case}", batch, plain_step(chosen, GPU, compiled=True), arguments.top)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
