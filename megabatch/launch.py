"""Local workers: started on this machine, watched, and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megabatch.errors import RunFailed, UserError
from megabatch.scratch import scratch
from megabatch.stopping import StopAsked, answering, keep_stop_requests, take_stop_requests

# Imported once in the server that workers are forked from: four workers start in under a second.
# Imports only; neither CUDA nor OpenMP survives a fork, so no tensor is touched there.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.optim", "megabatch.training"]


class WorkerFailed(RuntimeError):
    """A local worker failed; the message names it and holds its own words."""


def run_local(
    workers: int, function: Callable[..., Any], *arguments: Any, stops: bool = False
) -> Any:
    """Run function(*arguments) in `workers` processes on this machine that can join by from_env.

    Returns what worker 0 returned. SIGTERM and the like are passed on to the workers, once they can
    hear them; `stops`: the function takes them as requests to stop, those too that came before it
    was ready. When one fails the others are ended and its error is raised here: a UserError as
    such, anything else as WorkerFailed. Asked twice to stop, they are ended at once and
    KeyboardInterrupt is raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[Any] = []
    pipes: list[Connection] = []
    signals = _Signals(processes)
    store = scratch() / f"store-{uuid.uuid4().hex}"
    with answering(signals.pass_on), contextlib.ExitStack() as ending:
        signals.asked += take_stop_requests()
        ending.callback(store.unlink, missing_ok=True)
        ending.callback(_end, processes)
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            start = _Start(rank, workers, str(store), os.getcwd(), stops)
            process = context.Process(target=_work, args=(start, theirs, function, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        _await_ready(processes, pipes, signals)
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


class _Signals:
    """Signals on their way to workers, each of which gets all of them as soon as it can."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes, self._ready = processes, set[int]()
        self._stop = StopAsked()
        self.asked: list[int] = []

    def pass_on(self, number: int) -> None:
        self._stop.ask()
        self.asked.append(number)
        for rank in self._ready:
            self._send(rank, number)

    def ready(self, rank: int) -> None:
        came = len(self.asked)
        self._ready = {*self._ready, rank}  # a new set: the other may be walked through just now
        for number in self.asked[:came]:
            self._send(rank, number)

    def _send(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)


def _await_ready(processes: list[Any], pipes: list[Connection], signals: _Signals) -> None:
    """Each worker's first word is that it hears signals."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            if _said(pipes[rank])[1] == "end":
                raise _ended(processes, rank)
            signals.ready(rank)


def _ended(processes: list[Any], rank: int) -> WorkerFailed:
    processes[rank].join()
    code = processes[rank].exitcode
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    return WorkerFailed(f"worker {rank} of {len(processes)} ended {how}")


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
                raise _ended(processes, rank)
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
    stops: bool


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

    with keep_stop_requests() if start.stops else contextlib.nullcontext():
        say("ready", None)
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
