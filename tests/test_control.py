"""The control vector: what each has put in is found under its name, summed once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch.batch import Step
from megabatch.sync import control
from megabatch.sync.control import Control, StepNumbers

NUMBERS = st.integers(-1000, 1000).map(float)  # whole: any order of summation is exact
MICRO = st.tuples(NUMBERS, st.tuples(NUMBERS, NUMBERS, NUMBERS), st.lists(NUMBERS, max_size=4))


@given(
    st.lists(MICRO, min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(0, 1 << 16),
)
def test_what_goes_in_comes_out_under_its_name(micros, stops, batch):
    width = min(len(statistics) for *_, statistics in micros)
    rows = torch.full((len(micros) + len(stops), control.length(width)), float("nan"))
    for row, (squares, counts, statistics) in zip(rows, micros, strict=False):
        control.pack_micro_batch(
            row, torch.tensor(squares), torch.tensor(counts), torch.tensor(statistics[:width])
        )
    for rank, (row, stop) in enumerate(zip(rows[len(micros) :], stops, strict=True)):
        control.pack_worker(row, stop, batch if rank == 0 else 0)
    total = Control(rows.sum(0))
    assert bool(total.good) and not bool(total.reached(0))
    assert total.mean_statistics(1).tolist() == [
        sum(statistics[place] for *_, statistics in micros) for place in range(width)
    ]

    numbers = total.for_host(torch.tensor(9.0), torch.tensor(4.0), torch.tensor(True)).tolist()
    step = Step(3, 96, 32, 0.5, 0)
    found = StepNumbers.unpack(step, numbers)
    loss, top1, top5 = (sum(counts[place] for _, counts, _ in micros) for place in range(3))
    assert found == StepNumbers(
        step,
        squares=sum(squares for squares, *_ in micros) / 16,  # the loss scale, squared, is undone
        stop=any(stops),
        batch=batch,
        loss=loss / 32,
        top1=top1 / 32,
        top5=top5 / 32,
        gradient_square=9.0,
        loss_scale=4.0,
        skipped=False,
    )
    resumed = StepNumbers.unpack(step, control.without_stop(numbers))
    assert not resumed.stop and resumed.batch == found.batch and resumed.squares == found.squares


def test_a_parameter_is_reached_if_any_worker_came_to_it():
    rows = torch.full((5, control.length(2, 3)), float("nan"))
    for row in rows[:2]:
        control.pack_micro_batch(row, torch.tensor(1.0), torch.ones(3), torch.tensor([4.0, 5.0]))
    for row, unreached in zip(rows[2:], ([0], [0, 1], [0, 1, 2]), strict=True):
        control.pack_worker(row, False, 0, 3, unreached)
    total = Control(rows.sum(0), 3)
    assert [bool(total.reached(index)) for index in range(3)] == [False, True, True]
    assert total.mean_statistics(2).tolist() == [4.0, 5.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_makes_the_step_not_count(bad):
    row = torch.zeros(control.length(2))
    control.pack_micro_batch(row, torch.tensor(bad), torch.ones(3), torch.ones(2))
    total = Control(row + torch.ones_like(row))
    assert not bool(total.good)
    numbers = total.for_host(torch.tensor(0.0), torch.tensor(1.0), total.good)
    assert StepNumbers.unpack(Step(0, 0, 1, 0.0, 0), numbers.tolist()).skipped


def test_counts_are_those_of_the_images():
    logits = torch.tensor(
        [
            [9.0, 1.0, 2.0, 3.0, 4.0, 5.0],  # the best
            [9.0, 1.0, 2.0, 3.0, 4.0, 5.0],  # the second
            [9.0, 1.0, 2.0, 3.0, 4.0, 5.0],  # the last
        ]
    )
    labels = torch.tensor([0, 5, 1])
    assert control.counts(logits, labels, torch.tensor(7.0)).tolist() == [7.0, 1.0, 2.0]
    two = control.counts(logits[:, :2], torch.tensor([0, 1, 1]), torch.tensor(7.0))
    assert two.tolist() == [7.0, 1.0, 3.0]
