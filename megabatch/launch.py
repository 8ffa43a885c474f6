"""Local workers: started on this machine, watched, and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from megabatch.elastic.link import Dismissed, attach
from megabatch.elastic.supervisor import Losses, OnWorld, Supervisor
from megabatch.elastic.waking import attendants, attendants_awake
from megabatch.errors import RunFailed, UserError
from megabatch.host.scratch import scratch
from megabatch.host.stopping import SIGNALS, answering, keep_stop_requests, take_stop_requests
from megabatch.host.streams import prepare

# Imported once in the server that workers are forked from: four workers start in under a second.
# Imports only; neither CUDA nor OpenMP survives a fork, so no tensor is touched there.
PRELOAD = ["torch", "torch.distributed", "torch.optim", "megabatch.training"]
_NO_LOSSES = Losses()
_SERVER_SECONDS, _AGAIN_SECONDS = 5.0, 0.05


def run_local(
    workers: int,
    function: Callable[..., Any],
    *arguments: Any,
    stops: bool = False,
    losses: Losses = _NO_LOSSES,
    by_stage: tuple[int, ...] = (),
    on_world: OnWorld = lambda _: None,
) -> Any:
    """Run function(*arguments) in `workers` processes on this machine that can join by from_env.

    Returns what worker 0 returned. SIGTERM and the like are passed on to the workers, once they can
    hear them; `stops`: the function takes them as requests to stop, those too that came before it
    was ready. When one fails the others are ended and its error is raised here: a UserError as
    such, anything else as WorkerFailed. Asked twice to stop, they are ended at once and
    KeyboardInterrupt is raised. `losses`: of workers that are killed, which a function that trains
    (training.train) survives; `by_stage`: how many workers it has in each batch stage; `on_world`
    is called here with their processes, by rank, whenever these have changed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    scratch()  # first: the server's socket lies in it, for others to find should this one be killed
    _start_server()

    watched = losses.survivable or bool(by_stage)

    def fork() -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        call = (theirs, attendants(), os.getcwd(), stops, watched, function, arguments)
        process = context.Process(target=_work, args=call)
        try:
            with theirs:
                process.start()
        except BaseException:
            ours.close()
            raise
        return process, ours

    def start() -> tuple[Any, Connection]:
        # A server that cannot fork, or not take what it is sent, ends of it: the next is another.
        deadline = time.monotonic() + _SERVER_SECONDS
        while True:
            try:
                return fork()
            except (EOFError, ConnectionError) as error:
                if time.monotonic() > deadline:
                    raise OSError(f"the server that forks workers ends: {error}") from error
            time.sleep(_AGAIN_SECONDS)

    supervisor = Supervisor(start, workers, losses, by_stage, on_world)
    with answering(supervisor.pass_on), attendants_awake(), supervisor:
        supervisor.asked += take_stop_requests()
        return supervisor.run()


def _start_server() -> None:
    """What workers are forked from, deaf to requests to stop: a terminal sends Ctrl-C to it as
    well, a scheduler SIGTERM, and it would die of them."""
    resource_tracker.ensure_running()  # first: it leaves them heard
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(
    pipe: Connection,
    attendants: tuple[int, ...],
    folder: str,
    stops: bool,
    watched: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    prepare()
    link = attach(pipe, watched, attendants)
    # A forked worker begins where its server was started, perhaps long ago and elsewhere.
    os.chdir(folder)
    with keep_stop_requests() if stops else contextlib.nullcontext():
        # The server is deaf to them; what came since this one was forked is heard now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        link.say("ready")
        try:
            link.join()
            link.say("result", function(*arguments))
        except Dismissed:
            pass
        except UserError as error:
            link.say("mistake", str(error))
        except RunFailed as error:
            link.say("explained", str(error))
        except KeyboardInterrupt:
            link.say("interrupted")
        except BaseException:
            link.say("failure", traceback.format_exc())
    link.close()
