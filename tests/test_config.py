"""The config: derived numbers, contradictions in words, JSON, resizing."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from megabatch.batch import Stage, count_steps
from megabatch.config import Config, Data, LearningRate, Optimizer
from megabatch.errors import UserError
from megabatch.recipes import RECIPES

PLAIN = Config(batch=64, micro=16, span=8, epochs=10, lr=LearningRate(warmup=2))


def rows(config, images, world):
    return {name: value for name, value, _ in config.derived(images, world)}


def test_the_table_of_derived_numbers():
    config = replace(
        PLAIN,
        stages=(Stage(5, 128, 0.8),),
        lr=LearningRate(reference=0.1, per=256, warmup=2, start=0.0),
    )
    table = rows(config, images=640, world=3)
    assert table["world"] == "3"
    assert table["micro-batches a step"] == "4"
    assert table["micro-batches a worker"] == "1 to 2"
    assert table["steps an epoch"] == "10.00"
    assert table["warm-up steps"] == "20"
    assert table["peak rate"] == "0.025"
    assert table["batch from epoch 5"] == "128"
    assert table["steps in all"] == str(50 + 25)
    assert table["images in all"] == "6,400"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 100}, "batch 100 cannot be made of micro-batches of 16: use 96 or 112"),
        ({"batch": 8}, "batch 8 cannot be made of micro-batches of 16: use 16"),
        ({"batch": 0}, "batch 0 cannot be made"),
        ({"micro": 12}, "micro 12 is not a multiple of span 8"),
        ({"span": 0}, "span is 0"),
        ({"micro": 0}, "micro is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"stages": (Stage(12, 128),)}, "a stage begins at epoch 12 but the run ends at epoch 10"),
        ({"stages": (Stage(5, 128), Stage(4, 256))}, "each must begin after the one before"),
        ({"stages": (Stage(5, 100),)}, "the batch of the stage at epoch 5, 100 cannot be made"),
        ({"stages": (Stage(5, 128, 1.5),)}, "momentum is 1.5"),
        ({"lr": LearningRate(warmup=20)}, "the warm-up of 20 epochs does not fit into 10"),
        ({"lr": LearningRate(warmup=1, decay="steps")}, "names no epochs"),
        ({"lr": LearningRate(warmup=1, per=0)}, "lr.per is 0"),
        ({"lr": LearningRate(warmup=1, reference=-1.0)}, "cannot be negative"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1"),
        ({"bn_momentum": 0.0}, "bn_momentum is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"target_accuracy": 97.0}, "give a share between 0 and 1"),
        ({"keep": 0}, "keep is 0"),
        ({"eval_every": -1.0}, "eval_every is negative"),
        ({"bucket_mb": 0.0}, "bucket_mb is 0"),
        ({"model": "resnet5"}, "did you mean 'resnet50'"),
        (
            {"optimizer": Optimizer(form="pytorch", momentum_correction=True)},
            "momentum_correction belongs to --optimizer.form paper",
        ),
        ({"data": Data(size=0)}, "data.size is 0"),
        ({"data": Data(channels=2)}, "data.channels is 2"),
        ({"data": Data(val_share=1.0)}, "data.val_share is 1"),
        ({"data": Data(crop_area=(1.0, 0.5))}, "data.crop_area"),
    ],
)
def test_contradictions_are_refused_in_words(change, says):
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        replace(PLAIN, **change).check()
    assert "\n" not in str(refused.value)


def test_the_plain_config_is_accepted():
    assert PLAIN.check() is PLAIN


@given(
    st.sampled_from(sorted(RECIPES)),
    st.floats(0.5, 300),
    st.sampled_from([None, 0.95]),
    st.integers(0, 2**40),
)
def test_json_brings_back_the_same_config(name, epochs, momentum, seed):
    config = replace(
        mb.recipes.named(name), epochs=epochs, seed=seed, stages=(Stage(0.25, 512, momentum),)
    )
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_resizing_keeps_a_recipes_proportions(name):
    recipe = mb.recipes.named(name)
    longer = recipe.resized(epochs=recipe.epochs * 2, batch=recipe.batch * 4)
    grow = 1 if recipe.lr.per is None else 4
    peak = mb.linear_scaling(recipe.lr.reference, recipe.batch, recipe.lr.per)
    for share in (0.0, 0.05, 0.3, 0.6, 0.99):
        then, now = (c.lr_at(share * c.epochs) for c in (recipe, longer))
        # Where a ramp begins and a decay ends is absolute; what lies between peak and there scales.
        warming = share * recipe.epochs < recipe.lr.warmup
        fixed = recipe.lr.start if warming else recipe.lr.end
        part = (then - fixed) / (peak - fixed)
        assert now == pytest.approx(fixed + part * (grow * peak - fixed), rel=1e-9, abs=1e-12)
    assert [s.batch for s in longer.stages] == [4 * s.batch for s in recipe.stages]
    assert [s.epoch for s in longer.stages] == [2 * s.epoch for s in recipe.stages]
    assert recipe.resized() == recipe


def test_the_rate_follows_the_batch_or_not():
    config = replace(PLAIN, stages=(Stage(5, 256),), lr=LearningRate(warmup=0, decay="constant"))
    assert config.lr_at(6, batch=256) == 4 * config.lr_at(1)
    assert replace(config, follow=False).lr_at(6, batch=256) == config.lr_at(1)


def test_momentum_stays_until_a_stage_sets_its_own():
    config = replace(PLAIN, stages=(Stage(2, 64), Stage(4, 128, 0.95), Stage(6, 256)))
    assert [config.momentum_at(stage) for stage in range(4)] == [0.9, 0.9, 0.95, 0.95]


def test_batches_of_a_run_may_end_inside_an_epoch():
    steps, seen = count_steps(PLAIN.all_stages, 100, 10)
    assert (steps, seen) == (16, 1024)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_consistent_and_says_how_to_run_it(name):
    recipe = RECIPES[name]
    assert recipe().check().name == name
    assert f"megabatch train {name}" in recipe.__doc__


def test_an_unknown_recipe_is_named():
    with pytest.raises(UserError, match="did you mean digits"):
        mb.recipes.named("digit")
