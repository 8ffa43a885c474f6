"""The verdict: right on injected delays, which a loader measures; advice follows from facts."""

import contextlib
import io
import itertools
import json
import os
import platform
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_train import CONFIG
from torch import nn
from waiting import PATIENCE_SECONDS, until

from megabatch import between_steps, recipes
from megabatch.batch import steps
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data import loader as loader_module
from megabatch.data import threads
from megabatch.data.loader import StepLoader
from megabatch.data.source import InMemory
from megabatch.launch import run_local
from megabatch.runs.verdict import (
    Clock,
    Effort,
    Facts,
    Verdicts,
    Waits,
    bold_rate,
    few_steps,
    idle_workers,
    straggler,
    verdict,
)
from megabatch.sync.senders import Lane
from megabatch.training import train

FACTS = Facts(threads=4, cores=8, size=224)


def epoch(input_, communication, compute, pause=0):
    """The waits of eight steps with such delays, in milliseconds each, by a clock that is set."""
    now, waited = [0.0], 5.0  # running totals begin anywhere
    clock = Clock(now=lambda: now[0])
    clock.lap(waited, 0.0)
    for _ in range(8):
        now[0] += input_ + communication + compute + pause
        waited += input_
        clock.waited_for_others(communication)
        clock.passed_over(pause)
    return clock.lap(waited, 0.0)


