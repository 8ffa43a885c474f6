"""Claim: what watches a run costs less than 1 % of a ResNet-50 step while nothing happens.

The command as a user types it, and the same without supervision, heartbeats and comparisons of
weights, take turns. On a GPU by the median of the steps' times, with one comparison of a
ResNet-50's state timed beside them, since one worker has nobody to compare with; on a CPU by the
processor's time of all processes, over steps that a longer run has more than a shorter one.

    python benchmarks/guards.py [--rounds 4] [--json FILE]
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import on_cores, on_gpu

from megabatch.models.resnet import resnet50
from megabatch.sync.replicas import checksum

WITHOUT = "--max-restarts 0 --patience 0 --compare-every 0"
WAYS = {"watched": "", "unwatched": WITHOUT}
EVERY = 100
"""steps between comparisons, as a run has them unless told otherwise"""
# A step that is short beside what watches it, so that this shows: two workers, the digits.
CPU = "train digits --workers 2 --batch 64 --stages --eval-every 0 --save-every 0"
EPOCHS = (2, 42)
GPU = (
    "train mlperf --workers 1 --batch 1024 --micro 1024 --span 1024 --precision bf16 "
    "--data.size 224 --data.source synthetic --data.images 8192 --data.val-share 0.01 "
    "--epochs 15 --lr.warmup 0 --eval-every 0 --save-every 0"
)
FIRST = 20
"""steps that are not counted"""
_PR_SET_CHILD_SUBREAPER = 36
"""orphans below this process become its children"""


def run(words):
    """Steps of a run, their seconds, and the processor's seconds of all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "megabatch.cli", *words, "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        reap()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line["batch"] / line["images_per_second"] for line in lines if line["kind"] == "train"]
    return steps, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def reap():
    """Wait for processes that outlive the command for a moment: their time counts too."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def on_a_gpu(way):
    steps, _ = run([*GPU.split(), *WAYS[way].split()])
    return statistics.median(steps[FIRST:-1]) * 1e3


def on_a_cpu(way):
    """Processor's milliseconds a step: of the steps that the longer of two runs has more."""
    words = [*CPU.split(), *WAYS[way].split()]
    (few, short), (many, long) = (run([*words, "--epochs", str(epochs)]) for epochs in EPOCHS)
    return (long - short) / (len(many) - len(few)) * 1e3


def comparison_ms(device):
    """One checksum of a ResNet-50's weights, momentum and batch norm's averages."""
    net = resnet50(1000).to(device)
    tensors = [*net.state_dict().values(), *(torch.zeros_like(p) for p in net.parameters())]
    taken = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        checksum(tensors, device)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=4)
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gpu = torch.cuda.is_available()
    once = on_a_gpu if gpu else on_a_cpu
    turns = [{way: once(way) for way in WAYS} for _ in range(arguments.rounds)]
    found = {
        **(on_gpu() if gpu else on_cores()),
        "run": f"megabatch {GPU if gpu else CPU}",
        "without": WITHOUT,
        "turns_ms": turns,
        "ms": {way: statistics.median(turn[way] for turn in turns) for way in WAYS},
        "more_ms": statistics.median(turn["watched"] - turn["unwatched"] for turn in turns),
    }
    if gpu:
        found["comparison_ms"] = comparison_ms(torch.device("cuda"))
        more = found["more_ms"] + found["comparison_ms"] / EVERY
        found["share_of_a_step"] = more / found["ms"]["unwatched"]
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
