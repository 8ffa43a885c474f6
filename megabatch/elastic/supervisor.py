"""The supervisor of local workers: it starts them, places them in worlds, and replaces the lost.

What it says to them and they to it is told in this package's first lines. It computes nothing and
holds no state of the run: killed itself, it takes its workers along, and the last checkpoint
stands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megabatch.elastic.link import Standing, World
from megabatch.elastic.processes import look_at
from megabatch.errors import RunFailed, UserError, WorkerFailed
from megabatch.host.scratch import scratch
from megabatch.host.stopping import StopAsked

_LOOK_SECONDS = 1.0
_OUT_SECONDS = 120.0
"""for a worker to come out of a lost world; whatever holds it there, it is ended then"""
_MEET_SECONDS = 6.0
"""the same while it meets the others, or makes another group with them: it computes nothing then,
but may wait in gloo, which cannot be called back"""
_START_SECONDS = 600.0
"""for a worker to load what it needs"""
_LEAVE_SECONDS = 5.0
"""for a worker that has only to leave, to write what it still holds"""
_MOMENT_SECONDS = 0.5
"""between a worker's end and that it is seen, on a busy machine"""
_AGAIN_SECONDS = 30.0
"""until another try, where a worker could not be started"""
_STILLBORN = 3
"""workers in a row that end by themselves before they have begun: the next would too"""


@dataclass(frozen=True)
class Losses:
    """What a run survives; by default nothing."""

    most: int = 0
    """losses after which lost workers are replaced: one more ends the run, or lets it go on with
    fewer"""
    least: int | None = None
    """workers with which it goes on, where lost ones are not replaced (None: it does not)"""
    silent_seconds: float = 30.0
    """a worker that gives no sign of life for so long is ended, and counts as lost"""

    @property
    def survivable(self) -> bool:
        return self.most > 0 or self.least is not None


