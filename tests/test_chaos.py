"""Chaos: schedules that repeat, faults that strike, and a verdict that can be no.

The job here is a small script that counts steps as a run does; tests/systems has the real one.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_SECONDS, gone, state, until

from megabatch.chaos.faults import KINDS, Ask, Damage, Fill, Kill, Stop, schedule
from megabatch.chaos.job import TrainingJob, small_disk
from megabatch.chaos.rounds import disturbed, undisturbed
from megabatch.cli import main
from megabatch.errors import INTERRUPTED, RunFailed
from megabatch.host.durable import write_whole
from megabatch.verbs.chaos import put_away

STEPS = 40
# Goes on from its metrics, as a run does from a checkpoint; on request it ends with status 3. It
# takes no more steps than a file beside its folder allows, so that nothing strikes too late.
COUNTING = f"""
import json, pathlib, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(exist_ok=True)
def allowed():
    try:
        return int(out.with_name("allowed").read_text() or 0)
    except FileNotFoundError:
        return {STEPS}
metrics = out / "metrics.jsonl"
lines = metrics.read_text().splitlines() if metrics.exists() else []
lines = [line for line in lines if line.endswith("}}")]
metrics.write_text("".join(line + "\\n" for line in lines))
try:
    for step in range(len(lines), {STEPS}):
        while not asked and allowed() < step:
            time.sleep(0.002)
        with metrics.open("a") as file:
            line = {{"kind": "train", "step": step, "seen": 10 * step, "more": "x" * 300}}
            file.write(json.dumps(line) + "\\n")
        if asked:
            sys.exit(3)
except OSError as error:
    print(error)
    sys.exit(1)
