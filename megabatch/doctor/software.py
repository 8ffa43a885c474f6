"""Python, torch, GPUs, what joins the workers, and the libraries around them."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.doctor import child
from megabatch.doctor.child import Failed, ask
from megabatch.doctor.finding import Finding, FindingState

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
WHEELS = "https://download.pytorch.org/whl"
TorchFacts = dict[str, Any]


def torch_facts() -> TorchFacts:
    """What torch says of itself in a child; "error" where it says nothing."""
    try:
        return {"error": None, **ask(child.describe_torch)}
    except Failed as error:
        return {"error": str(error), "cuda": None, "gpus": []}


def check_python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()}, {platform.machine()}"
    if sys.version_info < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        return Finding("Python", "stops", f"{found}: too old", remedy=f"Python {wanted} or newer")
    if platform.system() != "Linux":
        costs = "megabatch is written for Linux and tested nowhere else"
        return Finding("Python", "limited", found, costs, "a Linux machine or container")
    return Finding("Python", "works", found)


def check_torch(facts: TorchFacts) -> Finding:
    remedy = f"pip install torch (for the cores alone add --index-url {WHEELS}/cpu)"
    if facts["error"]:
        return Finding("torch", "stops", f"cannot be imported: {facts['error']}", remedy=remedy)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "ROCm" if facts["hip"] else "CPU"
    found = f"{facts['version']}, {build} build"
    if tuple(map(int, re.findall(r"\d+", facts["version"])[:2])) < LEAST_TORCH:
        wanted = ".".join(map(str, LEAST_TORCH))
        return Finding("torch", "stops", f"{found}: older than {wanted}", remedy=remedy)
    return Finding("torch", "works", found)


def check_cuda(facts: TorchFacts, devices: Path = Path("/dev")) -> Finding:
    gpus = facts["gpus"]
    if bad := [gpu for gpu in gpus if gpu["trouble"]]:
        return Finding(
            "CUDA",
            "limited",
            "; ".join(f"GPU {gpu['index']}, {gpu['name']}: {gpu['trouble']}" for gpu in bad),
            "a worker on it fails",
            "another build of torch, or leave it out by CUDA_VISIBLE_DEVICES",
        )
    if gpus:
        each = [f"{gpu['name']}, {gpu['nbytes'] / 2**30:.0f} GiB" for gpu in gpus]
        kinds = [f"{each.count(kind)} x {kind}" for kind in dict.fromkeys(each)]
        return Finding("CUDA", "works", "; ".join(kinds))
    if not facts["error"] and (there := len(list(devices.glob("nvidia[0-9]*")))):
        found = f"/dev has {there} of NVIDIA's GPUs, but "
        if facts["cuda"] is None:
            found += "this torch is a CPU build"
            return Finding("CUDA", "limited", found, "GPUs stand idle", "pip install torch")
        found += facts["warning"] or "torch sees none (CUDA_VISIBLE_DEVICES may hide them)"
        return Finding("CUDA", "limited", found, "GPUs stand idle", "a driver as new as the build")
    return Finding(
        "CUDA",
        "missing",
        "no GPU",
        "training runs on the cores: fine for small images, very long for ImageNet",
        "a machine with NVIDIA's GPUs and a CUDA build of torch",
    )


def check_nccl(facts: TorchFacts) -> Finding:
    gpus = len(facts["gpus"])
    if gpus == 0:
        return Finding("NCCL", "missing", "there are no GPUs to join", "nothing: gloo joins cores")
    costs, remedy = "GPUs cannot be joined", "--workers 1 trains on one GPU meanwhile"
    if facts["nccl"] is None:
        state: FindingState = "stops" if gpus > 1 else "limited"
        found = "this build of torch has none"
        return Finding("NCCL", state, found, costs, f"a CUDA build for Linux; {remedy}")
    if gpus == 1:
        return Finding("NCCL", "works", f"{facts['nccl']}; one GPU has nobody to join")
    try:
        ask(child.join_two, "cuda")
    except Failed as error:
        return Finding(
            "NCCL",
            "stops",
            f"{facts['nccl']}: two workers did not all-reduce: {error}",
            costs,
            f"NCCL_DEBUG=INFO says more; in containers NCCL_SHM_DISABLE=1 may help; {remedy}",
        )
    return Finding("NCCL", "works", f"{facts['nccl']}: two workers joined and all-reduced")


def check_gloo(facts: TorchFacts) -> Finding:
    if facts["error"]:
        return Finding("gloo", "missing", "not tried without torch")
    try:
        ask(child.join_two, "cpu")
    except Failed as error:
        return Finding(
            "gloo",
            "limited" if facts["gpus"] else "stops",
            f"two workers did not all-reduce: {error}",
            "workers on cores cannot be joined; --workers 1 needs no joining",
            "the rows on the machine below may say why",
        )
    return Finding("gloo", "works", "two workers joined and all-reduced")


def check_training(facts: TorchFacts) -> Finding:
    if facts["error"]:
        return Finding("training step", "missing", "not tried without torch")
    device = "cuda" if any(not gpu["trouble"] for gpu in facts["gpus"]) else "cpu"
    try:
        steps = ask(child.train_a_little, device)
    except Failed as error:
        found = f"the smallest run fails on {device}: {error}"
        return Finding("training step", "stops", found, remedy="the other rows may say why")
    return Finding("training step", "works", f"{steps} steps of a real run on {device}")


# --- libraries ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """A library beside torch: its name to pip, its module, and what is lost without it."""

    name: str
    module: str
    costs: str
    get: str = ""
    needed: bool = False


LIBRARIES = (
    Library("numpy", "numpy", "no images can be read", needed=True),
    Library("safetensors", "safetensors", "no checkpoints", needed=True),
    Library("tensorboard", "tensorboard", "a run cannot write its metrics", needed=True),
    Library("simplejpeg", "simplejpeg", "JPEGs cannot be decoded", needed=True),
    Library("pillow", "PIL", "PNGs and odd JPEGs cannot be decoded", needed=True),
    Library("pyarrow", "pyarrow", "packs can be neither made nor read"),
    Library(
        "scikit-learn",
        "sklearn",
        "no embedded digits: the recipe digits cannot run",
        get="pip install 'megabatch[demo]'",
    ),
    Library(
        "mlperf-logging",
        "mlperf_logging",
        "mlperf.log is written, but cannot be checked by MLPerf's own checker",
        get="pip install git+https://github.com/mlcommons/logging.git",
    ),
)


def check_library(library: Library) -> Finding:
    lost: FindingState = "missing"
    try:
        version = ask(child.version_of, library.module, library.name)
        found = version or "not installed"
    except Failed as error:
        version, lost = None, "limited"
        found = f"installed, but import {library.module} fails: {error}"
    if version is not None:
        return Finding(library.name, "works", found)
    state = "stops" if library.needed else lost
    remedy = library.get or f"pip install {library.name}"
    return Finding(library.name, state, found, library.costs, remedy)


def check_torchvision(facts: TorchFacts) -> Finding:
    """The trap: wheels made for another build of torch install well and fail at import."""
    part, good, bad = "torchvision, timm", list[str](), list[str]()
    lacking = list[str]()
    for name in ("torchvision", "timm"):
        try:
            version = ask(child.version_of, name, name)
        except Failed as error:
            bad.append(f"import {name} fails: {error}")
        else:
            (good if version else lacking).append(f"{name} {version}" if version else name)
    index = f"cu{facts['cuda'].replace('.', '')}" if facts["cuda"] else "cpu"
    fitting = f"pip install torchvision --index-url {WHEELS}/{index} (the index of this torch)"
    remedy = ", then ".join(
        (["pip install timm"] if lacking == ["timm"] else [fitting])
        + (["pip install timm"] if len(lacking) == 2 else [])
    )
    if bad:
        costs = "megabatch trains without them; scripts that import them fail"
        return Finding(part, "limited", "; ".join(bad), costs, remedy)
    if lacking:
        names = " and ".join(f"--model {name}:NAME" for name in lacking)
        found = ", ".join([*good, f"no {' and no '.join(lacking)}"])
        return Finding(part, "missing", found, f"only {names}", remedy)
    return Finding(part, "works", ", ".join(good))
