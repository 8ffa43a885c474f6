"""A part of a store for the workers that are here now, where earlier ones have left their keys.

torchrun keeps one store for all rounds of a run. What a worker of an earlier round wrote there, its
address say, would be taken for its successor's, and dialled until the time is up.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Protocol

_LOOK_SECONDS = 0.02


class Store(Protocol):
    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def agree(store: Store, rank: int, world: int, seconds: float) -> str:
    """A word that these workers, and none before them, have in common; every one of them calls it.

    Each says a word of its own, and then what it hears all of them say. What others heard counts
    where it is what this worker hears, its own new word included: only they can have heard that.
    """
    deadline = time.monotonic() + seconds
    words, heard = ([f"{what} {other}" for other in range(world)] for what in ("word", "heard"))
    store.set(words[rank], uuid.uuid4().hex)
    published = ""
    while time.monotonic() < deadline:
        if store.check(words):
            mine = hashlib.sha256(b"".join(map(store.get, words))).hexdigest()
            if mine != published:
                store.set(heard[rank], mine)
                published = mine
            if store.check(heard) and all(store.get(key).decode() == mine for key in heard):
                return mine
        time.sleep(_LOOK_SECONDS)
    missing = [other for other in range(world) if not store.check([words[other]])]
    named = f"worker {missing[0]}" if missing else "another worker"
    raise TimeoutError(f"{named} did not come in {seconds:g} s")