CASES = {
    "nothing waits": ((0, 0, 30), "compute"),
    "a little of each": ((1, 1, 40), "compute"),
    "reading takes twice as long as computing": ((30, 0, 30), "input"),
    "nothing but reading": ((40, 0, 0), "input"),
    "reading longest, some communication": ((70, 10, 10), "input"),
    "communication": ((0, 20, 30), "communication"),
    "nothing but communication": ((0, 40, 0), "communication"),
    "communication longest, some reading": ((20, 60, 10), "communication"),
    "evaluation counts for nothing": ((0, 0, 30, 40), "compute"),
    "evaluation does not hide communication": ((0, 2, 30, 1000), "communication"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_injected_is_what_is_found(case):
    delays, bound = CASES[case]
    waits = epoch(*delays)
    input_, communication, compute = delays[:3]
    assert waits == Waits(8 * (input_ + communication + compute), 8 * input_, 8 * communication)
    assert verdict(waits, FACTS).bound == bound


class Asked(InMemory):
    """Images that are read when they are allowed to be, and then take a while, by a clock that
    nothing else moves."""

    instant = False

    def __init__(self, seconds):
        super().__init__(torch.zeros(512, 1, 2, 2, dtype=torch.uint8), torch.zeros(512).long(), 2)
        self.seconds, self.allowed = seconds, threading.Semaphore(0)
        self.now, self.done = 0.0, 0

    def read(self, indices, draws):
        assert self.allowed.acquire(timeout=PATIENCE_SECONDS)
        self.now += self.seconds
        self.done += 1
        return super().read(indices, draws)


def measured(source, monkeypatch, before, begins=lambda: None, micro_batches=9):
    """What a loader says it waited and worked; `before` is called with the number of each
    micro-batch before that is asked for, `begins` when the loader begins to wait."""
    looks = itertools.cycle([begins, lambda: None])  # as a wait begins, and as it ends

    def now():
        if threading.current_thread() is threading.main_thread():
            next(looks)()
        return source.now

    for module in (loader_module, threads):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    config = Config(batch=4, micro=4, span=4, epochs=20, data=Data(size=2, threads=1))
    alone = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
    loader = StepLoader(source, None, config, alone, torch.float32)
    try:
        for step in list(steps(config.all_stages, 512, 1))[:micro_batches]:
            coming = loader.micro_batches(step)
            before(step.index)
            next(coming)
            assert next(coming, None) is None
        return loader.waited_seconds, loader.busy_seconds
    finally:
        for _ in range(100):  # whatever is read ahead
            source.allowed.release()
        loader.close()


def test_a_loader_counts_what_is_waited_for(monkeypatch):
    """Each micro-batch is read only once it is waited for; the first, always waited for, is no
    news."""
    source = Asked(0.03)
    waited, busy = measured(source, monkeypatch, lambda _: None, source.allowed.release)
    assert waited == pytest.approx(8 * 0.03)
    assert busy == pytest.approx(9 * 0.03)


def test_a_loader_counts_no_work_that_is_hidden(monkeypatch):
    """Each micro-batch is there before it is asked for."""
    source = Asked(0.03)

    def computing(index):
        source.allowed.release()
        if index > 0:  # nothing is read before the first is asked for
            until(lambda: source.done > index, "the reading of it")

    waited, busy = measured(source, monkeypatch, computing)
    assert waited == 0
    assert busy == pytest.approx(9 * 0.03)


def test_advice_on_input():
    waits = Waits(seconds=100, input=31, communication=2, reading=390)
    line = str(verdict(waits, replace(FACTS, threads=4, cores=16)))
    assert line == "input-bound 31 %: pack at --size 256 or add 3 decode threads"
    # 390 thread-seconds in the 69 s of computing are 5.7 threads, a tenth more 6.2: 7, or all 6.
    assert "add 2 decode threads" in str(verdict(waits, replace(FACTS, cores=6)))
    assert "add 1 decode thread" in str(verdict(waits, replace(FACTS, cores=5)))
    untouched = replace(FACTS, packed=True, stored_size=0, cores=4)
    assert str(verdict(waits, untouched)).endswith(": pack at --size 256")
    small = replace(untouched, stored_size=256)
    assert str(verdict(waits, small)).endswith("--raw --size 256, which needs no decoding")
    raw = replace(untouched, stored_size=None)
    assert "more machines" in str(verdict(waits, raw))


def test_readers_that_are_busy_without_a_core_wait_for_storage():
    waits = Waits(seconds=100, input=40, communication=0, reading=390, on_cores=90)
    packed = replace(FACTS, packed=True, stored_size=256)
    assert "--data.local-copy" in str(verdict(waits, packed))
    assert "--data.local-copy" not in str(verdict(waits, FACTS))  # there is no pack to stage
    for decoding in (replace(waits, on_cores=350), replace(waits, on_cores=None)):
        assert "--data.local-copy" not in str(verdict(decoding, packed))


def test_advice_on_communication():
    waits = Waits(seconds=100, input=6, communication=22)
    facts = replace(FACTS, world=8, micros_a_worker=1.0)
    assert str(verdict(waits, facts)) == (
        "communication-bound 22 %: send gradients as fp16 (--plan torus --wire fp16) or use a "
        "larger batch or fewer than 8 workers"
    )
    exact = replace(facts, deterministic=True, micros_a_worker=16)
    assert str(verdict(waits, exact)).endswith("megabatch bench sync measures them all")


def test_advice_for_workers_of_one_machine_is_not_that_for_a_cluster():
    waits = Waits(seconds=100, input=0, communication=52)
    laptop = replace(FACTS, world=4, cores=1, cores_here=2, over_loopback=True)
    assert str(verdict(waits, laptop)) == (
        "communication-bound 52 %: 4 workers share 2 cores: fewer (--workers 2) wait less for each "
        "other"
    )
    roomy = replace(laptop, cores_here=16)
    assert verdict(waits, roomy).advice == "use a larger batch or fewer than 4 workers"
    assert verdict(waits, replace(roomy, micros_a_worker=8)).advice == ""


BOUND = Waits(seconds=100, input=31, communication=0, reading=10)
FREE = Waits(seconds=100, input=1, communication=0, reading=10)


def said(*epochs, facts=FACTS):
    verdicts = Verdicts()
    return [verdicts.hear(waits, facts) for waits in epochs]


def test_a_verdict_is_said_when_it_changes_and_its_advice_once():
    advice = "pack at --size 256"
    lines = said(FREE, BOUND, BOUND, BOUND, FREE, FREE, BOUND, BOUND)
    assert lines == [
        None, f"input-bound 31 %: {advice}", None, None, "compute-bound 99 %", None,
        "input-bound 31 %", None,
    ]  # fmt: skip


def test_a_share_about_the_threshold_does_not_flicker():
    above, below = replace(FREE, input=5.1), replace(FREE, input=4.9)
    assert [line is not None for line in said(above, below, above, below)] == [True] + 3 * [False]
    one, other = Waits(100, 21, 20), Waits(100, 20, 21)
    assert [line is not None for line in said(one, other, one, other)] == [True] + 3 * [False]


def test_short_epochs_are_taken_together():
    short = Waits(seconds=9, input=3, communication=0)
    lines = said(*5 * [short])
    assert [line is not None for line in lines] == [False, False, True, False, False]


def test_a_summary_says_what_was_waited_for_if_it_was():
    verdicts = Verdicts()
    assert verdicts.summary() is None
    for waits in (BOUND, replace(FREE, communication=49)):
        verdicts.hear(waits, FACTS)
    assert verdicts.summary() == (
        "of 200 s of training the first worker waited 16 % for images, 24 % for other workers"
    )
    free = Verdicts()
    free.hear(FREE, FACTS)
    assert free.summary() is None


@pytest.mark.parametrize(("images", "world", "idle"), [(64, 4, 0), (64, 5, 1), (65, 5, 0)])
def test_workers_without_a_micro_batch_are_warned_of(images, world, idle):
    words = idle_workers(images, 16, world, ", or a smaller --micro")
    if not idle:
        assert words is None
    else:
        assert words == (
            "warning: 1 of 5 workers idle, for 64 images are 4 micro-batches of 16: use --workers "
            "4, or a smaller --micro"
        )


def test_a_run_of_few_steps_is_warned_of():
    assert few_steps([64, 128], 1000, 40) is None
    assert few_steps([64, 256], 159, 6) == (
        "warning: 6 steps in all are few to learn in, for 159 training images, and a batch of 256 "
        "is all of them: use a smaller --batch, or more --epochs"
    )
    assert "1 step in all is few to learn in" in few_steps([64], 159, 1)


def test_a_rate_that_no_net_bears_is_warned_of():
    """CIFAR-10 with the digits' rate for a batch of 512 ended its first epoch at 10 %."""
    lars = recipes.digits().optimizer
    assert bold_rate(16, lars) is None
    for calm in (replace(lars, trust=None), replace(lars, policy="clip")):
        assert bold_rate(128, calm) is None
    assert bold_rate(128, lars) == (
        "warning: at the peak rate of 128 LARS moves every layer by 13 % of its norm a step, and "
        "few nets learn so: use a smaller --lr.reference, or a smaller --batch"
    )
    for name in recipes.RECIPES:
        config = recipes.named(name)
        assert bold_rate(config.lr.peak(config.batch), config.optimizer) is None, name


def test_a_small_share_is_named_with_advice_or_not_at_all():
    plain = replace(FACTS, world=2, over_loopback=True, cores_here=2, micros_a_worker=4)
    assert Verdicts().hear(Waits(100, 0, 7), plain) is None
    assert Verdicts().hear(Waits(100, 0, 20), plain) == "communication-bound 20 %"
    advised = replace(plain, micros_a_worker=1)
    assert "larger batch" in Verdicts().hear(Waits(100, 0, 7), advised)


def test_small_waits_are_not_worth_a_word():
    assert str(verdict(Waits(100, 3, 4), FACTS)) == "compute-bound 93 %"
    assert verdict(Waits(0, 0, 0), FACTS).bound == "compute"


def test_decoding_that_is_in_the_way_of_computing_is_named():
    waits = Waits(seconds=100, input=1, communication=0, reading=90)
    facts = replace(FACTS, readers="threads")
    assert str(verdict(waits, facts)).startswith("compute-bound 99 %: part of it is decoding")
    assert str(verdict(waits, facts)).endswith("try --data.processes always")
    idle = replace(waits, reading=2)
    assert verdict(idle, facts).advice == verdict(waits, FACTS).advice == ""


def test_a_clock_starts_afresh_with_each_epoch():
    now = [0.0]
    clock = Clock(before=100.0, now=lambda: now[0])
    now[0] = 10.0
    clock.waited_for_others(3.0)
    assert clock.lap(2.0, 5.0, 4.0) == Waits(10.0, 2.0, 3.0, 5.0, 4.0)
    now[0] = 15.0
    clock.passed_over(4.0)
    clock.waited_for_others(1.0)
    assert clock.lap(2.5, 6.0, 4.5) == Waits(1.0, 0.5, 1.0, 1.0, 0.5)
    assert (clock.seconds, clock.training_seconds) == (115.0, 11.0)


def test_threads_end_with_the_loader(monkeypatch):
    before = set(threading.enumerate())
    source = Asked(0.001)
    measured(source, monkeypatch, lambda _: source.allowed.release(), micro_batches=2)
    assert set(threading.enumerate()) <= before


def efforts(*seconds, micro_batches=12):
    return [Effort(f"host{rank}", one, micro_batches) for rank, one in enumerate(seconds)]


def test_a_rank_a_fifth_slower_than_the_rest_is_named_with_its_host():
    found = straggler(efforts(10.0, 10.2, 12.1, 9.9))
    assert (found.rank, found.host, round(found.slower, 2)) == (2, "host2", 0.21)
    assert straggler(efforts(10.0, 10.2, 11.0, 9.9)) is None
    assert straggler(efforts(10.0)) is None
    assert straggler(efforts(10.0, 12.5)).rank == 1


def test_who_was_dealt_more_is_no_straggler():
    uneven = [*efforts(10.0, 10.0), *efforts(20.0, 20.0, micro_batches=24)]
    assert straggler(uneven) is None
    idle = Effort("host4", 0.1, 0)
    assert straggler([*uneven, idle, idle]) is None


def test_a_straggler_is_said_once_and_not_on_a_crowded_machine():
    waits = Waits(12.0, 0.0, 2.0)
    slow, cluster = efforts(10.0, 12.0, 10.0), replace(FACTS, world=3)
    verdicts = Verdicts()
    heard = [verdicts.hear(waits, cluster, slow) for _ in range(6)]
    assert heard == [None, STRAGGLER, None, None, None, None]
    crowded = replace(cluster, over_loopback=True, cores_here=2)
    verdicts = Verdicts()
    assert "slower than the rest" not in str(
        [verdicts.hear(waits, crowded, slow) for _ in range(6)]
    )


STRAGGLER = (
    "rank 1 (host1) is 20 % slower than the rest, who wait for it: look at its clock rate, "
    "cooling, storage and what else runs there"
)


class Paced(nn.Sequential):
    """A net whose passes take as long as it is told, by a clock that nothing else moves."""

    def __init__(self, clock, seconds):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.clock, self.seconds = clock, seconds

    def forward(self, images):
        if self.training:
            self.clock[0] += self.seconds
        return super().forward(images)


def paced_runs(folder, paces):
    """What is said of runs whose ranks take so many seconds a pass, each on a host of its own; who
    waits for the others goes on when the last of them has come."""
    rank, clock = int(os.environ["RANK"]), [0.0]
    time.perf_counter = lambda: clock[0]
    between_steps.Clock = partial(Clock, now=time.perf_counter)
    platform.node = lambda: f"host{rank}"
    cluster = replace(Cluster.from_env(device="cpu"), local_world=1)
    waited = Lane.wait

    def wait(lane):
        waited(lane)
        clock[0] = max(cluster.gather(clock[0]))

    Lane.wait = wait
    config = replace(CONFIG, batch=240, micro=80, stages=(), epochs=2, deterministic=True)
    said = []
    for name, seconds in paces.items():
        with contextlib.redirect_stderr(io.StringIO()) as words:
            train(config, Paced(clock, seconds[rank]), out=folder / name, cluster=cluster)
        said.append(words.getvalue())
    cluster.leave()
    return said


def test_the_rank_that_is_a_fifth_slower_is_named_with_its_host_and_nobody_else(tmp_path):
    """Three real workers, whose waits are counted by a clock of the test's own."""
    paces = {
        "alike": (5.0, 5.0, 5.0),
        "first": (6.0, 5.0, 5.0),
        "last": (5.0, 5.0, 6.0),
        "a tenth": (5.0, 5.5, 5.0),
        "in the middle": (5.0, 6.0, 5.0),
    }
    slow = {"first": 0, "last": 2, "in the middle": 1}
    said = run_local(3, paced_runs, tmp_path, paces)
    for (name, seconds), words in zip(paces.items(), said, strict=True):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        waits = [record for record in map(json.loads, lines) if record["kind"] == "waits"]
        passes = [6, 6]  # of 1,437 images in steps of 240
        for record, count in zip(waits, passes, strict=True):
            assert record["seconds"] == pytest.approx(count * max(seconds))
            assert record["communication"] == pytest.approx(count * (max(seconds) - seconds[0]))
        named = {record.get("slow_rank") for record in waits}
        assert named == {slow.get(name)}, name
        assert words.count("slower than the rest") == (name in slow)
        if name in slow:
            sentence = STRAGGLER.replace("rank 1 (host1)", "rank {0} (host{0})")
            assert sentence.format(slow[name]) in " ".join(words.split())
            assert [record["slower"] for record in waits] == pytest.approx([0.2, 0.2])