@dataclass(eq=False)
class Member:
    """A worker as its supervisor knows it."""

    slot: int
    process: Any
    pipe: Connection
    ready: bool = False
    """it hears signals"""
    world: World | None = None
    """None: it has joined and waits, or has not come so far"""
    met: bool = False
    """it is connected with the others of its world, and does not make another group with them"""
    joined: bool = False
    standing: Standing | None = None
    """what it holds of the run, while it waits"""
    recalled: float | None = None
    """when it was told to come out"""
    heard: float = 0.0
    ended: bool = False
    """for its silence"""
    dismissed: bool = False

    def tell(self, kind: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # it is gone: that will be heard
            self.pipe.send_bytes(pickle.dumps((kind, value)))

    def receive(self) -> tuple[float, str, Any]:
        try:
            when, kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return 0.0, "end", None
        return when, kind, value

    def signal(self, number: int) -> None:
        # Not by multiprocessing, which takes all workers for ended when their server was killed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def stopped(self) -> bool:
        process = look_at(self.process.pid)
        return process is not None and process.stopped

    def how_it_ended(self) -> str:
        self.process.join(_LEAVE_SECONDS)
        if self.process.exitcode is None:
            self.signal(signal.SIGKILL)
            self.process.join()
        code = self.process.exitcode
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


Start = Callable[[], tuple[Any, Connection]]
"""starts a worker: its process, and our end of its pipe"""


OnWorld = Callable[[tuple[int, ...]], object]
"""is told of each world: the process of each of its workers, by rank"""


class Supervisor:
    """A context: whoever leaves it has no workers left."""

    def __init__(
        self,
        start: Start,
        workers: int,
        losses: Losses,
        by_stage: tuple[int, ...] = (),
        on_world: OnWorld = lambda _: None,
    ) -> None:
        self._start, self._losses, self._by_stage = start, losses, by_stage
        self._wanted, self._on_world = workers, on_world
        self._members: list[Member] = []
        self._worlds = 0
        self._looked = 0.0
        """when it last began to listen: only then a worker can have been silent for long, should
        this process have been stopped itself"""
        self._lost = 0
        self._stillborn = 0
        self._all_in = False
        """all members are in one world"""
        self._agreed = False
        """they come out of it by themselves, for another number"""
        self._begun = False
        self._try_again: float | None = None
        self._results: dict[int, Any] = {}
        self._stop = StopAsked()
        self.asked: list[int] = []
        """signals that came so far"""
        self._folder = scratch() / f"stores-{uuid.uuid4().hex}"

    def __enter__(self) -> Supervisor:
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.signal(signal.SIGKILL)
        for member in self._members:
            member.process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pass_on(self, number: int) -> None:
        """A signal, to every worker, as soon as it can hear it."""
        self._stop.ask()
        self.asked.append(number)
        for member in list(self._members):
            if member.ready:
                member.signal(number)

    def run(self) -> Any:
        """Until the work is done; returns the first worker's result, or raises the failure that was
        first."""
        self._complete()
        while self._members:
            self._hear()
            self._look_for_silent()
            if self._try_again is not None and time.monotonic() >= self._try_again:
                self._complete()
            self._place()
        return self._results[0]

    # --- what workers say

    def _hear(self) -> None:
        self._looked = time.monotonic()
        pipes = {member.pipe: member for member in self._members}
        quiet = None if not self._losses.survivable else _LOOK_SECONDS
        received = [(*pipes[pipe].receive(), pipes[pipe]) for pipe in wait(list(pipes), quiet)]  # type: ignore[index]
        if any(kind == "failure" for _, kind, _, _ in received):
            # Whoever made it fail may have ended a moment ago: that is still to be seen.
            time.sleep(_MOMENT_SECONDS)
            others = [pipe for pipe in pipes if all(pipes[pipe] is not m for *_, m in received)]
            received += [(*pipes[pipe].receive(), pipes[pipe]) for pipe in wait(others, 0)]  # type: ignore[index]
        # When one fails the others fail of it. Of what is known now the earliest is the cause; one
        # that was killed could not say when, but it went before those it made fail.
        for _, kind, value, member in sorted(received, key=lambda one: one[0]):
            member.heard = time.monotonic()
            getattr(self, f"_on_{kind}")(member, value)

    def _on_ready(self, member: Member, _: object) -> None:
        came = len(self.asked)
        member.ready, self._stillborn = True, 0
        for number in self.asked[:came]:
            member.signal(number)

    def _on_pulse(self, member: Member, _: object) -> None:
        """That it was heard is all."""

    def _on_meets(self, member: Member, _: object) -> None:
        member.met = False

    def _on_met(self, member: Member, _: object) -> None:
        member.met = True

    def _on_felt(self, member: Member, _: object) -> None:
        member.tell("heard")

    def _on_begun(self, member: Member, _: object) -> None:
        self._begun = True

    def _on_join(self, member: Member, value: tuple[Standing | None, int | None]) -> None:
        member.standing, wanted = value
        member.joined, member.world, member.recalled = True, None, None
        if wanted is not None:  # all workers ask for it at the same step
            self._wanted, self._agreed = wanted, True
            self._complete()
        elif not self._agreed:
            self._break_up()

    def _on_result(self, member: Member, value: Any) -> None:
        assert member.world is not None
        self._results[member.world.rank] = value

    def _on_mistake(self, member: Member, value: str) -> None:
        raise UserError(value)

    def _on_explained(self, member: Member, value: str) -> None:
        raise RunFailed(value)

    def _on_interrupted(self, member: Member, _: object) -> None:
        raise KeyboardInterrupt

    def _on_failure(self, member: Member, value: str) -> None:
        raise WorkerFailed(f"{self._name(member)} failed:\n{value}")

    # --- lost workers

    def _on_end(self, member: Member, _: object) -> None:
        how = member.how_it_ended()
        self._members.remove(member)
        member.pipe.close()
        if self._over(member):
            return
        name = self._name(member)
        self._stillborn += not member.ready and how.startswith("with")
        if self._stillborn >= _STILLBORN:
            raise WorkerFailed(f"{name} ended {how} before it had begun, as did others before it")
        # Those that are lost at once, or make each other fail, are one loss.
        if self._all_in or member.recalled is None:
            self._lost += 1
        self._all_in = False
        if self._lost > self._losses.most and not self._enough():
            raise WorkerFailed(f"{name} ended {how}")
        self._break_up()
        self._complete()
        self._say(f"{name} ended {how}", len(self._staying))

    @property
    def _staying(self) -> list[Member]:
        return [member for member in self._members if not member.dismissed]

    def _over(self, member: Member) -> bool:
        """Whether the end of a worker is no loss: its work is done, or all of it is."""
        rank = None if member.world is None else member.world.rank
        return member.dismissed or rank in self._results or 0 in self._results

    def _enough(self) -> bool:
        least = self._losses.least
        return least is not None and len(self._staying) >= max(1, least)

    def _say(self, what: str, left: int) -> None:
        if not self._losses.survivable:
            return
        replaced = f"loss {self._lost} of {self._losses.most}, replaced"
        how = replaced if left >= self._wanted else f"{left} go{'es' * (left == 1)} on"
        self._print(f"{what}: {how}")

    def _print(self, words: str) -> None:
        print(f"megabatch: {words}", file=sys.stderr, flush=True)

    def _look_for_silent(self) -> None:
        if not self._losses.survivable:
            return
        now = self._looked
        for member in self._members:
            loads = not member.ready and not member.stopped
            silent = now - member.heard > (_START_SECONDS if loads else self._losses.silent_seconds)
            out = _OUT_SECONDS if member.met else _MEET_SECONDS
            stuck = member.recalled is not None and now - member.recalled > out
            if (silent or stuck) and not member.ended:
                quiet = f"silent for {now - member.heard:.0f} s"
                self._print(f"{self._name(member)} is {quiet if silent else 'stuck'}: it is ended")
                member.ended = True
                member.signal(signal.SIGKILL)  # its pipe tells the rest

    def _break_up(self) -> None:
        """Have all come out of a world that is not whole any more."""
        waiting = any(member.joined for member in self._members)
        if self._all_in and not waiting:
            return
        self._all_in = False
        for member in self._members:
            if member.world is not None and member.recalled is None:
                member.recalled = time.monotonic()
                member.tell("lost", member.world.number)

    # --- worlds

    def _complete(self) -> None:
        """Start as many as are missing."""
        self._try_again = None
        slots = {member.slot for member in self._staying}
        free = [slot for slot in range(self._wanted) if slot not in slots]
        missing = self._wanted - len(self._staying)
        if self._lost > self._losses.most:
            missing = 0
        for slot in free[: max(0, missing)]:
            try:
                process, pipe = self._start()
            except OSError as error:
                if not self._enough():
                    hint = {
                        errno.EMFILE: ": raise it with ulimit -n",
                        errno.ENOENT: f": somebody has removed {scratch()}",
                    }.get(error.errno or 0, "")
                    raise WorkerFailed(f"no worker can be started: {error}{hint}") from error
                self._try_again = time.monotonic() + _AGAIN_SECONDS
                return
            self._members.append(Member(slot, process, pipe, heard=time.monotonic()))

    def _place(self) -> None:
        """Once all have joined, the next world."""
        if not self._members or not all(member.joined for member in self._members):
            return
        if 0 in self._results:  # of a world that lost a worker when its work was done
            for member in self._members:
                member.joined, member.dismissed = False, True
                member.tell("leave")
            return
        nothing: Standing = ()
        # The furthest first; of equals, those who were here before, in their places.
        order = sorted(self._members, key=lambda m: m.slot)
        order.sort(key=lambda m: m.standing or nothing, reverse=True)
        for member in order[self._wanted :]:
            member.joined, member.dismissed = False, True
            member.tell("leave")
        order = order[: self._wanted]
        store = self._folder / f"{self._worlds}"
        copies = order[0].standing is not None
        for rank, member in enumerate(order):
            member.world = World(
                number=self._worlds,
                rank=rank,
                size=len(order),
                slot=member.slot,
                wanted=self._wanted,
                by_stage=self._by_stage,
                store=str(store),
                processes=tuple(m.process.pid for m in order),
                copies=copies,
                resumes=self._begun,
            )
            member.joined, member.standing, member.recalled = False, None, None
            member.met = False
        self._results.clear()
        self._worlds += 1
        self._all_in, self._agreed = True, False
        for member in order:
            member.tell("world", member.world)
        self._on_world(tuple(member.process.pid for member in order))

    def _name(self, member: Member) -> str:
        if member.world is None:
            return f"worker {member.slot} of {self._wanted}"
        return f"worker {member.world.rank} of {member.world.size}"
