"""One worker's time by images in a pass: measured, or carried over from what was measured.

One measured size gives all others by the chip's curve (chips.py); several give a line between them
and need no curve. Another model's pass is reckoned from layers, multiply-adds and what it writes to
memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

from megabatch.errors import UserError
from megabatch.planner.chips import Chip
from megabatch.planner.machine import Machine, Rate
from megabatch.planner.nets import BUILDERS
from megabatch.planner.workload import Workload, usual

# Of a pass in half precision on one H200, nets as torch has them (passes-h200.jsonl in
# results/planner): VGG-16 and ResNet-50 give both constants, ResNet-152 and ViT-B/16 are met within
# 10 % by them.
REACHED = 0.52  # of the chip's operations a second
TIMES_MOVED = 15.7  # that each element a layer puts out goes to or from memory
# What better software saves is moves: a ResNet-50 compiled whole makes 0.58 of them. Kernels made
# for one family save more (this trainer's for ResNets: 0.24 are left), but not for another's nets.
COMPILED = 0.58
UPDATE_BYTES = 32  # that an optimiser moves for a parameter: gradient, weight, momentum, norms
KEPT_TIMES = 1.5  # what a pass keeps of each element for backward, workspace included
STATE_BYTES = 16  # that a parameter keeps: weight, gradient, momentum, half copies


@cache
def expected_maximum(count: int) -> float:
    """Of so many standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Pace:
    """Seconds of a pass by its images: points that were measured, or a fixed part and one for each
    image."""

    points: tuple[tuple[int, float], ...] = ()
    fixed: float = 0.0
    each: float = 0.0

    def seconds(self, images: int) -> float:
        if not self.points:
            return self.fixed + self.each * images
        return _line(dict(self.points), images)


def pace(machine: Machine, workload: Workload, curve: float = 1.0) -> Pace:
    """Of one worker alone, with its part of the update. `curve`: so many times the fixed cost that
    the chip's curve has."""
    model, rows = _rows(machine, workload.name)
    times = {row.micro: _alone(row, machine) for row in rows}
    known = workload if model == workload.name and model not in BUILDERS else usual(model)
    chip = machine.generation
    same = model == workload.name and _alike(workload, known)
    if same and len(times) > 1:
        return Pace(tuple(times.items()))
    fixed, each = _split(times, chip, known, curve)
    if same:
        return Pace(fixed=fixed, each=each)
    more = max(0, workload.parameters - known.parameters)
    update = UPDATE_BYTES * more / chip.memory_bytes_per_second
    return Pace(
        fixed=fixed * len(workload.layers) / len(known.layers) + update,
        each=_carried_over(each, chip, known, workload),
    )


def _carried_over(each: float, chip: Chip, known: Workload, workload: Workload) -> float:
    """An image of another model where one of a known model takes so long: products take their time
    with any software, and moves are saved as they are there, in one family of nets."""
    products, moves = _products(chip, known), _moves(chip, known)
    if each >= products + moves:
        return each * image_seconds(chip, workload) / (products + moves)
    made = max(0.0, each - products) / moves  # of the moves
    if family(known.name) != family(workload.name):
        made = max(made, COMPILED)
    faster = min(1.0, each / products)
    return max(faster * (_products(chip, workload) + made * _moves(chip, workload)), 1e-12)


def family(model: str) -> str:
    """resnet of resnet50, say."""
    return re.split(r"[^a-z]", model.lower())[0]


def half_images(chip: Chip, workload: Workload) -> float:
    """The images whose time is as long as the fixed cost of a pass: the chip's for ResNet-50, by
    number of layers and their work for any other."""
    slower = image_seconds(chip, workload) / image_seconds(chip, usual("resnet50"))
    return chip.half * _layers(workload) / slower


def _layers(workload: Workload) -> float:
    """In times of ResNet-50's."""
    return len(workload.layers) / len(usual("resnet50").layers)


def image_seconds(chip: Chip, workload: Workload) -> float:
    """One more image in a large pass: what it computes and what it moves to and from memory."""
    return max(_products(chip, workload) + _moves(chip, workload), 1e-12)


def _products(chip: Chip, workload: Workload) -> float:
    return 6 * workload.multiply_adds / (REACHED * chip.flops)


def _moves(chip: Chip, workload: Workload) -> float:
    return TIMES_MOVED * chip.bytes_each * workload.outputs / chip.memory_bytes_per_second


