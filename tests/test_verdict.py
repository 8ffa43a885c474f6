"""The verdict: right on injected delays, and advice that follows from the facts."""

import statistics
import threading
import time
from dataclasses import replace

import pytest
import torch

from megabatch.batch import steps
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import Loader
from megabatch.data.source import Memory
from megabatch.runs.verdict import Clock, Facts, Waits, verdict

FACTS = Facts(threads=4, cores=8, size=224)


class Delayed(Memory):
    """Images that take a while."""

    instant = False

    def __init__(self, seconds):
        super().__init__(torch.zeros(512, 1, 2, 2, dtype=torch.uint8), torch.zeros(512).long(), 2)
        self._seconds = seconds

    def read(self, indices, draws):
        time.sleep(self._seconds)
        return super().read(indices, draws)


def slept(seconds):
    """How long it was in the end."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def epoch(input_, communication, compute, pause=0.0, threads=1):
    """Train for eight steps of one micro-batch with the given delays, in seconds a step, after one
    that is not counted: the very first images are always waited for."""
    config = Config(batch=4, micro=4, span=4, epochs=20, data=Data(size=2, threads=threads))
    alone = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
    loader = Loader(Delayed(input_), None, config, alone, torch.float32)
    clock = Clock()
    for step in list(steps(config.all_stages, 512, 1))[:9]:
        if step.index == 1:
            clock.lap(loader.waited_seconds, loader.busy_seconds)
        for _ in loader.share(step):
            time.sleep(compute)
        clock.waited_for_others(slept(communication))
        clock.passed_over(slept(pause))
    waits = clock.lap(loader.waited_seconds, loader.busy_seconds)
    loader.close()
    return waits


# Of reading, what computing and communicating do not hide is waited for. A step is 30 ms or more,
# so that a busy machine's hiccups of a few milliseconds do not turn the outcome.
CASES = {
    "nothing waits": ((0.000, 0.000, 0.030), "compute"),
    "reading is hidden by computing": ((0.010, 0.000, 0.040), "compute"),
    "reading and computing are even": ((0.015, 0.000, 0.045), "compute"),
    "reading takes twice as long": ((0.060, 0.000, 0.030), "input"),
    "nothing but reading": ((0.040, 0.000, 0.000), "input"),
    "reading longest, some communication": ((0.090, 0.010, 0.010), "input"),
    "two threads are not enough": ((0.120, 0.000, 0.020, 0.0, 2), "input"),
    "four threads hide it": ((0.040, 0.000, 0.050, 0.0, 4), "compute"),
    "communication": ((0.000, 0.020, 0.030), "communication"),
    "nothing but communication": ((0.000, 0.040, 0.000), "communication"),
    "communication hides reading": ((0.020, 0.060, 0.010), "communication"),
    "evaluation counts for nothing": ((0.000, 0.000, 0.030, 0.040), "compute"),
    "evaluation does not hide communication": ((0.000, 0.020, 0.020, 0.040), "communication"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_injected_is_what_is_found(case):
    delays, bound = CASES[case]
    # Real sleeps: on a busy machine one may last far longer than asked for, but hardly thrice.
    found = [verdict(epoch(*delays), FACTS) for _ in range(3)]
    assert statistics.mode(verdict.bound for verdict in found) == bound, found


def test_the_shares_are_those_of_the_time():
    waits = epoch(0.05, 0.0, 0.02)
    assert 0.4 < waits.input / waits.seconds < 0.8  # 30 of 50 ms, and the first in full
    assert waits.reading >= 8 * 0.05
    assert waits.communication < 0.1 * waits.seconds


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


def test_small_waits_are_not_worth_a_word():
    assert str(verdict(Waits(100, 3, 4), FACTS)) == "compute-bound 93 %: nothing to wait for"
    assert verdict(Waits(0, 0, 0), FACTS).bound == "compute"


def test_decoding_that_is_in_the_way_of_computing_is_named():
    waits = Waits(seconds=100, input=1, communication=0, reading=90)
    facts = replace(FACTS, readers="threads")
    assert str(verdict(waits, facts)).startswith("compute-bound 99 %: part of it is decoding")
    assert str(verdict(waits, facts)).endswith("try --data.processes always")
    idle = replace(waits, reading=2)
    assert str(verdict(idle, facts)).endswith(": nothing to wait for")
    assert str(verdict(waits, FACTS)).endswith(": nothing to wait for")


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


def test_threads_end_with_the_loader():
    before = threading.active_count()
    epoch(0.001, 0.0, 0.0)
    assert threading.active_count() == before
