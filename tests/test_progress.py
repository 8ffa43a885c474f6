"""What a run says of how far it is: a bar on a terminal, lines by time elsewhere, words whole."""

import io
import re

import pytest
import torch
from rich.console import Console

from megabatch.runs.progress import (
    EVERY_SECONDS,
    Bar,
    Due,
    Lines,
    SmoothSpeed,
    StepStanding,
    clock,
    counted,
    counting,
    say,
)

STANDING = StepStanding(
    step=1200, seen=81_920, epoch=3.214, batch=256, loss=2.3456, lr=12.8, images_per_second=2345.6,
    seconds=30, left=1269,
)  # fmt: skip


def console(width=80, terminal=False):
    return Console(
        file=io.StringIO(), width=width, force_terminal=terminal, markup=False, emoji=False,
        color_system=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (176523, "2 d 01:02:03")],
)
def test_durations(seconds, words):
    assert clock(seconds) == words


def test_a_line_holds_what_a_user_asks_and_fits_a_narrow_terminal():
    words = str(STANDING)
    assert words == (
        "epoch   3.21  step 1,200  loss 2.346  lr 12.8  2,346 images/s  0:30  left 21:09"
    )
    assert len(words) <= 80


def test_lines_come_by_time_and_not_by_step():
    now, out = [0.0], console()
    lines = Lines(out, lambda: now[0])
    said = []
    for second in range(2 * int(EVERY_SECONDS) + 6):
        now[0] = float(second)
        lines.show(STANDING)
        said.append(out.file.getvalue().count("\n"))
    assert [second for second in range(1, len(said)) if said[second] > said[second - 1]] == [
        5, 35, 65,
    ]  # fmt: skip


def test_what_is_soon_over_has_no_line():
    now = [0.0]
    due = Due(lambda: now[0])
    now[0] = 4.9
    assert not due()


def test_a_pace_forgets():
    pace = SmoothSpeed()
    assert pace.images_per_second == 0
    for _ in range(10):
        pace.add(100, 1.0)
    assert pace.images_per_second == pytest.approx(100)
    pace.add(300, 1.0)
    assert 100 < pace.images_per_second < 150  # one odd step is not the speed
    for _ in range(300):
        pace.add(300, 1.0)
    assert pace.images_per_second == pytest.approx(300, rel=1e-3)


def test_words_are_never_broken_and_never_read_as_markup():
    long = "the image [/x]/:smile:/[red]a b.jpg is input-bound: use --data.local-copy DIR " * 3
    for terminal in (True, False):
        out = console(terminal=terminal)
        say(out, long.strip())
        lines = out.file.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == long.strip()
        assert all(len(line) <= 80 for line in lines) is terminal
        assert (len(lines) == 1) is not terminal


def test_a_bar_shows_where_a_run_stands():
    out = console(terminal=True)
    bar = Bar(out, 90, 90 * 25_000)
    bar.show(STANDING)
    bar.evaluating()(100, 400)
    bar.close()
    shown = out.file.getvalue()
    assert "epoch 3.2/90" in shown and "evaluating 100 of 400" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert all(len(line.rstrip()) <= 80 for line in re.split(r"[\r\n]", plain))


def test_counting_changes_nothing_and_tells_how_far_it_is():
    batches = [(torch.zeros(n, 1), torch.zeros(n)) for n in (4, 4, 2)]
    told = []
    assert list(counted(batches, 20, 2, lambda *far: told.append(far))) == batches
    assert told == [(0, 20), (8, 20), (16, 20), (20, 20)]


def test_counting_in_a_log_is_silent_while_it_is_short():
    out = console()
    with counting("packing", out) as progress:
        for done in range(100):
            progress(done, 100)
    assert out.file.getvalue() == ""
