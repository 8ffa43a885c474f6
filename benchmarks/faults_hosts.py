"""Hosts are lost and links cut under a run that spans several: each must end by itself, with the
weights and the steps of an undisturbed one.

    python benchmarks/faults_hosts.py --losses 20 --cuts 20 --out results/faults/hosts.json

Hosts are network namespaces (hosts.py: root, iproute2), each with torchrun's agent and a worker; a
run may have one of them to all (--nnodes 1:4). A lost host has all its processes killed at once,
every second time with its cable pulled first, so that nobody hears of it. A cut link is plugged in
again when the others have given its host up. Where the host of the rendezvous is lost the run ends,
as promised, and the same lines with --resume go on with it: that is counted.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
import tyro
from faults import Run, command, steps_of
from machine import on_cores

PATIENCE_SECONDS = 6.0
CUT_SECONDS = 3 * PATIENCE_SECONDS
STUCK_SECONDS = 240.0
"""without a step, or between the end of a run and that of its agents"""
RATE = "400mbit"


@dataclass(frozen=True)
class Fault:
    """What happens to a host when a run has taken a share of its steps."""

    kind: str
    """lost or cut"""
    at: float
    host: int
    silently: bool
    """a lost host: its cable is pulled first"""

    def __str__(self) -> str:
        how = " without a word" if self.kind == "lost" and self.silently else ""
        return f"host {self.host} {self.kind}{how} at {self.at:.0%}"


def agent(name: str, index: int, count: int, rendezvous: str, line: list[str]) -> list[str]:
    """torchrun in a host, for one worker of a run of any number of hosts."""
    conf = f"is_host={int(index == 0)},last_call_timeout=3,keep_alive_interval=2"
    conf += ",keep_alive_max_attempt=4,read_timeout=20,join_timeout=120"
    flags = [
        "--nnodes", f"1:{count}", "--nproc-per-node", "1", "--max-restarts", "100",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", "faults",
        "--rdzv-conf", conf, "--local-addr", hosts.address(index), "--monitor-interval", "0.5",
    ]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", *flags]
    return ["ip", "netns", "exec", name, *torchrun, *line]


@dataclass
class Outcome:
    struck: list[str] = field(default_factory=list)
    relaunched: int = 0
    worlds: list[int] = field(default_factory=list)
    """numbers of workers, one after another"""
    wrong: str | None = None
    seconds: float = 0.0


class Job:
    """One run over hosts: it is begun, struck, and waited for."""

    def __init__(self, names: list[str], line: list[str], out: Path) -> None:
        self._names, self._line, self._out = names, line, out
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._plugged: list[tuple[float, int]] = []
        self._log = out.with_suffix(".log").open("ab")
        self._port = 29400

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for index, name in enumerate(self._names):
            hosts.plug_in(name)
            hosts.kill(name)
            if index in self._agents:
                self._agents[index].wait()
        self._log.close()

    def start(self, resume: bool) -> None:
        self._port += 1  # that of a rendezvous that is gone may still be waited for
        rendezvous = f"{hosts.address(0)}:{self._port}"
        line = [*self._line, "--out", str(self._out), *(["--resume"] if resume else [])]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # Agents of torch 2.13 that share one store never tell a newcomer its address.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        for index, name in enumerate(self._names):
            words = agent(name, index, len(self._names), rendezvous, line)
            self._agents[index] = subprocess.Popen(
                words, env=environment, stdout=self._log, stderr=self._log
            )

    def strike(self, fault: Fault) -> None:
        name = self._names[fault.host]
        if fault.kind == "cut":
            hosts.cut(name)
            self._plugged.append((time.monotonic() + CUT_SECONDS, fault.host))
            return
        if fault.silently:
            hosts.cut(name)
        hosts.kill(name)
        self._agents[fault.host].wait()
        hosts.plug_in(name)

    def tend(self) -> None:
        """Plug in whoever's time it is."""
        for when, host in [*self._plugged]:
            if time.monotonic() >= when:
                self._plugged.remove((when, host))
                hosts.plug_in(self._names[host])

    @property
    def cut(self) -> bool:
        return bool(self._plugged)

    @property
    def alive(self) -> list[int]:
        return [index for index, one in self._agents.items() if one.poll() is None]

    def ended(self) -> dict[str, Any]:
        """Its summary; nothing while there is none."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self._out / "summary.json").read_text())
            return found
        return {}

    def world(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((self._out / "environment.json").read_text())["world"])
        return 0


def one_run(
    job: Job,
    out: Path,
    faults: list[Fault],
    whole: tuple[str, list[Any]],
    say: Callable[[str], Any],
) -> Outcome:
    """A run and what happens to it; the outcome says what was wrong, if anything was."""
    outcome, waiting, began = Outcome(), list(faults), time.monotonic()
    with job:
        job.start(resume=False)
        moved, steps = time.monotonic(), -1
        while True:
            job.tend()
            now, found = time.monotonic(), len(steps_of(out))
            if found != steps:
                moved, steps = now, found
            world = job.world()
            if world and outcome.worlds[-1:] != [world]:
                outcome.worlds.append(world)
            over, alive = bool(job.ended()), job.alive
            if over and not alive:
                break
            if now - moved > STUCK_SECONDS:
                outcome.wrong = f"stands still at step {steps}; agents {alive} live"
                break
            if not alive and not job.cut:
                # The host that all meet by is gone: whoever started the run starts it again.
                if not any(fault.startswith("host 0 ") for fault in outcome.struck):
                    outcome.wrong = f"ended at step {steps}, though host 0 was never hit"
                    break
                outcome.relaunched += 1
                say("    all have ended: --resume")
                job.start(resume=True)
                moved = now
            due = waiting and steps >= waiting[0].at * len(whole[1]) and not job.cut
            if due and waiting[0].host in alive and not over:
                fault = waiting.pop(0)
                say(f"    step {steps}, {world} workers: {fault}")
                job.strike(fault)
                outcome.struck.append(str(fault))
            elif due:
                waiting.pop(0)  # that host is gone already
            time.sleep(0.02)
        if outcome.wrong is None:
            same = (job.ended()["weights_sha256"], steps_of(out)) == whole
            outcome.wrong = None if same else "other weights or steps"
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def drawn(chance: random.Random, kinds: list[str], count: int) -> list[Fault]:
    """A run's faults, each of another host: the later ones must find somebody left."""
    victims = chance.sample(range(count), len(kinds))
    share = 0.6 / len(kinds)
    return [
        Fault(kind, 0.1 + share * (number + chance.random()), victim, chance.random() < 0.5)
        for number, (kind, victim) in enumerate(zip(kinds, victims, strict=True))
    ]


