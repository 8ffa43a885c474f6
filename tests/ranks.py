"""Workers for tests: started once by megabatch's own launcher, joined over gloo, then reused.

run_ranks(function, n, *arguments) calls it as function(cluster, *arguments) on n ranks and returns
what each returned. Functions must be importable, so they stand at the top of a test file.
"""

import atexit
import contextlib
import os
import tempfile
import threading
import traceback
from multiprocessing.connection import Client, Listener, wait

import torch
from waiting import PATIENCE_SECONDS

from megabatch.cluster import Cluster
from megabatch.launch import run_local


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(function, n, *arguments, timeout=PATIENCE_SECONDS):
    """Results by rank. The workers are a world of exactly n and stay for the next call."""
    if n not in _standing:
        dismiss()  # one world at a time: two cores
        _standing[n] = Workers(n)
    return _standing[n].call(function, arguments, timeout)


_standing = {}


@atexit.register
def dismiss():
    """End the workers: the next call starts new ones."""
    while _standing:
        _standing.popitem()[1].close()


class Workers:
    """n workers that wait for functions to run; one that failed or hung ends the set."""

    def __init__(self, n):
        self._folder = tempfile.TemporaryDirectory(prefix="megabatch-ranks-")
        path = os.path.join(self._folder.name, "socket")
        with Listener(path, "AF_UNIX", backlog=n) as listener:
            listener._listener._socket.settimeout(PATIENCE_SECONDS)
            self._launch = threading.Thread(
                target=_ignoring_the_end, args=(run_local, n, serve, path), daemon=True
            )
            self._launch.start()
            pipes = [listener.accept() for _ in range(n)]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def call(self, function, arguments, timeout):
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = {}
        while len(results) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout)
            if not ready:
                self._give_up(f"ranks {self._without(results)} gave no answer in {timeout} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                results[rank], failure = pipe.recv()
                if failure is not None:
                    self._give_up(f"rank {rank} of {len(self._pipes)}:\n{failure}")
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        self._launch.join(10)
        self._folder.cleanup()

    def _without(self, results):
        return [rank for rank in range(len(self._pipes)) if rank not in results]

    def _give_up(self, message):
        """The others may wait for ever: end them all, the next call starts new ones."""
        dismiss()
        raise RankFailed(message)


def serve(path):
    """A worker's life: join the others, then run what comes until the pipe closes."""
    torch.set_num_threads(1)
    cluster = Cluster.from_env(device="cpu", timeout_seconds=2 * PATIENCE_SECONDS)
    pipe = Client(path, "AF_UNIX")
    pipe.send(cluster.rank)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((function(cluster, *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _ignoring_the_end(launch, *arguments):
    """The workers leave by os._exit, which their launcher takes for a failure."""
    with contextlib.suppress(Exception):
        launch(*arguments)
