"""A store whose waits end when a worker is lost: nobody waits for what the dead would have
written."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megabatch.elastic.link import LostWorker, world_is_lost

_LOOK_SECONDS = 0.01
_LONG = timedelta(seconds=600)


class HeedingStore(dist.Store):  # type: ignore[misc, name-defined]
    """Another store's keys. torch calls it from C++, and holds only that half of it: whoever makes
    one keeps it for as long as a process group may ask."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._clones: list[HeedingStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._store.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        found: bytes = self._store.compare_set(key, expected, desired)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta = _LONG) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if world_is_lost():
                raise LostWorker(f"a worker was lost that others wait for: {', '.join(keys)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody wrote {', '.join(keys)} in {timeout}")
            time.sleep(_LOOK_SECONDS)

    def clone(self) -> HeedingStore:
        self._clones.append(HeedingStore(self._store.clone()))
        return self._clones[-1]
