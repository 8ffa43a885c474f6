"""Questions put to a Python of their own: an answer, or in one line why there is none.

The probes at the end run in that child and may do what they like: hang, raise or crash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Last on the path, for a megabatch that is not installed but run from its source.
_ROOT = str(Path(__file__).parents[2])
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from megabatch.doctor import child
child.answer(*sys.argv[2:])
"""


class Failed(Exception):
    """A probe raised, crashed or gave no answer in time."""


def ask(probe: Callable[..., Any], *arguments: Any, seconds: float = 120) -> Any:
    """What a probe of this module answers; its arguments and its answer are JSON."""
    # -P: a torch.py in the working folder is not what megabatch would import.
    command = [sys.executable, "-P", "-c", _CHILD, _ROOT, probe.__name__, json.dumps(arguments)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer in {seconds:g} s") from None
    if done.returncode < 0:
        raise Failed(f"crashed by {signal.Signals(-done.returncode).name}")
    try:
        # Libraries may print while they are imported: the answer is the last line.
        reply = json.loads(done.stdout.splitlines()[-1])
        worth, why = reply["answer"], reply["error"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise Failed(first_line("\n".join(reversed(done.stderr.splitlines())))) from None
    if why is not None:
        raise Failed(why)
    return worth


def answer(probe: str, arguments: str) -> None:
    """In the child: run a probe and print what it returns, or what it raised."""
    worth, why = None, None
    try:
        worth = globals()[probe](*json.loads(arguments))
    except BaseException as error:
        why = f"{type(error).__name__}: {first_line(error)}"
    print(f"\n{json.dumps({'answer': worth, 'error': why})}", flush=True)


def first_line(message: object) -> str:
    """The first line that says anything."""
    return next(
        (line.strip() for line in str(message).splitlines() if line.strip()), "no reason given"
    )


# --- probes ------------------------------------------------------------------------------------


def version_of(module: str, distribution: str) -> str | None:
    """The version of a library that can really be imported; None if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    importlib.import_module(module)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def describe_torch() -> dict[str, Any]:
    """Versions and builds, and each GPU with what went wrong when it was given work."""
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "warning": first_line(warned[-1].message) if warned else None,
        "gpus": [_describe_gpu(gpu) for gpu in gpus],
    }


def _describe_gpu(index: int) -> dict[str, Any]:
    import torch

    trouble = None
    properties = torch.cuda.get_device_properties(index)
    try:
        # A build without kernels for this GPU sees it, and fails at the first of them.
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        assert (ones @ ones).sum().item() == 64**3, "a product of matrices was wrong"
    except Exception as error:
        trouble = first_line(error)
    nbytes = properties.total_memory
    return {"index": index, "name": properties.name, "nbytes": nbytes, "trouble": trouble}


def join_two(device: str) -> None:
    """Two local workers, started and joined as training does it, sum a number."""
    from megabatch.launch import run_local

    total = run_local(2, _sum_over_workers, device)
    assert total == 3.0, f"1 + 2 came out as {total}"


def _sum_over_workers(device: str) -> float:
    import torch
    import torch.distributed as dist

    from megabatch.cluster import Cluster

    cluster = Cluster.from_env(device=device, timeout_seconds=60)
    number = torch.full((1,), cluster.rank + 1.0, device=cluster.device)
    dist.all_reduce(number)
    total = number.item()
    cluster.leave()
    return total


def train_a_little(device: str) -> int:
    """The smallest real run, alone and writing nothing; returns its number of steps."""
    import torch

    from megabatch.cluster import Cluster
    from megabatch.config import Config, Data, LearningRate
    from megabatch.training import train

    config = Config(
        epochs=1,
        batch=32,
        data=Data(source="synthetic", images=80),
        lr=LearningRate(warmup=0),
        eval_every=0,
    )
    # Not from_env: under a launcher that would wait for the other workers.
    alone = Cluster(0, 1, 0, 1, torch.device(device), (1, 1))
    return train(config, cluster=alone, quiet=True).steps


def addresses_of(host: str) -> list[str]:
    """Where a name leads; may hang for as long as a name server does."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
