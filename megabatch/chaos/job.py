"""A job under fire: `megabatch train` in processes of its own, its workers, its folder, its disk.

Linux alone tells whose child a process is, and lets a limit be set for another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megabatch.elastic.processes import children
from megabatch.errors import RunFailed
from megabatch.host.scratch import inside, let_go_of

_LAST_LINES = 60
_TAIL_BYTES = 1 << 16
_LIBC = ctypes.CDLL(None)


class TrainingJob:
    """A run that is begun, disturbed, and begun again."""

    def __init__(self, command: Sequence[str], out: Path, disk: Path | None = None) -> None:
        """`disk`: where a small file system is mounted that holds `out`, if there is one."""
        self.out, self._command, self._disk = out, list(command), disk
        self._process: subprocess.Popen[str] | None = None
        self._stopped: list[tuple[float, int]] = []
        self._output: deque[str] = deque(maxlen=_LAST_LINES)
        self._filler: Path | None = None
        self._left: tuple[int, ...] | None = None
        """how its metrics looked as it was begun"""
        self.full = False
        """whether its disk is"""
        self._reading: threading.Thread | None = None
        self.result: dict[str, Any] = {}
        """what it printed last, by --json"""

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.ended()

    def start(self, resume: bool) -> None:
        self._remove_filler()
        self._stopped.clear()
        self.result, self._left = {}, self._look_of_metrics()
        self._process = subprocess.Popen(
            [*self._command, "--out", str(self.out), *(["--resume"] if resume else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent,
            env=os.environ | inside(),
        )
        # A pipe, not a file: on a full disk a job must still be able to say so.
        self._reading = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reading.start()

    def _read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                self._output.append(line.rstrip())

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            self.ended()
        return status

    def ended(self) -> None:
        """Wait for the end of everyone, and take its result."""
        if self._process is None:
            return
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a launcher that was killed leaves some
        if self._reading is not None:
            self._reading.join()
        last = self._output[-1] if self._output else ""
        with contextlib.suppress(ValueError):
            found = json.loads(last)
            self.result = found if isinstance(found, dict) else {}

    def last_words(self) -> str:
        return "\n".join(self._output)

    # --- how far it is -------------------------------------------------------------------------

    def seen(self) -> int:
        """Images, by the last step that its metrics tell of; 0 while these are still those of the
        ones before it: until it goes on with them nobody is there who would hear a signal."""
        if self._look_of_metrics() == self._left:
            return 0
        for line in reversed(self._metrics(_TAIL_BYTES)):
            if line.get("kind") == "train":
                return int(line["seen"])
        return 0

    def steps(self) -> list[int]:
        """The numbers of all steps that its metrics tell of."""
        lines = self._metrics(sys.maxsize)
        return [int(line["step"]) for line in lines if line.get("kind") == "train"]

    def _look_of_metrics(self) -> tuple[int, ...] | None:
        """Another one after every change of them; who goes on with a run writes them anew."""
        try:
            found = (self.out / "metrics.jsonl").stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _metrics(self, last_bytes: int) -> list[dict[str, Any]]:
        try:
            with (self.out / "metrics.jsonl").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - last_bytes))
                lines = file.read().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    # --- what happens to it --------------------------------------------------------------------

    def signal(self, worker: int, number: signal.Signals, seconds: float | None = None) -> None:
        """To one worker, as they were started; after so many seconds it may go on."""
        if workers := self.workers():
            pid = workers[worker % len(workers)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if seconds is not None:
                self._stopped.append((time.monotonic() + seconds, pid))

    def tend(self) -> None:
        """Let those go on whose time it is."""
        now = time.monotonic()
        for when, pid in [one for one in self._stopped if one[0] <= now]:
            self._stopped.remove((when, pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Everyone, at once."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def fill_disk(self) -> None:
        """Until it is begun again nothing more can be written."""
        self.full = True
        if self._disk is not None:
            self._filler = self._disk / "filler"
            with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            return
        for pid in self.workers()[:1]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))

    def _remove_filler(self) -> None:
        self.full = False
        if self._filler is not None:
            self._filler.unlink(missing_ok=True)
            self._filler = None

    def workers(self) -> list[int]:
        """The processes that train, in the order they were started; a single one trains itself."""
        assert self._process is not None
        servers = [pid for pid in children(self._process.pid) if _is_server(pid)]
        if not servers:
            return [self._process.pid]
        return sorted(pid for server in servers for pid in children(server))


def _end_with_parent() -> None:
    """Ask the kernel to kill this process with the one that started it."""
    set_parent_death_signal = 1
    _LIBC.prctl(set_parent_death_signal, signal.SIGKILL)


def _is_server(pid: int) -> bool:
    """Whether it is the process that workers are forked from."""
    with contextlib.suppress(OSError):
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@contextlib.contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path | None]:
    """A file system of so many bytes at a folder, while this lasts; None where it cannot be had:
    mounting needs root."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "megabatch-chaos", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield place if mounted else None
    finally:
        try:
            let_go_of(place)
        except subprocess.CalledProcessError:
            raise RunFailed(f"the small disk at {place} cannot be let go of: umount it") from None
