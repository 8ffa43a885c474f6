"""One step as two timelines, backward and the wire, bucket by bucket: a bucket leaves when it is
full and the wire is free (wait-free back-propagation, as in Shi 2019). Where the cores that compute
also send, backward has what sending leaves of them.

Workers wait for the slowest: with a spread of sigma, the slowest of N takes sigma * z(N) longer
than the mean, z(N) being the expected maximum of N standard normal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

from megabatch.errors import UserError
from megabatch.planner.cost import Price
from megabatch.planner.machine import Machine, Rate
from megabatch.planner.workload import Workload, usual

FORWARD = 1 / 3  # of a pass: backward makes two products where forward makes one

WIRES = {"fp32": 4, "fp16": 2, "bf16": 2}


class Bucket(NamedTuple):
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
class Step:
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


def buckets(workload: Workload, limit_mb: float, wire: str) -> list[Bucket]:
    """Gradients in the order of backward, fused up to so many megabytes of fp32, as the trainer
    does."""
    found: list[Bucket] = []
    elements = 0
    for size, ready in workload.gradients():
        if not found or 4 * (elements + size) > limit_mb * 1e6:
            found.append(Bucket(0.0, 0.0))
            elements = 0
        elements += size
        found[-1] = Bucket(float(elements * WIRES[wire]), ready)
    return found


def send(
    full: Sequence[Bucket], price: Price, began: float, backward: float, lanes: int = 1
) -> list[Sent]:
    """When each bucket leaves and arrives. Lanes hide each other's latency and share the wire.

    A bucket is on the wire no shorter than the cores work on it.
    """
    free, wire_free = [0.0] * lanes, 0.0
    sent: list[Sent] = []
    for number, bucket in enumerate(full):
        lane = number % lanes
        ready = held_up(began + bucket.ready * backward, sent)
        start = max(ready, free[lane], wire_free)
        work = price.work(bucket.nbytes)
        wire_free = start + max(price.seconds_per_byte * bucket.nbytes, work)
        free[lane] = wire_free + price.latency
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
    full: Sequence[Bucket],
    price: Price,
    *,
    slowest: float = 0.0,
    lanes: int = 1,
    overlap: bool = True,
    input_seconds: float = 0.0,
) -> Step:
    """A step of so many passes, the last of which sends while it goes back.

    `slowest` is how much longer the slowest worker computes, as a share; `input_seconds` what the
    images of a step take to read and decode, which goes on meanwhile.
    """
    compute = passes * pass_seconds
    backward = (1 - FORWARD) * pass_seconds
    if not overlap:
        full = [Bucket(bucket.nbytes, 1.0) for bucket in full]
    sent = send(full, price, compute - backward, backward, lanes)
    arrived = max((bucket.end for bucket in sent), default=0.0)
    exposed = max(held_up(compute, sent), arrived) - compute
    busy = compute * (1 + slowest) + exposed
    waiting = max(0.0, input_seconds - busy)
    return Step(
        busy + waiting,
        compute - backward,
        backward,
        exposed,
        compute * slowest,
        waiting,
        tuple(sent),
    )


@cache
def expected_maximum(count: int) -> float:
    """Of so many standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def pass_seconds(machine: Machine, workload: Workload, images: int) -> float:
    """What one worker alone needs for a forward and backward pass and its part of the update.

    Between two measured sizes a straight line, which goes on below the smallest (a fixed cost and a
    cost an image); above the largest its images/s stay. One size alone stands for all. A model that
    was not measured pays the fixed cost of one that was, and its cost an image by multiply-adds.
    """
    model, rows = _rows(machine, workload.name)
    times = {row.micro: _alone(row, machine) for row in rows}
    if model == workload.name:
        return _line(times, images)
    scale = workload.multiply_adds / usual(model).multiply_adds
    if len(times) == 1:
        return scale * _line(times, images)
    fixed = max(0.0, _line(times, 0))
    return fixed + scale * (_line(times, max(times)) - fixed) / max(times) * images


def unmeasured(machine: Machine, workload: Workload) -> Iterator[str]:
    """What had to be carried over from another model or size, in words."""
    model, rows = _rows(machine, workload.name)
    if model != workload.name:
        yield (
            f"{workload.name} was not measured on {machine.name}: its speed is {model}'s by "
            f"multiply-adds"
        )
    if len({row.micro for row in rows}) == 1:
        size = rows[0].micro
        yield f"{model} was measured at {size} images only: other sizes count as equally fast"


def _rows(machine: Machine, model: str) -> tuple[str, list[Rate]]:
    """The rates of a model, by size; of another one if there are none."""
    if not machine.rates:
        raise UserError(
            f"{machine.name} has no images/s of any model: megabatch bench step adds them"
        )
    if all(row.model != model for row in machine.rates):
        model = machine.rates[-1].model
    # of two rows of one size, that of fewer workers comes last and stays
    rows = sorted(
        (row for row in machine.rates if row.model == model),
        key=lambda row: (row.micro, -row.workers),
    )
    return model, rows


def _alone(row: Rate, machine: Machine) -> float:
    """A row measured on several workers holds their waiting for the slowest."""
    return row.micro / row.images_per_second / (1 + machine.jitter * expected_maximum(row.workers))


def _line(times: dict[int, float], images: int) -> float:
    sizes = list(times)
    if len(sizes) == 1:
        return times[sizes[0]] * images / sizes[0]
    if images > sizes[-1]:
        return times[sizes[-1]] * images / sizes[-1]
    low, high = next(pair for pair in pairwise(sizes) if images <= pair[1])
    slope = (times[high] - times[low]) / (high - low)
    found = times[low] + slope * (images - low)
    # noise must not make a small pass free: it is never faster an image than the nearest rows
    return max(found, min(times[size] * images / size for size in (low, high)))
