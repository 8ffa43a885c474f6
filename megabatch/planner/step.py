"""One step as two timelines, backward and the wire, bucket by bucket: a bucket leaves when it is
full and the wire is free (wait-free back-propagation, as in Shi 2019). Where the cores that compute
also send, backward has what sending leaves of them.

Workers wait for the slowest: with a spread of sigma, the slowest of N takes sigma * z(N) longer
than the mean, z(N) being the expected maximum of N standard normal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megabatch.planner.cost import BySize, Price
from megabatch.planner.workload import Workload

FORWARD = 1 / 3  # of a pass: backward makes two products where forward makes one

WIRES = {"fp32": 4, "fp16": 2, "bf16": 2}


class SentBucket(NamedTuple):
    nbytes: float
    ready: float
    """share of backward that is over when its last gradient is there"""


class Sent(NamedTuple):
    """A bucket on the wire, in seconds from the beginning of the step."""

    nbytes: float
    ready: float
    start: float
    end: float
    off_wire: float
    """the next bucket may go; only latency is left of this one"""
    work: float
    """seconds for which it takes the cores from computing"""


@dataclass(frozen=True)
class StepForecast:
    seconds: float
    forward_seconds: float
    """and, with several passes, all passes before the last"""
    backward_seconds: float
    exposed_seconds: float
    """what sending adds: backward held up by its work, and waiting for the last bucket"""
    jitter_seconds: float
    """waiting for the slowest worker"""
    input_seconds: float
    """waiting for images"""
    sent: tuple[Sent, ...] = ()


def buckets(workload: Workload, limit_mb: float, wire: str) -> list[SentBucket]:
    """Gradients in the order of backward, fused up to so many megabytes of fp32, as the trainer
    does."""
    found: list[SentBucket] = []
    elements = 0
    for size, ready in workload.gradients():
        if not found or 4 * (elements + size) > limit_mb * 1e6:
            found.append(SentBucket(0.0, 0.0))
            elements = 0
        elements += size
        found[-1] = SentBucket(float(elements * WIRES[wire]), ready)
    return found


def send(
    full: Sequence[SentBucket],
    price: Price | BySize,
    began: float,
    backward: float,
    lanes: int = 1,
) -> list[Sent]:
    """When each bucket leaves and arrives. Lanes hide each other's latency and share the wire.

    A bucket is on the wire no shorter than the cores work on it.
    """
    free, wire_free = [0.0] * lanes, 0.0
    sent: list[Sent] = []
    works = price.works
    for number, bucket in enumerate(full):
        lane = number % lanes
        cost = price.of(bucket.nbytes)
        ready = began + bucket.ready * backward
        if works:
            ready = held_up(ready, sent)
        start = max(ready, free[lane], wire_free)
        work = cost.work(bucket.nbytes)
        wire_free = start + max(cost.seconds_per_byte * bucket.nbytes, work)
        free[lane] = wire_free + cost.latency
        sent.append(Sent(bucket.nbytes, ready, start, free[lane], wire_free, work))
    return sent


def held_up(moment: float, sent: Sequence[Sent]) -> float:
    """When computing gets to where it would be at a moment if nothing were sent.

    A bucket's work is spread evenly over its time on the wire; computing has the rest.
    """
    for bucket in sent:
        if moment <= bucket.start:
            break
        missing, rest = moment - bucket.start, bucket.off_wire - bucket.start - bucket.work
        if missing < rest:
            return moment + bucket.work * missing / rest
        moment += bucket.work
    return moment


def step(
    pass_seconds: float,
    passes: int,
    full: Sequence[SentBucket],
    price: Price | BySize,
    *,
    slowest: float = 0.0,
    lanes: int = 1,
    overlap: bool = True,
    input_seconds: float = 0.0,
    sending_share: float = 0.0,
) -> StepForecast:
    """A step of so many passes, the last of which sends while it goes back.

    `slowest` is how much longer the slowest worker computes, as a share; `input_seconds` what the
    images of a step take to read and decode, which goes on meanwhile; `sending_share` the share of
    computing that a collective takes while it is under way (a GPU's multiprocessors that send,
    wait and add).
    """
    compute = passes * pass_seconds
    backward = (1 - FORWARD) * pass_seconds
    if not overlap:
        full = [SentBucket(bucket.nbytes, 1.0) for bucket in full]
    sent = send(full, price, compute - backward, backward, lanes)
    arrived = max((bucket.end for bucket in sent), default=0.0)
    taken = 0.0
    if sending_share and overlap:
        under_way = sum(bucket.end - bucket.start for bucket in sent)
        taken = sending_share * min(under_way, backward)
    computed = taken + (held_up(compute, sent) if price.works else compute)
    exposed = max(computed, arrived) - compute
    busy = compute * (1 + slowest) + exposed
    waiting = max(0.0, input_seconds - busy)
    return StepForecast(
        busy + waiting,
        compute - backward,
        backward,
        exposed,
        compute * slowest,
        waiting,
        tuple(sent),
    )


def arrival(
    full: Sequence[SentBucket], price: Price, began: float, backward: float, lanes: int
) -> tuple[float, float]:
    """When the last bucket of `send` is there and how long all were under way, without the list;
    for one price without work."""
    free, wire_free, last = [0.0] * lanes, 0.0, 0.0
    latency, pace, lane, busy = price.latency, price.seconds_per_byte, 0, 0.0
    for nbytes, ready in full:
        start = max(began + ready * backward, free[lane], wire_free)
        wire_free = start + pace * nbytes
        busy += pace * nbytes + latency
        last = free[lane] = wire_free + latency
        lane = lane + 1 if lane + 1 < lanes else 0
    return max(last, *free), busy