print("a result:")
print(json.dumps({{"weights_sha256": "abc", "steps": {STEPS}, "seen": {10 * STEPS}}}))
"""


def job(out, script=COUNTING, disk=None):
    return TrainingJob([sys.executable, "-c", script], out, disk)


WHOLE = {"weights_sha256": "abc", "steps": STEPS, "seen": 10 * STEPS}
FAULTS = [
    ("kill", Kill(0.1, 0)),
    ("delay", Stop(0.2, 0, 0.2)),
    ("ask", Ask(0.3, 0, signal.SIGUSR1)),
    ("fill", Fill(0.4)),
    ("damage", Damage(0.5, 0.5, 0.5, "flip")),
    ("kill-all", Kill(0.6, None)),
]


@dataclass
class Awaited:
    """A fault that a job waits for; struck, it may go on to the next."""

    fault: Any
    next: float

    @property
    def at(self):
        return self.fault.at

    def strike(self, job):
        self.fault.strike(job)
        allow(job.out, STEPS * self.next)


def struck(one, faults, say=print):
    ends = [*(fault.at for _, fault in faults[1:]), 1]
    awaited = [(kind, Awaited(fault, end)) for (kind, fault), end in zip(faults, ends, strict=True)]
    allow(one.out, STEPS * faults[0][1].at)
    return disturbed(one, awaited, WHOLE, say)


def allow(out, steps):
    write_whole(out.with_name("allowed"), f"{round(steps)}".encode())


def test_every_kind_strikes_and_the_job_ends_as_if_undisturbed(tmp_path):
    assert undisturbed(job(tmp_path / "whole")) == WHOLE
    said = []
    outcome = struck(job(tmp_path / "run"), FAULTS, said.append)
    assert outcome.equal
    assert outcome.struck == {kind: 1 for kind, _ in FAULTS}
    assert outcome.begun == 6  # a delay is no end
    assert len(said) == len(FAULTS)


def test_what_is_due_at_once_waits_until_somebody_is_there_again(tmp_path):
    """The metrics are those of the killed until then, and who has just begun hears no signal."""
    ask, damage = Ask(0.5, 0, signal.SIGTERM), Damage(0.5, 0.5, 0.5, "cut")
    faults = [("damage", damage), ("ask", ask), ("kill-all", Kill(0.5, None))]
    allow(tmp_path / "run", 30)  # nothing strikes too late
    slow = COUNTING.replace("asked = []", "asked = []; time.sleep(0.2)")
    faults.append(("ask", Awaited(ask, 1)))
    outcome = disturbed(job(tmp_path / "run", slow), faults, WHOLE, print)
    assert outcome.equal and sum(outcome.struck.values()) == 4
    assert outcome.begun >= 3  # who was asked, or killed, may be struck once more before the end


def test_other_weights_and_steps_taken_twice_are_not_equal(tmp_path):
    other = {**WHOLE, "weights_sha256": "abd"}
    assert not disturbed(job(tmp_path / "other"), [], other, print).equal
    twice = COUNTING.replace("range(len(lines), ", "range(max(0, len(lines) - 3), ")
    assert not struck(job(tmp_path / "twice", twice), FAULTS[:1]).equal


def test_an_end_that_no_fault_explains_is_a_failure(tmp_path):
    with pytest.raises(RunFailed, match="the job ended with status 3: bad luck"):
        disturbed(job(tmp_path, "import sys; print('bad luck'); sys.exit(3)"), FAULTS, WHOLE, print)
    with pytest.raises(RunFailed, match="the undisturbed run failed: bad luck"):
        undisturbed(job(tmp_path, "import sys; print('bad luck'); sys.exit(1)"))


@contextmanager
def running(out, disk=None):
    """A job that waits after its third step."""
    allow(out, 2)
    with job(out, disk=disk) as one:
        one.start(resume=False)
        until(lambda: one.seen() == 20, "the third step")
        yield one


def test_a_stopped_job_stands_still_until_it_is_let_go_on(tmp_path):
    with running(tmp_path / "run") as one:
        Stop(0.0, 0, 0.3).strike(one)
        until(lambda: state(one._process.pid) == "T", "the stop")
        allow(one.out, 10)
        assert one.seen() == 20
        until(lambda: one.tend() or one.seen() == 100, "more steps")
        assert one.status is None


def test_damage_spoils_the_newest_checkpoint_alone(tmp_path):
    rng = random.Random(1)
    for how in ("flip", "cut", "remove", "lose"):
        out = tmp_path / how
        for name in ("seen-000000000010", "seen-000000000020"):
            (out / "checkpoints" / name).mkdir(parents=True)
            for file in ("a", "b", "c"):
                (out / "checkpoints" / name / file).write_bytes(bytes(100))
        with running(out) as one:
            Damage(0.5, rng.random(), rng.random(), how).strike(one)
            assert one.status == -signal.SIGKILL
        good = [p for p in (out / "checkpoints").rglob("?") if p.read_bytes() == bytes(100)]
        assert len([p for p in good if p.parent.name.endswith("10")]) == 3
        assert len(good) == (3 if how == "lose" else 5)


def test_a_schedule_is_the_same_for_the_same_seed_and_leaves_no_kind_out():
    kinds = tuple(KINDS)
    rounds = [schedule(7, one, 3, 4, kinds) for one in range(1, 8)]
    assert rounds == [schedule(7, one, 3, 4, kinds) for one in range(1, 8)]
    assert rounds != [schedule(8, one, 3, 4, kinds) for one in range(1, 8)]
    drawn = [kind for faults in rounds for kind, _ in faults]
    assert {drawn.count(kind) for kind in kinds} == {3}
    for faults in rounds:
        times = [fault.at for _, fault in faults]
        assert times == sorted(times) and times[0] > 0 and times[-1] < 1
        assert all(str(fault) for _, fault in faults)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "chaos needs a recipe"),
        (["digits", "--kinds", "kil"], "there is no kind of fault 'kil': did you mean kill?"),
        (["digits", "--rounds", "0"], "--rounds is 0; give 1 to 10,000"),
        (["digits", "--round", "4"], "--round is 4; give 1 to 3"),
        (["digits", "--no-deterministic"], "drop --no-deterministic"),
        (["digits", "--workers", "0"], "--workers is 0"),
        (["digits", "--keep-runs", "."], ". is there already"),
    ],
)
def test_mistakes_get_one_sentence(words, sentence, capsys):
    assert main(["chaos", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_small_disk_fills_and_is_let_go_of(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        if disk is None:
            pytest.skip("mounting needs root")
        with running(disk / "run", disk) as one:
            one.fill_disk()
            (disk / "allowed").unlink()
            until(lambda: one.status is not None, "its end")
            assert one.status == 1 and "No space left" in one.last_words()
            one.start(resume=True)  # room is made
            until(lambda: one.status is not None, "its end")
            assert one.result == WHOLE and one.steps() == list(range(STEPS))
    mounts = subprocess.run(["mount"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in mounts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_chaos_that_is_told_to_end_leaves_nothing_behind(number, short_tmp):
    """Neither its job, with all workers, nor its disk, nor any file."""
    line = [sys.executable, "-m", "megabatch.cli", "chaos", "digits", "--workers", "2"]
    environ = os.environ | {"TMPDIR": str(short_tmp)}
    with subprocess.Popen([*line, "--epochs", "30"], env=environ) as running:
        begun = "megabatch-*/*/**/metrics.jsonl"
        until(lambda: [*short_tmp.glob(begun)], "the job's first step", running)
        assert len(named_after(short_tmp)) >= 1
        running.send_signal(number)
        assert running.wait(PATIENCE_SECONDS) == INTERRUPTED
    assert named_after(short_tmp) == []
    assert str(short_tmp) not in Path("/proc/self/mounts").read_text()
    assert [*short_tmp.iterdir()] == []


HOLDING = """
import sys
from megabatch.chaos.job import TrainingJob, small_disk
from megabatch.host.scratch import DISK, scratch
with small_disk(scratch() / DISK, 1 << 20) as disk:
    job = TrainingJob([sys.executable, "-c", "import time; time.sleep(1000)"], scratch() / "run")
    job.start(resume=False)
    print(scratch(), disk is not None, flush=True)
    sys.stdin.read()