def largest_micro(machine: Machine, workload: Workload) -> int:
    """Images of one pass: as the machine says, or as many as its chip's memory holds."""
    if machine.largest_micro is not None:
        return machine.largest_micro
    chip = machine.generation
    if not chip.memory_bytes or not workload.outputs:
        return 1024
    free = 0.9 * chip.memory_bytes - STATE_BYTES * workload.parameters
    fits = int(free / (KEPT_TIMES * chip.bytes_each * workload.outputs))
    if fits < 1:
        raise UserError(
            f"one image of {workload.name} does not fit into the {chip.memory_bytes / 1e9:g} GB of "
            f"{machine.name}'s workers: take a machine with more memory"
        )
    return fits


def is_measured(machine: Machine, workload: Workload) -> bool:
    """Whether images/s are known of the very model at several sizes."""
    model, rows = _rows(machine, workload.name)
    same = model == workload.name and (model not in BUILDERS or _alike(workload, usual(model)))
    return same and len({row.micro for row in rows}) > 1


def unmeasured(machine: Machine, workload: Workload) -> Iterator[str]:
    """What had to be carried over from another model or size, in words."""
    model, rows = _rows(machine, workload.name)
    if model != workload.name:
        yield (
            f"{workload.name} was not measured on {machine.name}: its speed is reckoned from "
            f"{model}'s by multiply-adds and memory"
        )
    elif model in BUILDERS and not _alike(workload, usual(model)):
        yield f"{model} was measured on other images: its speed is reckoned for these"
    sizes = {row.micro for row in rows}
    if len(sizes) == 1:
        yield (
            f"{model} was measured at {rows[0].micro} images only: other sizes follow the curve "
            f"of {machine.generation.name} ({machine.generation.source})"
        )


def _alike(one: Workload, other: Workload) -> bool:
    return abs(one.multiply_adds - other.multiply_adds) <= 0.01 * other.multiply_adds


def _rows(machine: Machine, model: str) -> tuple[str, list[Rate]]:
    """The rates of a model, by size; of another one if there are none."""
    if not machine.rates:
        raise UserError(
            f"{machine.name} has no images/s of any model: megabatch bench step adds them"
        )
    if all(row.model != model for row in machine.rates):
        known = [row.model for row in machine.rates if row.model in BUILDERS]
        if not known:
            raise UserError(
                f"{machine.name} has images/s of {machine.rates[-1].model} only, which nothing is "
                f"known of: measure {model} with megabatch bench step"
            )
        alike = [name for name in known if family(name) == family(model)]
        model = alike[0] if alike else "resnet50" if "resnet50" in known else known[-1]
    # of two rows of one size, that of fewer workers comes last and stays
    rows = sorted(
        (row for row in machine.rates if row.model == model),
        key=lambda row: (row.micro, -row.workers),
    )
    return model, rows


def _alone(row: Rate, machine: Machine) -> float:
    """A row measured on several workers holds their waiting for the slowest."""
    return row.micro / row.images_per_second / (1 + machine.jitter * expected_maximum(row.workers))


def _split(
    times: dict[int, float], chip: Chip, known: Workload, curve: float
) -> tuple[float, float]:
    """The fixed part of a pass and that of an image: from the two ends if several sizes were
    measured, else from the chip's curve."""
    largest = max(times)
    if len(times) == 1:
        half = curve * half_images(chip, known)
        fixed = times[largest] * half / (largest + half)
        if chip.fixed_seconds is not None:
            fixed = min(curve * chip.fixed_seconds * _layers(known), 0.9 * times[largest])
        return fixed, (times[largest] - fixed) / largest
    fixed = min(max(0.0, _line(times, 0)), 0.9 * min(times.values()))
    return fixed, (times[largest] - fixed) / largest


def _line(times: dict[int, float], images: int) -> float:
    """Between two sizes a straight line, which goes on below the smallest; above the largest its
    images/s stay."""
    sizes = list(times)
    if images > sizes[-1]:
        return times[sizes[-1]] * images / sizes[-1]
    low, high = next(pair for pair in pairwise(sizes) if images <= pair[1])
    slope = (times[high] - times[low]) / (high - low)
    found = times[low] + slope * (images - low)
    # noise must not make a small pass free: it is never faster an image than the nearest rows
    return max(found, min(times[size] * images / size for size in (low, high)))
