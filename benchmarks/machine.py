"""What a measurement was made on and by, for the file that it writes."""

import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import megabatch as mb


def on_gpu():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "chip": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        **_by(),
    }


def on_cores():
    return {"machine": f"{len(os.sched_getaffinity(0))} x {_chip()}", **_by()}


def so_far(path, name):
    """What an earlier run of the same measurement has left in its file, to go on from."""
    return json.loads(path.read_text())[name] if path and path.exists() else []


def _by():
    return {
        "torch": torch.__version__,
        "megabatch": mb.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def _chip():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
