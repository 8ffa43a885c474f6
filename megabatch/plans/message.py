"""Slices and messages: what proof, price and run all read.

A slice is a fraction of a tensor, so messages are made once and hold for every length.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal, NamedTuple


class Slice(NamedTuple):
    """The part of a tensor from start/of to stop/of."""

    start: int
    stop: int
    of: int

    @property
    def share(self) -> Fraction:
        """Of the tensor, a fraction of 0 to 1."""
        return Fraction(self.stop - self.start, self.of)

    def within(self, outer: Slice) -> Slice:
        """This slice of that slice."""
        first, width = outer.start * self.of, outer.stop - outer.start
        return Slice(first + width * self.start, first + width * self.stop, outer.of * self.of)

    def bounds(self, length: int) -> tuple[int, int]:
        """The first element and the one after the last; equal if a short tensor leaves it empty."""
        return length * self.start // self.of, length * self.stop // self.of


WHOLE = Slice(0, 1, 1)


def piece(index: int, pieces: int) -> Slice:
    return Slice(index, index + 1, pieces)


class Message(NamedTuple):
    """In `step`, source sends a slice to destination, which adds it to its own or takes it over."""

    step: int
    source: int
    destination: int
    slice: Slice
    op: Literal["add", "copy"]


def in_order(messages: Iterable[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: (message.step, message.source))


def steps_in(messages: Iterable[Message]) -> int:
    return 1 + max((message.step for message in messages), default=-1)


def delay(messages: Iterable[Message], steps: int) -> list[Message]:
    return [message._replace(step=steps + message.step) for message in messages]
