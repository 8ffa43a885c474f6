"""The grammar of plan names: one meaning for the config, the trainer, DDP users and the planner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from megabatch.errors import UserError
from megabatch.planner.search import candidates
from megabatch.plans import PLANS, check, through
from megabatch.plans.names import CHOICES, named, plan_of
from megabatch.plans.names import check as check_name
from megabatch.plans.phase import VIAS
from megabatch.sync.choice import choose_plan

NAMES = [*PLANS, *(f"{plan}:{via}" for plan in PLANS for via in VIAS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_the_same_to_everyone(name):
    plan = plan_of(name)
    check(plan)
    assert mb.Config(plan=name).plan == name
    assert choose_plan(name, "nccl").plan(1) == plan == named(name, "nccl")
    assert choose_plan(name, "gloo").plan(1) == named(name, "gloo")
    assert {setting.plan for setting in candidates(8, plan=name).settings()} == {name}


def test_a_name_says_which_phases_and_how():
    assert plan_of("torus") == mb.plans.TORUS
    assert plan_of("torus:halving_doubling") == through(mb.plans.TORUS, "halving_doubling")
    # On gloo what is left to the backend goes by our rings; what a name says is left as it is.
    assert named("torus", "gloo") == through(mb.plans.TORUS, "ring")
    assert named("torus:backend", "gloo") == mb.plans.TORUS
    assert named("three_phase", "gloo")[1] == mb.plans.THREE_PHASE[1]


@pytest.mark.parametrize("name", CHOICES)
def test_some_names_leave_the_choice_to_others(name):
    assert mb.Config(plan=name).plan == name
    with pytest.raises(UserError, match=f"there is no plan '{name}'"):
        plan_of(name)


@given(st.one_of(st.text(max_size=12), st.sampled_from(["torus:", ":ring", "torus:ring:ring", ""])))
def test_anything_else_is_refused_by_everyone(name):
    if name in NAMES or name in CHOICES:
        return
    for ask in (check_name, plan_of, lambda name: choose_plan(name, "gloo")):
        with pytest.raises(UserError, match=r"there is no (plan|wiring)"):
            ask(name)
    with pytest.raises(UserError):
        mb.Config(plan=name)
    with pytest.raises(UserError):
        candidates(8, plan=name)
