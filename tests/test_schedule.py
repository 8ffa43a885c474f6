"""Schedules: values at the corners, continuity at joins, the papers' tables."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from megabatch.config import LearningRate
from megabatch.errors import UserError
from megabatch.schedule import Constant, Cosine, Poly, StepDecay, Warmup, scaled

rates = st.floats(0.001, 100)
lengths = st.floats(0.5, 200)


@pytest.mark.parametrize(
    ("batch", "rate"), [(128, 0.05), (256, 0.1), (1024, 0.4), (8192, 3.2), (65536, 25.6)]
)
def test_linear_scaling_gives_goyals_table(batch, rate):
    assert mb.linear_scaling(0.1, batch) == rate


def test_an_absolute_rate_does_not_follow_the_batch():
    assert mb.linear_scaling(29.0, 32768, per=None) == 29.0


def test_the_public_example():
    lr = mb.join(mb.warmup(5, to=29.0), mb.poly(85, power=2))
    assert lr(0) == 0.0
    assert lr(2.5) == 14.5
    assert lr(5) == 29.0
    assert lr(5 + 42.5) == 29.0 / 4
    assert lr(90) == 0.0
    assert lr(200) == 0.0
    assert lr.epochs == 90


def test_the_quadratic_ramp_is_nvcaffes():
    # lr = r + (base - r) * (iter / N)^2, AlexNet at 8K: from 1 to 10 in 600 iterations.
    ramp = Warmup(600, to=10.0, start=1.0, shape="quadratic")
    assert [ramp(i) for i in (0, 300, 600)] == [1.0, 1.0 + 9.0 * 0.25, 10.0]


def test_goyals_constant_warm_up_jumps():
    lr = LearningRate(
        0.1, 256, warmup=5, start=0.1, ramp="constant", decay="steps", drop_at=(30,)
    ).over(8192, 90)
    assert [lr(epoch) for epoch in (0, 2.5, 4.999)] == [0.1] * 3
    assert lr(5) == 3.2
    assert Warmup(5, to=3.2, start=0.1, shape="constant")(5) == 3.2


def test_the_rules_that_goyal_holds_linear_scaling_against():
    # At 8k: fixed at 0.1, and 0.1 * sqrt(32)
    assert scaled(0.1, 8192, 256, "none") == 0.1
    assert scaled(0.1, 8192, 256, "sqrt") == 0.1 * 32**0.5
    assert scaled(0.1, 8192, 256) == mb.linear_scaling(0.1, 8192) == 3.2
    assert scaled(29.0, 8192, None, "sqrt") == 29.0


def test_poly_that_counts_from_the_first_step_of_the_run():
    decay = Poly(95, power=2, start=10.0, skip=5)
    assert decay(0) == 10.0 * (1 - 5 / 100) ** 2
    assert decay(95) == 0.0


def test_steps_drop_at_their_epoch_and_not_before():
    drops = StepDecay((30, 60, 80), 0.1, start=3.2)
    assert drops(29.999) == 3.2
    assert drops(30) == 3.2 * 0.1
    assert drops(85) == pytest.approx(3.2e-3)


def test_goyals_schedule_from_the_config():
    lr = LearningRate(0.1, 256, warmup=5, start=0.1, decay="steps", drop_at=(30, 60, 80)).over(
        8192, 90
    )
    assert lr(0) == 0.1
    assert lr(5) == 3.2
    assert lr(29.9) == 3.2
    assert lr(30) == pytest.approx(0.32)
    assert lr(89) == pytest.approx(0.0032)


@given(rates, rates, lengths, lengths)
def test_joins_are_continuous(start, peak, warm, rest):
    for decay in (Poly(rest), Cosine(rest), Constant(rest), StepDecay((rest / 2,))):
        lr = mb.join(mb.warmup(warm, to=peak, start=start), decay)
        assert abs(lr(warm * (1 - 1e-9)) - lr(warm)) <= 1e-8 * (start + peak)
        assert lr(warm) == peak


@given(rates, lengths, st.floats(0.5, 4))
def test_decays_never_rise_and_end_where_they_should(peak, length, power):
    for decay in (Poly(length, power, peak, end=peak / 1000), Cosine(length, peak, peak / 1000)):
        values = [decay(length * i / 50) for i in range(60)]
        assert values == sorted(values, reverse=True)
        assert values[0] == peak
        assert values[-1] == pytest.approx(peak / 1000)


def test_a_decay_without_a_start_says_so():
    with pytest.raises(ValueError, match="poly has no start"):
        mb.poly(85)(3)
    with pytest.raises(ValueError, match="at least one"):
        mb.join()


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), -float("inf"), "5", None, True])
def test_numbers_that_no_schedule_has_are_refused_where_they_are_given(number):
    made = {
        "epochs of warmup": lambda: mb.warmup(number, to=1),
        "to of warmup": lambda: mb.warmup(5, to=number),
        "start of warmup": lambda: mb.warmup(5, to=1, start=number),
        "epochs of poly": lambda: mb.poly(number),
        "power of poly": lambda: mb.poly(5, power=number),
        "end of poly": lambda: mb.poly(5, end=number),
        "skip of poly": lambda: mb.poly(5, skip=number),
        "epochs of cosine": lambda: mb.cosine(number),
        "at of step_decay": lambda: mb.step_decay((30, number)),
        "factor of step_decay": lambda: mb.step_decay((30,), factor=number),
        "reference of linear_scaling": lambda: mb.linear_scaling(number, 256),
        "batch of linear_scaling": lambda: mb.linear_scaling(0.1, number),
    }
    if number is not None:  # not known yet
        made["start of poly"] = lambda: mb.poly(5, start=number)
        made["start of cosine"] = lambda: mb.cosine(5, start=number)
        made["start of constant"] = lambda: mb.constant(5, start=number)
        made["per of linear_scaling"] = lambda: mb.linear_scaling(0.1, 256, per=number)
    if number != float("inf"):  # without end
        made["epochs of constant"] = lambda: mb.constant(number, start=1)
        made["epochs of step_decay"] = lambda: mb.step_decay((30,), epochs=number)
    for what, make in made.items():
        with pytest.raises(UserError, match=f"the {what} is .*: give a finite number"):
            make()


def test_what_else_no_schedule_is():
    for make, words in (
        (
            lambda: mb.warmup(5, to=1, shape="quadratik"),
            "shape .* 'quadratik': did you mean quadra",
        ),
        (lambda: mb.step_decay(30), "the at of step_decay is 30: give"),
        (lambda: mb.poly(5, power=0), "the power of poly is 0: give a finite number above 0"),
        (lambda: mb.linear_scaling(0.1, 256, per=0), "the per of linear_scaling is 0: .* above 0"),
        (lambda: mb.join(0.1, mb.poly(5)), "join was given 0.1, which is no piece"),
        (lambda: mb.join(mb.constant(start=1), mb.poly(5)), "the constant never ends"),
        (lambda: mb.join(mb.step_decay((3,), start=1), mb.poly(5)), "the step_decay never ends"),
    ):
        with pytest.raises(UserError, match=words):
            make()
    assert mb.join(mb.constant(3, start=1), mb.constant())(7) == 1
    assert mb.step_decay([2, 4], start=1.0)(3) == 0.1
    assert mb.constant(float("inf"), start=1) == mb.constant(start=1)


def test_schedules_are_values():
    assert mb.join(mb.warmup(5, to=2.0), mb.poly(10)) == mb.join(mb.warmup(5, to=2.0), mb.poly(10))
    with pytest.raises(FrozenInstanceError):
        mb.warmup(5, to=2.0).to = 3.0
