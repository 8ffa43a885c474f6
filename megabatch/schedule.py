"""Learning-rate schedules: frozen values that are called with the epoch, a float, and give a float.

The clock is images seen (epoch = seen / images in the data set), so a schedule means the same at
any batch size and needs no state to resume.
Sources: linear scaling and gradual warm-up, Goyal 2017; polynomial decay and the quadratic ramp,
You 2018.
"""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from megabatch.errors import UserError, nearest

Scaling = Literal["linear", "sqrt", "none"]
Ramp = Literal["linear", "quadratic", "constant"]


def linear_scaling(reference: float, batch: int, per: int | None = 256) -> float:
    """The rate for a global `batch` when `reference` is right for `per` images (None: for any
    batch)."""
    _check_number("linear_scaling", "reference", reference)
    _check_number("linear_scaling", "batch", batch)
    if per is not None:
        _check_number("linear_scaling", "per", per)
    return reference if per is None else reference * batch / per


def scaled(rate: float, batch: int, per: int | None, rule: Scaling = "linear") -> float:
    """The rate for a global `batch` when `rate` is right for `per` images, by a rule of scaling:
    Goyal's linear one, or the two that it is held against (square root, none)."""
    if per is None or rule == "none":
        return rate
    return linear_scaling(rate, batch, per) if rule == "linear" else rate * math.sqrt(batch / per)


@dataclass(frozen=True)
class Warmup:
    """From `start` to `to` in `epochs`, a little every step; quadratic is what LARS's authors ran,
    constant (`start` until the end, then a jump) what Goyal holds the gradual one against."""

    epochs: float
    to: float
    start: float = 0.0
    shape: Ramp = "linear"

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, epoch: float) -> float:
        gone = _gone(epoch, self.epochs)
        if self.shape == "constant":
            gone = math.floor(gone)
        if self.shape == "quadratic":
            gone *= gone
        return self.start * (1 - gone) + self.to * gone  # exact at both ends


@dataclass(frozen=True)
class Constant:
    epochs: float = math.inf
    start: float | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, epoch: float) -> float:
        return _known(self)


@dataclass(frozen=True)
class Poly:
    """From `start` to `end` as (1 - t)^power. `skip` epochs of the decay count as gone at its
    beginning: Caffe's poly policy counts from the first iteration of the run, warm-up included."""

    epochs: float
    power: float = 2.0
    start: float | None = None
    end: float = 0.0
    skip: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, epoch: float) -> float:
        left = 1.0 - _gone(epoch + self.skip, self.epochs + self.skip)
        return self.end + (_known(self) - self.end) * math.pow(left, self.power)


@dataclass(frozen=True)
class Cosine:
    epochs: float
    start: float | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, epoch: float) -> float:
        left = (1.0 + math.cos(math.pi * _gone(epoch, self.epochs))) / 2
        return self.end + (_known(self) - self.end) * left


@dataclass(frozen=True)
class StepDecay:
    """Times `factor` at each epoch of `at` (counted from the beginning of this piece)."""

    at: tuple[float, ...]
    factor: float = 0.1
    start: float | None = None
    epochs: float = math.inf

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, epoch: float) -> float:
        return _known(self) * self.factor ** sum(epoch >= at for at in self.at)


@dataclass(frozen=True)
class Join:
    """Pieces one after another, each called with the epochs since its own beginning; made by
    `join`."""

    pieces: tuple[Piece, ...]

    @property
    def epochs(self) -> float:
        return sum(piece.epochs for piece in self.pieces)

    def __call__(self, epoch: float) -> float:
        for piece in self.pieces[:-1]:
            if epoch < piece.epochs:
                return piece(epoch)
            epoch -= piece.epochs
        return self.pieces[-1](epoch)


Piece = Warmup | Constant | Poly | Cosine | StepDecay
Schedule = Piece | Join
P = TypeVar("P", Constant, Poly, Cosine, StepDecay)

# The names of the public face: mb.join(mb.warmup(5, to=29.0), mb.poly(85, power=2))
warmup, constant, poly, cosine = Warmup, Constant, Poly, Cosine
step_decay = StepDecay


def join(*pieces: Piece) -> Join:
    """One schedule of several; a piece without a `start` begins where the piece before it ended."""
    if not pieces:
        raise UserError("join needs at least one schedule")
    joined: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, Piece):
            raise UserError(
                f"join was given {piece!r}, which is no piece of a schedule: give warmup, "
                f"constant, poly, cosine or step_decay"
            )
        if joined and joined[-1].epochs == math.inf:
            raise UserError(
                f"the {_name(joined[-1])} never ends, so that nothing can be joined behind it: "
                f"give its epochs"
            )
        if not isinstance(piece, Warmup) and piece.start is None and joined:
            piece = replace(piece, start=joined[-1](joined[-1].epochs))
        joined.append(piece)
    return Join(tuple(joined))


def _gone(epoch: float, epochs: float) -> float:
    """The share of `epochs` that has passed, held within 0 and 1."""
    return min(max(epoch / epochs, 0.0), 1.0) if epochs > 0 else 1.0


def _name(piece: Piece) -> str:
    """As the public face has it."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(piece).__name__).lower()


_POSITIVE = ("power", "per")


def _check(piece: Piece) -> None:
    """Refuse a piece of which some number could never be right."""
    for one in fields(piece):
        value, name = getattr(piece, one.name), one.name
        if name == "shape":
            if value not in get_args(Ramp):
                known = nearest(str(value), get_args(Ramp))
                raise UserError(f"the shape of {_name(piece)} is {value!r}: {known}")
        elif name == "at":
            if not isinstance(value, tuple | list):
                raise UserError(f"the at of {_name(piece)} is {value!r}: give epochs, (30, 60) say")
            for at in value:
                _check_number(_name(piece), name, at)
        elif one.default not in (None, math.inf) or value != one.default:
            _check_number(_name(piece), name, value)


def _check_number(schedule: str, name: str, value: Any) -> None:
    plain = isinstance(value, numbers.Real) and not isinstance(value, bool)
    positive = name in _POSITIVE
    if not plain or not math.isfinite(value) or (value <= 0 if positive else value < 0):
        wanted = "above 0" if positive else "of at least 0"
        raise UserError(f"the {name} of {schedule} is {value!r}: give a finite number {wanted}")


def _known(piece: P) -> float:
    if piece.start is None:
        raise UserError(
            f"{_name(piece)} has no start: give start=, or join it to a piece before it"
        )
    return piece.start
