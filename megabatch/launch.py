"""Local workers: started on this machine, watched, and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megabatch.errors import RunFailed, UserError

# Imported once in the server that workers are forked from: four workers start in under a second.
# Imports only; neither CUDA nor OpenMP survives a fork, so no tensor is touched there.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.optim", "megabatch.training"]

_TWICE_SECONDS = 0.5


class WorkerFailed(RuntimeError):
    """A local worker failed; the message names it and holds its own words."""


class StopAsked:
    """Whether a run was asked to stop. One Ctrl-C may arrive twice, from the terminal and from who
    started this process, so only what comes well after the first is a second."""

    def __init__(self) -> None:
        self.when: float | None = None

    def ask(self) -> bool:
        """Whether this is the first time; a second ends the run at once."""
        now, first = time.monotonic(), self.when is None
        if self.when is not None and now - self.when >= _TWICE_SECONDS:
            raise KeyboardInterrupt
        self.when = self.when or now
        return first


def run_local(workers: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) in `workers` processes on this machine that can join by from_env.

    Returns what worker 0 returned. SIGTERM and SIGINT are passed on to the workers. When one fails
    the others are ended and its error is raised here: a UserError as such, anything else as
    WorkerFailed. Asked twice to stop, they are ended at once and KeyboardInterrupt is raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[Any] = []
    pipes: list[Connection] = []
    with (
        tempfile.TemporaryDirectory(prefix="megabatch-") as folder,
        _pass_on_signals(processes, workers),
        contextlib.ExitStack() as ending,
    ):
        ending.callback(_end, processes)
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            start = _Start(rank, workers, os.path.join(folder, "store"), os.getcwd())
            process = context.Process(target=_work, args=(start, theirs, function, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results = _results(processes, pipes)
        # They have only to leave: time to write what they still hold.
        for process in processes:
            process.join(timeout=5)
        return results[0]


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _results(processes: list[Any], pipes: list[Connection]) -> list[Any]:
    """Wait for every worker's result, or raise the failure that was first."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in results}
        said = [(*_said(pipe), waiting[pipe]) for pipe in wait(list(waiting))]  # type: ignore[index, arg-type]
        # When one fails the others fail of it. Of what is known now the earliest is the cause; one
        # that was killed could not say when, but it went before those it made fail.
        for _, kind, value, rank in sorted(said, key=lambda one: one[0]):
            who = f"worker {rank} of {len(processes)}"
            if kind == "end":
                processes[rank].join()
                code = processes[rank].exitcode
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                raise WorkerFailed(f"{who} ended {how}")
            if kind == "interrupted":
                raise KeyboardInterrupt
            if kind == "explained":
                raise RunFailed(value)
            if kind == "mistake":
                raise UserError(value)
            if kind == "failure":
                raise WorkerFailed(f"{who} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _said(pipe: Connection) -> tuple[float, str, Any]:
    try:
        when, kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return 0.0, "end", None
    return when, kind, value


@dataclass(frozen=True)
class _Start:
    rank: int
    workers: int
    store: str
    folder: str


def _work(
    start: _Start, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A forked worker begins where its server was started, perhaps long ago and elsewhere.
    os.chdir(start.folder)
    os.environ.update(
        RANK=str(start.rank),
        WORLD_SIZE=str(start.workers),
        LOCAL_RANK=str(start.rank),
        LOCAL_WORLD_SIZE=str(start.workers),
        MEGABATCH_STORE=start.store,
        GLOO_SOCKET_IFNAME="lo",
    )

    def say(kind: str, value: Any) -> None:
        # Plain pickle: multiprocessing's own would pass tensors as handles that end with this
        # process.
        pipe.send_bytes(pickle.dumps((time.monotonic(), kind, value)))

    try:
        say("result", function(*arguments))
    except UserError as error:
        say("mistake", str(error))
    except RunFailed as error:
        say("explained", str(error))
    except KeyboardInterrupt:
        say("interrupted", None)
    except BaseException:
        say("failure", traceback.format_exc())
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _pass_on_signals(processes: list[Any], workers: int) -> Iterator[None]:
    asked = StopAsked()

    def pass_on(number: int, frame: object) -> None:
        asked.ask()
        if len(processes) < workers:  # nobody has begun, and one to come would not hear of it
            raise KeyboardInterrupt
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
