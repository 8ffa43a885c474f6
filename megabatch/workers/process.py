"""What a worker's process is set to while it trains: threads, kernels, generators."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.errors import UserError

T = TypeVar("T")

_mine = threading.RLock()


@contextlib.contextmanager
def compute_settings(config: Config, cluster: Cluster) -> Iterator[None]:
    """For a deterministic run one thread, fixed kernels and whole products, otherwise a fair share
    of the cores, or what OMP_NUM_THREADS says, and the fastest kernels; torch's generators are the
    run's too, and its precision is the config's, inside a caller's autocast as well. Tensors are
    made on the CPU where nothing else is said, whatever device a caller has made the default.
    Afterwards all is as it was. All of this is the process's, so that only one thread has it at a
    time."""
    if not _mine.acquire(blocking=False):
        raise UserError(
            "another thread of this process trains or evaluates, and torch's generators and "
            "settings are the process's: do one after the other, or each in its own process"
        )
    try:
        with _set(config, cluster):
            yield
    finally:
        _mine.release()


@contextlib.contextmanager
def _set(config: Config, cluster: Cluster) -> Iterator[None]:
    threads, exact = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    searches = torch.backends.cudnn.benchmark
    if config.deterministic:
        torch.set_num_threads(1)
    elif cluster.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // cluster.local_world))
    if not config.deterministic and cluster.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # every pass has one shape
    elif cluster.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # The same as use_deterministic_algorithms, which would import torch's compiler: seconds.
        torch.set_deterministic_debug_mode("error")
    try:
        devices = [cluster.device] if cluster.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            _outside_autocast(cluster.device.type),
            _whole_products() if config.deterministic else contextlib.nullcontext(),
            made_on_cpu(),
        ):
            yield
    finally:
        torch.backends.cudnn.benchmark = searches
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(exact)


@contextlib.contextmanager
def _outside_autocast(device_type: str) -> Iterator[None]:
    """As if no caller had switched autocast on.

    Not by another one that is off: torch keeps half copies of weights until the outermost autocast
    ends, so that every pass of a run inside it would see the weights of the first.
    """
    enabled = torch.is_autocast_enabled(device_type)
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    """fp32 is multiplied as where nobody has said anything: whole, but for a GPU's convolutions in
    tf32. A caller may have said otherwise, by one name for all devices or by one for each; what is
    right already is left alone, for who says something is no longer asked for what follows from
    another setting."""
    settings: Any = torch.backends
    products = settings.mkldnn.matmul, settings.mkldnn.conv, settings.cuda.matmul
    with contextlib.ExitStack() as ending:
        by_one_name = _if_one(torch.get_float32_matmul_precision)
        if by_one_name not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
            ending.callback(torch.set_float32_matmul_precision, by_one_name)
        if _if_one(lambda: settings.cudnn.allow_tf32) is False:
            settings.cudnn.allow_tf32 = True
            ending.callback(setattr, settings.cudnn, "allow_tf32", False)
        for place in (*products, settings.cudnn.conv, settings.cudnn.rnn):
            before = place.fp32_precision
            if before not in (("none", "ieee") if place in products else ("tf32",)):
                ending.callback(_give_back, place, before)
                place.fp32_precision = "ieee" if place in products else "tf32"
        yield


def _give_back(place: Any, precision: str) -> None:
    """What it follows from another setting it is to follow again."""
    place.fp32_precision = "none"
    if place.fp32_precision != precision:
        place.fp32_precision = precision


def _if_one(ask: Callable[[], T]) -> T | None:
    """What one name says; nothing where its parts were set apart."""
    try:
        return ask()
    except RuntimeError:
        return None


def made_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Tensors are made on the CPU where nothing else is said, whatever a caller's default device
    is. A context only where it is needed: each call of torch's takes longer in one."""
    cpu = torch.device("cpu")
    return contextlib.nullcontext() if torch.get_default_device() == cpu else cpu


@contextlib.contextmanager
def made_in_fp32() -> Iterator[None]:
    """Tensors of floating point are made in fp32 where nothing else is said, whatever dtype a
    caller has made the default. Not for a whole run: in a module of theirs it is theirs."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
