"""The recipe that follows the batch: settings of any batch, from rows that were verified.

Rates, warm-up and epochs go with the logarithm of the batch between two rows; momentum, decay and
optimizer are the nearest row's. On data of another size a batch is taken for the one that is the
same share of the rows' data set, which has as many steps an epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, log
from typing import Any

from megabatch.config import Config

Row = Any
"""a named tuple with batch, rate, warmup, epochs, and what else its recipe needs"""

# What a run loses that ends early: ResNet-50 on ImageNet by FFCV's authors, whose runs of 40, 32,
# 24 and 16 epochs (each with a schedule of its own) end with 77.2, 76.6, 75.6 and 73.8 %.
_LOST = ((1.0, 0.0), (0.8, 0.6), (0.6, 1.6), (0.4, 3.4))


def row_at(rows: Sequence[Row], batch: float) -> Row:
    """The settings of a batch: a row's own at the row, between those of two neighbours elsewhere.

    Outside the rows, and between two that do not have the same optimizer, the nearest row's, with
    the rate in proportion to the batch; Muon's as it is.
    """
    nearest = _nearest(rows, batch)
    if nearest.batch == batch:
        return nearest
    for below, above in itertools.pairwise(rows):
        if below.batch <= batch <= above.batch and _alike(below, above):
            fraction = log(batch / below.batch) / log(above.batch / below.batch)
            between = {
                name: _between(getattr(below, name), getattr(above, name), fraction)
                for name in ("rate", "warmup", "epochs")
            }
            if hasattr(nearest, "unadapted_rate"):  # a share: the rate that it makes goes along
                low, high = (row.rate * row.unadapted_rate for row in (below, above))
                between["unadapted_rate"] = _between(low, high, fraction) / between["rate"]
            return nearest._replace(batch=batch, **between)
    carried = nearest.rate if _keeps_rate(nearest) else nearest.rate * batch / nearest.batch
    return nearest._replace(batch=batch, rate=carried)


def _nearest(rows: Sequence[Row], batch: float) -> Row:
    return min(rows, key=lambda row: abs(log(row.batch / batch)))


def _keeps_rate(row: Row) -> bool:
    """Muon's rate is the share of a weight that a step is long: it grows slowly with the batch (72
    at 4,096, 96 at 8,192), and beyond some length nothing is learnt."""
    return bool(getattr(row, "optimizer", None) == "muon")


def _alike(one: Any, other: Any) -> bool:
    return bool(getattr(one, "optimizer", None) == getattr(other, "optimizer", None))


def _tried(row: Row) -> bool:
    return bool(getattr(row, "tried", True))


def _between(low: float, high: float, fraction: float) -> float:
    return low + fraction * (high - low)


def proportional_batch(batch: int, images: int | None, of: int) -> float:
    """The batch that is the same share of `of` images."""
    return batch if images is None else batch * of / images


def fitted(config: Config) -> Config:
    """The config with passes that its batches are made of: at most micro images, by whole spans;
    where spans do not divide a batch, of the most images below that do."""
    common = gcd(*(stage.batch for stage in config.all_stages))
    span = _dividing(common, config.span)
    spans = _dividing(common // span, max(1, config.micro // span))
    return replace(config, span=span, micro=spans * span)


def _dividing(number: int, most: int) -> int:
    return next(found for found in range(most, 0, -1) if number % found == 0)


def in_doubt(rows: Sequence[Row], batch: float, given: int) -> str | None:
    """What is not known of a batch outside the rows, between two of different optimizers, or at one
    that nobody has tried, in one sentence; `given` is what it was called before it was carried over
    from other data."""
    least, most = rows[0].batch, rows[-1].batch
    around = [two for two in itertools.pairwise(rows) if two[0].batch < batch < two[1].batch]
    between = [
        f"between {below.batch:,} and {above.batch:,}, which have different optimizers"
        for below, above in around
        if not _alike(below, above)
    ]
    row = _nearest(rows, batch)
    carried = "" if batch == given else f", by its share of the images {batch:,.0f} there,"
    if row.batch == batch and not _tried(row):
        return (
            f"a batch of {given:,}{carried} has settings that were carried over to it and never "
            f"run: they may want tuning"
        )
    untried = [f"{one.batch:,}" for two in around for one in two if not _tried(one)]
    if untried and not between:
        return (
            f"a batch of {given:,}{carried} has settings between rows of which {untried[0]} was "
            f"carried over and never run: they may want tuning"
        )
    if least <= batch <= most and not between:
        return None
    side = "below" if batch < least else "above"
    place = "".join(between) or f"{side} what was verified ({least:,} to {most:,})"
    rate = "" if _keeps_rate(row) else " with the rate in proportion"
    return (
        f"a batch of {given:,}{carried} lies {place}: the settings are those of "
        f"{row.batch:,}{rate}, and may want tuning"
    )


def few_in_a_span(config: Config, wanted: int) -> str | None:
    """What a batch that is not made of such spans has instead, in one sentence, where that is less
    than half of it."""
    batch, span = config.batch, config.span
    if batch % wanted == 0 or 2 * span >= min(wanted, batch):
        return None
    better = round(batch / wanted) * wanted
    passes = batch // config.micro
    slow = f", and takes {passes:,} passes, slow ones" if passes > batch // wanted else ""
    return (
        f"a batch of {batch:,} is made of spans of {span} image{'s' * (span != 1)}, too few for "
        f"batch norm's statistics{slow}: {better:,} has spans of {wanted}"
    )


def lost_points(epochs: float, needed: float) -> float | None:
    """Points of top-1 that a run of `epochs` is expected to lose whose batch needs more; None for
    a run shorter than any that was measured."""
    fraction = epochs / needed
    if fraction >= 1:
        return 0.0
    for (high, less), (low, more) in itertools.pairwise(_LOST):
        if fraction >= low:
            return less + (high - fraction) / (high - low) * (more - less)
    return None


def cut_short(epochs: float, needed: float, batch: int) -> str | None:
    """What a run with fewer epochs than its batch needs is expected to cost, in one sentence."""
    lost = lost_points(epochs, needed)
    if lost == 0:
        return None
    cost = f"more than {_LOST[-1][1]:g}" if lost is None else f"about {lost:.1f}"
    return (
        f"a batch of {batch:,} has {needed:.3g} epochs in its row: {epochs:g} are expected to cost "
        f"{cost} points of top-1, as they did on ImageNet"
    )
