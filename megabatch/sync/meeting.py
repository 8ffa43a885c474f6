"""Where the workers agree on what they are about to do, in the store that they met by.

Each worker makes the same parts (a GradSync, a pipeline) in the same order; a Meeting gives those
that belong together one number, by which their messages are told from all others', and says in
words when they do not belong together.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from megabatch.cluster import Cluster
from megabatch.errors import UserError
from megabatch.workers.rendezvous import within

T = TypeVar("T")

_AGREED = "agreed"


class Disagreement(RuntimeError):
    """Two ranks are about to do different things; the message says which and what."""


class Meeting:
    """One part of a run on every worker of a cluster: its number, and keys of its own.

    Making it returns when all workers have made theirs. `what` is what a worker makes, in words;
    all must say the same.
    """

    def __init__(self, cluster: Cluster, what: str, seconds: float = 600) -> None:
        self._cluster, self._seconds = cluster, seconds
        self.number = 0
        if cluster.world == 1:
            return
        store = within("megabatch", cluster.process_group().get_group_store())
        # Counted in the store and not here: a new process group begins anew.
        self.number = store.add(f"made by {cluster.rank}", 1)
        self.store = within(f"{self.number}", store)
        self._arrive(what)

    def compare(self, key: str, statement: str) -> None:
        """Raise Disagreement unless this rank says what rank 0 says; each key is compared once."""
        if self._cluster.world == 1:
            return
        if self._cluster.first:
            self.store.set(f"compare {key}", statement)
            return
        first = self._from_first(f"compare {key}", statement).decode()
        if first != statement:
            raise Disagreement(
                f"rank {self._cluster.rank} says {statement}, but rank 0 says {first}"
            )

    def decide(self, key: str, decide: Callable[[], T]) -> T:
        """What the first worker decides, on every worker; its UserError is raised on all, and what
        else goes wrong there is told to the others."""
        if self._cluster.world == 1:
            return decide()
        if not self._cluster.first:
            found = self._from_first(f"decide {key}", f"that it waits for {key}")
            decision, error = pickle.loads(found)
            if error is not None:
                raise error
            return cast(T, decision)
        answer: tuple[T | None, Exception | None] = None, None
        try:
            made = decide()
            answer = made, None
            return made
        except UserError as error:
            answer = None, error
            raise
        except Exception as error:
            answer = None, Disagreement(f"rank 0 failed to decide on {key}: {error!r}")
            raise
        finally:
            self.store.set(f"decide {key}", pickle.dumps(answer))

    def keys(self, name: str) -> Any:
        """A store of keys for one part of what was made."""
        return within(name, self.store)

    def _arrive(self, what: str) -> None:
        """All say what they make, or whoever differs says so to all."""
        cluster, store, deadline = self._cluster, self.store, time.monotonic() + self._seconds
        store.set(f"here {cluster.rank}", "")
        store.compare_set("what", "", what)
        other = store.get("what").decode()
        if other != what:
            store.compare_set(
                "verdict",
                "",
                f"rank {cluster.rank} makes {what}, where another rank makes {other}: every worker "
                f"makes the same parts in the same order",
            )
        elif store.add("arrived", 1) == cluster.world:
            store.compare_set("verdict", "", _AGREED)
        left = max(deadline - time.monotonic(), 1e-3)
        try:
            store.wait(["verdict"], timedelta(seconds=left))
        except Exception as error:
            ranks = [rank for rank in range(cluster.world) if not store.check([f"here {rank}"])]
            missing = f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if ranks[1:] else "")
            raise Disagreement(
                f"rank {cluster.rank} makes {what}, but {missing} made nothing of the kind in "
                f"{self._seconds:g} s: every worker of the cluster makes the same parts in the "
                f"same order (a part of the workers has Cluster.from_env(group=...))"
            ) from error
        verdict = store.get("verdict").decode()
        if verdict != _AGREED:
            raise Disagreement(verdict)

    def _from_first(self, key: str, statement: str) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=self._seconds))
        except Exception as error:
            raise Disagreement(
                f"rank {self._cluster.rank} says {statement}, but rank 0 said nothing in "
                f"{self._seconds:g} s"
            ) from error
        found: bytes = self.store.get(key)
        return found