"""


def test_a_killed_chaos_takes_its_job_along_and_the_next_process_lets_go_of_its_disk(short_tmp):
    environ = os.environ | {"TMPDIR": str(short_tmp)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environ}
    with subprocess.Popen([sys.executable, "-c", HOLDING], **pipes) as holding:
        left, mounted = holding.stdout.readline().split()
        jobs = [int(one) for one in named_after(short_tmp) if one != str(holding.pid)]
        assert len(jobs) == 1
        holding.kill()
    assert gone(jobs)
    mounts = Path("/proc/self/mounts").read_text
    assert (left in mounts()) == (mounted == "True")
    os.utime(left, (0, 0))  # it is no longer young
    looking = "from megabatch.host.scratch import scratch; scratch()"
    subprocess.run([sys.executable, "-c", looking], env=environ, check=True)
    assert left not in mounts()
    assert [*short_tmp.iterdir()] == []


def test_runs_that_are_kept_leave_the_disk(tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    for run in (disk / "a", kept / "b"):
        run.mkdir(parents=True)
        (run / "summary.json").write_text("{}")
    for run in (disk / "a", kept / "b"):
        put_away(run, kept)
    assert not (disk / "a").exists()
    assert [(kept / name / "summary.json").read_text() for name in "ab"] == ["{}", "{}"]
    put_away(kept / "b", None)
    assert [path.name for path in kept.iterdir()] == ["a"]


def named_after(folder):
    """Processes that have a folder in their words or as their place for temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in words and process.name != str(os.getpid()):
                found.append(process.name)
    return found


def test_lines_that_are_no_json_are_no_result(tmp_path):
    one = job(tmp_path, "print(json.dumps([1]) if 0 else '[1]')")
    with one:
        one.start(resume=False)
        until(lambda: one.status is not None, "its end")
    assert one.result == {} and json.loads("[1]") == [1]
