"""A worker's end of the line to its supervisor: it joins worlds by it, and hears when one is
lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megabatch.elastic.processes import children
from megabatch.elastic.severing import sever
from megabatch.elastic.waking import continue_when_closed, wake

_PULSE_SECONDS = 1.0
_WORD_SECONDS = 5.0
"""for the supervisor to say that a worker is gone, after it was told that others have felt it"""

Standing = tuple[int, ...]
"""how far the state is that a worker holds: they compare, the furthest is the largest"""


@dataclass(frozen=True)
class World:
    """What the supervisor says of the next world to one of its workers."""

    number: int
    """worlds of a run count from 0"""
    rank: int
    size: int
    slot: int
    """its place on this machine, which stays its own from world to world"""
    wanted: int
    """how many workers there should be"""
    by_stage: tuple[int, ...]
    """and in each batch stage, where that changes; the last stands for those after it"""
    store: str
    processes: tuple[int, ...]
    copies: bool
    """the first holds a state, which all others copy"""
    resumes: bool
    """the run's folder is its own already"""


class LostWorker(RuntimeError):
    """Another worker of this world is gone."""


class Dismissed(BaseException):
    """This worker is not needed any more."""


class Link:
    """Whoever has it may send; a thread listens, gives a pulse and ends the worker with its
    supervisor."""

    def __init__(self, pipe: Connection, watched: bool, attendants: tuple[int, ...]) -> None:
        self.watched = watched
        """whether lost workers are replaced"""
        self.all_or_none = False
        """the state of this worker cannot be trusted after a loss: it ends, to begin from disk"""
        self.in_worlds = False
        """its work goes from world to world already"""
        self.grid: tuple[int, int] | None = None
        """that was asked for"""
        self.world: World | None = None
        self._pipe = pipe
        self._sending, self._changed = threading.Lock(), threading.Condition()
        self._lost = self._dismissed = self._answered = False
        self._to_tell: list[Callable[[], None]] = []
        self._attendants = attendants
        parent = multiprocessing.parent_process()
        assert parent is not None
        self._parent = parent.sentinel
        continue_when_closed(self._parent, os.getpid())
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    def say(self, kind: str, value: Any = None) -> None:
        # Plain pickle: multiprocessing's own would pass tensors as handles that end with this
        # process.
        message = pickle.dumps((time.monotonic(), kind, value))
        try:
            with self._sending:
                self._pipe.send_bytes(message)
        except ConnectionError:  # nobody is left to hear it
            self._end_with_supervisor()

    def join(self, standing: Standing | None = None, workers: int | None = None) -> World:
        """Wait for the next world, with what this worker holds of the run; the environment says
        then who it is. `workers`: how many are wanted from now on."""
        before = self.world
        with self._changed:
            self.world, self._lost = None, False
        self.say("join", (standing, workers))
        with self._changed:
            self._changed.wait_for(lambda: self.world is not None or self._dismissed)
            if self._dismissed:
                raise Dismissed
            assert self.world is not None and self.world is not before
            world = self.world
        os.environ.update(
            RANK=str(world.rank),
            WORLD_SIZE=str(world.size),
            LOCAL_RANK=str(world.slot),
            LOCAL_WORLD_SIZE=str(world.size),
            MEGABATCH_STORE=world.store,
            GLOO_SOCKET_IFNAME="lo",
        )
        return world

    @property
    def lost(self) -> bool:
        """Whether a worker of this world is gone."""
        return self._lost

    def explains(self, error: Exception) -> bool:
        """Whether an error came of a lost worker; what torch.distributed raises may come before
        the supervisor's word, which may be stopped itself or on a machine that is too busy."""
        if not isinstance(error, RuntimeError | OSError):
            return self._lost
        self._answered = False
        self.say("felt")
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._answered)
            return self._changed.wait_for(lambda: self._lost, _WORD_SECONDS)

    @contextlib.contextmanager
    def telling(self, call: Callable[[], None]) -> Iterator[None]:
        """Call it, from another thread, as soon as a worker of this world is lost."""
        with self._changed:
            self._to_tell.append(call)
            lost = self._lost
        if lost:
            call()
        try:
            yield
        finally:
            with self._changed:
                self._to_tell.remove(call)

    def end(self, rank: int) -> None:
        """Kill a worker of this world that lets the others wait: a loss as any other."""
        if self.world is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.world.processes[rank], signal.SIGKILL)

    def close(self) -> None:
        self._pipe.close()

    def _listen(self) -> None:
        while True:
            ready = wait([self._parent, self._pipe], _PULSE_SECONDS if self.watched else None)
            if self._parent in ready:
                self._end_with_supervisor()
            try:
                if self._pipe in ready:
                    self._take(*pickle.loads(self._pipe.recv_bytes()))
                elif self.watched:
                    self.say("pulse")
            except (EOFError, OSError):  # closed here, at the end, or there
                return

    def _end_with_supervisor(self) -> None:
        # Who stands still would stay for ever: the server and those whom it has just forked, which
        # do not yet hear what this one hears.
        wake([*self._attendants, *(worker for one in self._attendants for worker in children(one))])
        os._exit(1)

    def _take(self, kind: str, value: Any) -> None:
        with self._changed:
            if kind == "world":
                self.world = value
            elif kind == "leave":
                self._dismissed = True
            elif kind == "heard":
                self._answered = True
            elif self.world is not None and self.world.number == value:
                self._lost = True
                if self.all_or_none:
                    os._exit(1)
                for call in self._to_tell:
                    call()
                sever(self.world.processes)
            self._changed.notify_all()


_link: Link | None = None


def attach(pipe: Connection, watched: bool, attendants: tuple[int, ...]) -> Link:
    """This process's link: a worker has one, from its start on."""
    global _link
    _link = Link(pipe, watched, attendants)
    return _link


def world_is_lost() -> bool:
    """Whether a worker of this process's world is gone, and its connections to the rest are
    shut."""
    return _link is not None and _link.lost


def supervised() -> Link | None:
    """The link of this process, if it is a worker whose loss the run survives."""
    return _link if _link is not None and _link.watched else None
