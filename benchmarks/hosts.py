"""N hosts on one Linux machine: network namespaces, each with a link of limited rate to a switch.

    python benchmarks/hosts.py --hosts 4 --workers 4 --rate 200mbit -- megabatch bench sync

runs the command once for every worker, with torchrun's variables set, each in its host. Needs root
and iproute2 (ip and tc). Whatever happens, the namespaces and the switch are taken down again;
those that a killed run left behind go when the next one starts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

MTU = 9000  # with 1500 a bare TCP ring loses a tenth of the rate to the work of small packets
PREFIX = "mbh"  # of everything made here, followed by the id of the process that made it
PORT = 29511


class CannotEmulate(RuntimeError):
    """This machine cannot have hosts; the message says what is missing."""


def check() -> None:
    """Raise CannotEmulate unless hosts can be made here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise CannotEmulate(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise CannotEmulate("network namespaces need root: run this as root")


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """Names of `count` network namespaces whose links carry `rate` (as tc writes it) each way."""
    check()
    _sweep()
    mark = f"{PREFIX}{os.getpid()}"
    names = [f"{mark}h{index}" for index in range(count)]
    switch = f"{mark}s"
    try:
        _ip(f"link add {switch} mtu {MTU} type bridge")
        _ip(f"link set {switch} up")
        for index, name in enumerate(names):
            port = f"{mark}p{index}"
            _ip(f"netns add {name}")
            _ip(f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {name}")
            _ip(f"link set {port} master {switch} up")
            _ip(f"-n {name} addr add {address(index)}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")
            # Both ends are limited: what a host sends, and what the switch sends to it.
            limit = f"root tbf rate {rate} burst 128kb latency 100ms"
            _run(f"ip netns exec {name} tc qdisc add dev eth0 {limit}")
            _run(f"tc qdisc add dev {port} {limit}")
        yield names
    finally:
        _remove(mark)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def cut(name: str) -> None:
    """Unplug a host at the switch: nothing comes or goes, and nobody is told."""
    _ip(f"link set {_port(name)} down")


def plug_in(name: str) -> None:
    _ip(f"link set {_port(name)} up")


def _port(name: str) -> str:
    """The switch's end of a host's link."""
    mark, _, index = name.rpartition("h")
    return f"{mark}p{index}"


def processes(name: str) -> list[int]:
    return [int(process) for process in _ip(f"netns pids {name}").split()]


def kill(name: str) -> None:
    """All that runs in a host, at once; whoever is started meanwhile too."""
    while found := processes(name):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def sent_bytes(name: str) -> int:
    """What a host has sent over its link so far, by the interface's own counter."""
    counter = _run(f"ip netns exec {name} cat /sys/class/net/eth0/statistics/tx_bytes")
    return int(counter)


def run(names: list[str], workers: int, command: list[str], timeout: float | None = None) -> int:
    """Run a command as every worker of every host; the first status that is not 0, or 0.

    When one worker fails the others are ended.
    """
    world = len(names) * workers
    processes = []
    for rank in range(world):
        host, local = divmod(rank, workers)
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts without names are no trouble
        }
        words = ["ip", "netns", "exec", names[host], *command]
        processes.append(subprocess.Popen(words, env=environment, preexec_fn=_end_with_parent))
    end = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = next((state for state in states if state), 0)
            if failed or all(state == 0 for state in states):
                return failed
            if end is not None and time.monotonic() > end:
                return 124
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it is killed."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _sweep() -> None:
    """Remove what runs that were killed have left behind."""
    made = _run("ip netns list").split() + [
        line.split(":")[1].strip().split("@")[0] for line in _run("ip -o link").splitlines()
    ]
    for name in made:
        number = "".join(c for c in name[len(PREFIX) :].split("h")[0] if c.isdigit())
        ours = name.startswith(PREFIX) and number
        if ours and not os.path.exists(f"/proc/{number}"):
            _remove(f"{PREFIX}{number}")


def _remove(mark: str) -> None:
    for name in _run("ip netns list").split():
        if name.startswith(f"{mark}h"):
            _run(f"ip netns del {name}", must=False)  # takes its half of the link along
    for line in _run("ip -o link").splitlines():
        name = line.split(":")[1].strip().split("@")[0]
        if name == f"{mark}s" or name.startswith(f"{mark}p"):
            _run(f"ip link del {name}", must=False)


def _ip(words: str) -> str:
    return _run(f"ip {words}")


def _run(words: str, must: bool = True) -> str:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if must and done.returncode:
        raise CannotEmulate(f"`{words}` failed: {done.stderr.strip()}")
    return done.stdout


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4, help="in each host")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, as tc writes it")
    parser.add_argument("command", nargs="+", help="after --")
    flags = parser.parse_args()
    # A signal must pass through the finally clauses that take the hosts down.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with hosts(flags.hosts, flags.rate) as names:
            return run(names, flags.workers, flags.command)
    except CannotEmulate as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
