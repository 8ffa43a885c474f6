"""Work beside a run, one piece at a time: a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread for one piece of work at a time. What goes wrong in it is raised where it is next
    asked for, once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "background")
        self._work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """After what was begun before has ended well."""
        self.wait()
        self._work = self._thread.submit(work)

    def check(self) -> None:
        """Raise what went wrong, if it is known already."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Until the work is done, or raise what went wrong."""
        work = self._work
        if work is not None:
            try:
                work.result()
            finally:
                if work.done():  # else it is the wait that was interrupted
                    self._work = None

    def close(self) -> None:
        """End the thread when its work is done, well or not."""
        self._thread.shutdown()