def trial(
    folder: Path,
    losses: int,
    cuts: int,
    count: int,
    epochs: float,
    seed: int,
    a_run: int,
    until: float = float("inf"),
    each: Callable[[list[Outcome]], object] = lambda _: None,
) -> list[Outcome]:
    """Runs until so many hosts were lost and links cut, or the time is up."""
    chance = random.Random(seed)
    alone = folder / "alone"
    weights = Run(command(1, epochs, alone), alone).weights()
    assert weights is not None
    whole = weights, steps_of(alone)
    flags = ["--deterministic", "--device", "cpu", "--epochs", f"{epochs:g}"]
    flags += ["--patience", f"{PATIENCE_SECONDS:g}"]
    line = ["-m", "megabatch.cli", "train", "digits", *flags]
    outcomes: list[Outcome] = []
    with hosts.hosts(count, RATE) as names:
        while time.monotonic() < until:
            left = {"lost": losses, "cut": cuts}
            for kind in left:
                left[kind] -= sum(f" {kind}" in s for one in outcomes for s in one.struck)
            due = [kind for kind, number in left.items() for _ in range(max(0, number))]
            if not due:
                break
            kinds = chance.sample(due, min(a_run, len(due)))
            faults, out = drawn(chance, kinds, count), folder / f"run{len(outcomes)}"
            print(f"run {len(outcomes) + 1}: {', '.join(map(str, faults))}", flush=True)
            with_words = lambda words: print(words, flush=True)  # noqa: E731
            outcome = one_run(Job(names, line, out), out, faults, whole, with_words)
            outcomes.append(outcome)
            print(f"    {outcome.wrong or 'equal'}, {outcome.seconds} s", flush=True)
            each(outcomes)
    return outcomes


def counted(outcomes: list[Outcome], kind: str) -> dict[str, int]:
    struck = [fault for one in outcomes for fault in one.struck if f" {kind}" in fault]
    found = {"struck": len(struck), "of the host of the rendezvous": 0}
    found["of the host of the rendezvous"] = sum(fault.startswith("host 0 ") for fault in struck)
    if kind == "lost":
        found["without a word to the others"] = sum("without a word" in fault for fault in struck)
    return found


def main(
    losses: int = 20,
    cuts: int = 20,
    count: int = 4,
    epochs: float = 8,
    seed: int = 0,
    a_run: int = 3,
    minutes: float = 120,
    out: Path | None = None,
) -> None:
    """`count` hosts; `a_run`: faults in each run; `minutes`: no run is begun after so long."""
    hosts.check()
    if not 1 <= a_run < count:
        raise SystemExit(f"--a-run is {a_run}; give 1 to {count - 1}: one host must be left")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()

    def record(outcomes: list[Outcome]) -> dict[str, Any]:
        found = {
            **on_cores(),
            "load of the machine": round(os.getloadavg()[2], 1),
            "hosts": count,
            "seed": seed,
            "seconds": round(time.monotonic() - began),
            "runs": len(outcomes),
            "hosts lost": counted(outcomes, "lost"),
            "links cut": {**counted(outcomes, "cut"), "seconds each": CUT_SECONDS},
            "runs relaunched after the loss of the rendezvous": sum(
                bool(one.relaunched) for one in outcomes
            ),
            "wrong": [one.wrong for one in outcomes if one.wrong],
            "all others ended by themselves, with equal weights and steps": not any(
                one.wrong for one in outcomes
            ),
            "each run": [
                {"struck": one.struck, "workers": one.worlds, "relaunched": one.relaunched,
                 "seconds": one.seconds, "wrong": one.wrong}
                for one in outcomes
            ],
        }  # fmt: skip
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=2) + "\n")
        return found

    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        until = began + 60 * minutes
        outcomes = trial(Path(folder), losses, cuts, count, epochs, seed, a_run, until, record)
    found = record(outcomes)
    print(json.dumps({**found, "each run": "..."}, indent=2))
    if found["wrong"]:
        raise SystemExit("a run did not end as the undisturbed one")


if __name__ == "__main__":
    tyro.cli(main)
