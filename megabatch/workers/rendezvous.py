"""Where workers meet: torchrun's store, one on the loopback, or a file that all can reach."""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from typing import Any

from megabatch.elastic.link import supervised
from megabatch.elastic.rounds import agree
from megabatch.errors import UserError
from megabatch.workers.place import Place


def within(name: str, store: Any) -> Any:
    """A part of a store for keys of our own."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def meet(place: Place, backend: str, timeout_seconds: float) -> None:
    """Make the process group, through the file MEGABATCH_STORE or at MASTER_ADDR."""
    import torch.distributed as dist

    me = f"this is worker {place.rank} of {place.world}"
    store = None
    if path := os.environ.get("MEGABATCH_STORE"):
        store = _shared_file(path, place, me)
        if backend == "gloo" and supervised() is not None:
            store = _heeding(store)
    elif "MASTER_ADDR" in os.environ:
        # Two Slurm jobs may share their first host.
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", 9500)) % 10000
        os.environ.setdefault("MASTER_PORT", str(port))
    else:
        raise UserError(
            f"{me} but nothing says where they meet: set MASTER_ADDR to the first host, or "
            f"MEGABATCH_STORE to a file all can reach"
        )
    try:
        if store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _agents_store(place, timedelta(seconds=timeout_seconds))
        elif store is None and os.environ["MASTER_ADDR"] in _LOOPBACK:
            store = _loopback_store(place, timedelta(seconds=timeout_seconds))
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (dist.DistNetworkError, TimeoutError) as error:
        address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
        raise UserError(
            f"{me} but they cannot meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _agents_store(place: Place, timeout: timedelta) -> Any:
    """The store that torchrun holds, a part of it for the workers of this round."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, place.world, False, timeout)  # type: ignore[attr-defined]
    rounds = within("megabatch rounds", store)
    return within(agree(rounds, place.rank, place.world, timeout.total_seconds()), store)


_LOOPBACK = ("127.0.0.1", "localhost")


def _loopback_store(place: Place, timeout: timedelta) -> Any:
    """The store of workers that meet on one machine: it listens on the loopback, where torch's own
    would on all interfaces."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    first = place.rank == 0
    how: dict[str, Any] = {}
    if first:
        try:
            how = {"master_listen_fd": socket.create_server((address, port)).detach()}
        except OSError:  # an earlier store of this process has it, which torch shares, or it tells
            how = {"multi_tenant": True}
    return dist.TCPStore(address, port, place.world, first, timeout, **how)  # type: ignore[attr-defined]


_held: list[Any] = []


def _heeding(store: Any) -> Any:
    """The store, which nobody waits in for a lost worker; kept until the next."""
    from megabatch.elastic.heeding import HeedingStore

    _held[:] = [HeedingStore(store)]
    return _held[0]


# What a worker writes into the shared file: the same when a process joins twice, never another's.
_MARK = uuid.uuid4().hex


def _shared_file(path: str, place: Place, me: str) -> Any:
    """The store in a file. One that an earlier run left behind holds addresses of workers that are
    gone: it is refused, for dialling them fails only when the time is up."""
    import torch.distributed as dist

    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"MEGABATCH_STORE is {path}, but {me} and sees no such folder")
    try:
        store = dist.FileStore(path, place.world)  # type: ignore[attr-defined]
        known = store.compare_set(f"megabatch {place.rank}", "", _MARK)
    except RuntimeError as error:
        raise UserError(
            f"{me} but they cannot meet by {path}: {str(error).splitlines()[0]}: make room there, "
            f"or name another place for temporary files with TMPDIR"
        ) from None
    if known != _MARK.encode():
        raise UserError(
            f"{me} but {path} knows another: it is left from an earlier run; set MEGABATCH_STORE "
            f"to a file that does not exist yet"
        )
    return store
