"""Claim: `megabatch train` itself, loader, log and all, is as fast as its bare step on one GPU.

Each case is the command as a user types it, in a process of its own; images/s are those of its
metrics.jsonl after the first steps, and what came before the first step is start-up.

    python benchmarks/train_gpu.py [CASE ...] [--pack FILE] [--tiny FILE] [--json FILE]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from machine import on_gpu

# flags of each case, and how many steps it takes
LARGE = "--batch 1024 --micro 1024 --span 1024 --precision bf16 --data.size 224"
SMALL = "--data.size 64 --precision bf16"
MUON = "--optimizer.name muon --optimizer.no-momentum-correction"
CASES = {
    "1024": (f"{LARGE}", 80),
    "pack": (f"{LARGE}", 80),
    "span32": (f"{LARGE} --span 32", 80),
    "jia": (f"{LARGE} --precision fp16 --half-weights", 80),
    "jia256": (f"{LARGE} --precision fp16 --half-weights --loss-scale 256", 80),
    "jia64k": (f"{LARGE} --precision fp16 --half-weights --loss-scale 65536", 80),
    "micro256": (f"{LARGE} --micro 256 --span 256", 80),
    "64": (f"{SMALL} --batch 4096 --micro 1024 --span 256", 120),
    "64span64": (f"{SMALL} --batch 4096 --micro 1024 --span 64", 120),
    "64muon": (f"{SMALL} --batch 4096 --micro 1024 --span 64 {MUON}", 120),
    "64pack": (f"{SMALL} --batch 4096 --micro 1024 --span 64", 120),
    "64small": (f"{SMALL} --batch 256 --micro 256 --span 256", 600),
    "alexnet": (f"{LARGE} --model alexnet_bn --data.size 227", 80),
    "saves": (f"{LARGE} --save-every 5", 220),
}
PACKS = {"pack": 2048, "64pack": 100_000}
"""images of the packs that cases read: of ImageNet's at 256 px, and Tiny ImageNet"""
FIRST = 20
"""steps that are not counted"""
FIRST_WORDS = "first step:"
"""that the command says when all is read and built"""
AFTER = 6
"""steps from an epoch's begin, or a checkpoint's, that are told"""


def command(case, pack, out):
    flags, steps = CASES[case]
    words = flags.split()
    batch = int(words[words.index("--batch") + 1])
    images = PACKS[case] if pack else 8 * max(batch, 1024)
    data = (
        ["--data.path", str(pack)]
        if pack
        else f"--data.source synthetic --data.images {images} --data.val-share 0.01".split()
    )
    held = images if pack else images * 0.99
    return [
        *(sys.executable, "-m", "megabatch.cli", "train", "mlperf", "--workers", "1"),
        *words,
        *data,
        *f"--epochs {steps * batch / held:.3f} --lr.warmup 0 --eval-every 0".split(),
        *([] if "--save-every" in words else ["--save-every", "0"]),
        *("--out", str(out), "--json"),
    ]


def measured(case, pack):
    """What a run of the command showed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = command(case, pack, out)
        said = out.with_name("said")
        began = time.perf_counter()
        with (
            said.open("w") as errors,
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as ran,
        ):
            while FIRST_WORDS not in said.read_text() and ran.poll() is None:
                time.sleep(0.02)
            start = time.perf_counter() - began
            result, _ = ran.communicate()
        whole = time.perf_counter() - began
        if ran.returncode:
            return {"failed": ran.returncode, "said": (result + said.read_text())[-3000:]}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "train"]
        seconds = [line["batch"] / line["images_per_second"] for line in steps]
        words_said = said.read_text()
        shutil.copy(out / "metrics.jsonl", Path(tempfile.gettempdir()) / f"{case}.jsonl")
    late = seconds[FIRST:-1]  # the last is heard of after evaluation and checkpoint
    # A checkpoint is begun after a step and written while the next ones run: these have its cost.
    every = float(words[words.index("--save-every") + 1]) or 1
    turns = [int(line["epoch"] / every) for line in steps]
    begun = [i for i, (one, other) in enumerate(pairwise(turns), 1) if one != other and i > FIRST]
    after = [seconds[i : i + AFTER] for i in begun if i + AFTER < len(seconds)]
    summary = json.loads(result.splitlines()[-1])
    return {
        "command": " ".join(words[1:]),
        "images_per_second": steps[-1]["batch"] * len(late) / sum(late),
        "median_ms": statistics.median(late) * 1e3,
        "after_epochs_or_saves_ms": [
            statistics.median(ms) * 1e3 for ms in zip(*after, strict=True)
        ],
        "before_the_first_step_s": start,
        "first_step_s": seconds[0],
        "around_the_run_s": whole - summary["seconds"],
        "steps": len(steps),
        "loss": steps[-1]["loss"],
        "peak_share": summary["peak_share"],
        "said": words_said[-1500:],
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    flags.add_argument("--pack", type=Path, help="of images of 256 px: for the case of that name")
    flags.add_argument("--tiny", type=Path, help="Tiny ImageNet's pack: for 64pack")
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    packs = {"pack": arguments.pack, "64pack": arguments.tiny}
    found = {**on_gpu(), "rows": []}
    for case in arguments.cases:
        if case in packs and packs[case] is None:
            continue
        row = {"case": case, **measured(case, packs.get(case))}
        found["rows"].append(row)
        print({k: v for k, v in row.items() if k != "command"}, flush=True)
        if arguments.json:  # as it comes: a machine may be taken back
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
