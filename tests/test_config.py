"""The config: derived numbers, contradictions in words, JSON, resizing."""

import dataclasses
import math
import re
import typing
from dataclasses import fields, replace
from typing import Literal

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from megabatch.batch import Stage, count_steps
from megabatch.config import Config, Data, LearningRate, OptimizerConfig
from megabatch.config.settings import check_value, settings_of
from megabatch.errors import UserError
from megabatch.recipes import RECIPES
from megabatch.verbs.parsing import flags_of, parse
from megabatch.verbs.train import Launch, TrainFlags

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


def changed(config, change):
    """The config with other settings; a dict is a section's."""
    sections = {
        name: replace(getattr(config, name), **value)
        for name, value in change.items()
        if isinstance(value, dict)
    }
    return replace(config, **{**change, **sections}).check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 100}, "batch 100 cannot be made of micro-batches of 16: use 96 or 112"),
        ({"batch": 8}, "batch 8 cannot be made of micro-batches of 16: use 16"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"micro": 12}, "micro 12 is not a multiple of span 8"),
        ({"span": 0}, "span is 0"),
        ({"micro": 0}, "micro is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 1e99}, "epochs is 1e+99; it must be above 0 and at most 1e+09"),
        ({"epochs": math.nan}, "epochs is nan: give a finite number"),
        ({"epochs": math.inf}, "epochs is inf: give a finite number"),
        ({"epochs": 10**400}, "epochs is 1000"),
        ({"stages": (Stage(12, 128),)}, "a stage begins at epoch 12 but the run ends at epoch 10"),
        ({"stages": (Stage(5, 128), Stage(4, 256))}, "each must begin after the one before"),
        ({"stages": (Stage(5, 100),)}, "the batch of the stage at epoch 5, 100 cannot be made"),
        ({"stages": (Stage(5, 128, 1.5),)}, "the momentum of stage 1 is 1.5"),
        ({"stages": (Stage("5", 128),)}, "the epoch of stage 1 is '5': give a finite number"),
        ({"stages": ((5, 128),)}, "give a Stage"),
        ({"stages": [Stage(5, 128)]}, "give any number of values, as a tuple"),
        (
            {"batch": numpy.int64(64)},
            "batch is np.int64(64): give a whole number of Python's own",
        ),
        ({"epochs": numpy.float32(3)}, "give a finite number of Python's own"),
        ({"lr": {"warmup": 20}}, "the warm-up of 20 epochs does not fit into 10"),
        ({"lr": {"decay": "steps"}}, "names no epochs"),
        ({"lr": {"decay": "steps", "drop_at": (1.0, 5.0)}}, "give epochs after the warm-up (2)"),
        ({"lr": {"decay": "steps", "drop_at": (5.0, 12.0)}}, "the rate drops at epoch 12 but"),
        ({"lr": {"ramp": "constant"}}, "nothing would be learnt until the warm-up's end"),
        ({"lr": {"decay": "step"}}, "lr.decay is 'step': did you mean steps?"),
        ({"lr": {"per": 0}}, "lr.per is 0"),
        ({"lr": {"reference": -1.0}}, "lr.reference is -1; it must be at least 0"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1"),
        ({"bn_momentum": 0.0}, "bn_momentum is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is true: give a whole number"),
        ({"batch": 64.0}, "batch is 64: give a whole number"),
        ({"deterministic": 1}, "deterministic is 1: give true or false"),
        ({"precision": "fp8"}, "precision is 'fp8': there are fp32, fp64"),
        (
            {"target_accuracy": 97.0},
            "target_accuracy is 97; it must be above 0 and at most 1: give",
        ),
        ({"keep": 0}, "keep is 0"),
        ({"eval_every": -1.0}, "eval_every is -1"),
        ({"eval_every": 1e-300}, "eval_every is 1e-300; give epochs, or 0 for the end only"),
        ({"bucket_mb": 0.0}, "bucket_mb is 0"),
        ({"ratio_band": (2.0, 1.0)}, "the smaller first"),
        ({"ratio_band": (2.0,)}, "give 2 values"),
        ({"name": "../x"}, "the name '../x' cannot be a folder's"),
        ({"name": "a[/x]"}, "cannot be a folder's"),
        ({"init": "a\0b"}, "init is"),
        ({"model": "resnet5"}, "did you mean 'resnet50'"),
        ({"plan": "tours"}, "there is no plan 'tours': did you mean torus?"),
        ({"plan": "backends"}, "did you mean backend?"),
        ({"plan": "torus:rings"}, "there is no wiring 'rings': did you mean ring?"),
        ({"plan": "hybrid:ring"}, "there is no plan 'hybrid'"),
        (
            {"wire": "fp16"},
            "--wire fp16 needs a plan of our own: give --plan torus, say, or --wire fp32",
        ),
        ({"hybrid": {"small": "tours"}}, "there is no plan 'tours': did you mean torus?"),
        ({"hybrid": {"large": "hybrid"}}, "there is no plan 'hybrid'"),
        ({"half_weights": True}, "half_weights needs --precision bf16 or fp16, not fp32"),
        ({"noise": {"follow": True}, "stages": (Stage(5, 128),)}, "drop --stages or --noise.f"),
        ({"noise": {"follow": True, "most": 100}}, "noise.most 100 cannot be made"),
        ({"noise": {"follow": True, "most": 32}}, "batch 64 lies outside"),
        (
            {"optimizer": {"form": "pytorch", "momentum_correction": True}},
            "momentum_correction belongs to --optimizer.form paper",
        ),
        (
            {"optimizer": {"nesterov": True, "momentum": 0.0}},
            "nesterov needs a momentum above 0: give one, or --optimizer.no-nesterov",
        ),
        ({"optimizer": {"name": "larc"}}, "there is no optimizer 'larc': did you mean lars?"),
        ({"data": {"size": 0}}, "data.size is 0"),
        (
            {"data": {"size": 10_000, "source": "synthetic", "images": 10_000}},
            "a synthetic set of 10,000 images of 10000 x 10000 has more than 4,000,000,000 values",
        ),
        ({"data": {"size": 10_000, "channels": 3}}, "one pass of 16 images of 10000 x 10000 has"),
        ({"data": {"channels": 2}}, "data.channels is 2"),
        ({"data": {"val_share": 1.0}}, "data.val_share is 1"),
        ({"data": {"crop_area": (1.0, 0.5)}}, "data.crop_area"),
    ],
)
def test_contradictions_are_refused_in_words(change, says):
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        changed(PLAIN, change)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"trust": 0.02}, "--optimizer.trust 0.001"),
        ({"trust": None}, "--optimizer.trust 0.001"),
        ({"policy": "clip"}, "--optimizer.policy lars"),
        ({"form": "pytorch"}, "--optimizer.form paper"),
        ({"nesterov": True}, "--optimizer.no-nesterov"),
        ({"momentum_correction": True}, "--optimizer.no-momentum-correction"),
    ],
)
def test_lamb_refuses_what_it_would_ignore(setting, remedy):
    lars = OptimizerConfig(**setting)
    with pytest.raises(UserError, match=f"lamb has no {next(iter(setting))}") as refused:
        replace(lars, name="lamb")
    assert str(refused.value).endswith(remedy)
    # The remedy is a flag, and it helps.
    assert remedy.split()[0] in flags_of(TrainFlags)
    remedied = parse(
        TrainFlags, "train", remedy.split(), TrainFlags(Launch(), Config(optimizer=lars))
    )
    assert replace(remedied.config.optimizer, name="lamb") == OptimizerConfig(name="lamb")


def test_lamb_has_no_momentum_for_a_stage_to_set():
    with pytest.raises(UserError, match="lamb has no momentum for a stage"):
        changed(PLAIN, {"optimizer": {"name": "lamb"}, "stages": (Stage(5, 128, 0.8),)})


@pytest.mark.parametrize("name", [name for name in sorted(RECIPES) if name != "mlperf"])
def test_a_recipe_cut_short_by_hand_is_refused_with_the_way_out(name):
    cut = replace(RECIPES[name](), epochs=1)
    with pytest.raises(UserError, match=re.escape("config.resized(epochs=1)")):
        cut.check()
    with pytest.raises(UserError, match=re.escape("config.resized(epochs=1)")):
        mb.train(cut, quiet=True)
    assert RECIPES[name]().resized(epochs=1).check().epochs == 1


def test_every_number_has_bounds():
    """So that no file can ask for a run without end or for memory without bound."""
    for name, rule, value in settings_of(Config()):
        kind = str(type(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert max(rule.least, rule.above) > -math.inf, (name, kind)
            assert min(rule.most, rule.below) < math.inf, (name, kind)


# --- resuming ------------------------------------------------------------------------------------

FREE = {
    "ratio_band", "eval_every", "save_every", "keep", "keep_best", "target_accuracy", "bucket_mb",
    "compare_every", "patience",
    "plan", "wire", "compile", "graphs", "data.path", "data.local_copy", "data.threads",
    "data.processes", "data.resident", "data.shared",
    "hybrid.small", "hybrid.large", "hybrid.threshold_mb",
}  # fmt: skip


def another(value, rule, kind):
    """Some other value that the setting may have."""
    if isinstance(value, bool):
        return not value
    if typing.get_origin(kind) is Literal:
        return next(option for option in typing.get_args(kind) if option != value)
    for other in (0.5, 0.25, 1, 2, 3, (0.5, 0.75), (9, 10), (0.5, 0.5, 0.5), (1.5,), "ring", "x"):
        suits = other != value
        try:
            check_value(other, kind, rule, "")
        except UserError:
            suits = False
        if suits:
            return other
    raise AssertionError(kind)


def name_of(section, field):
    return field.name if section is None else f"{section}.{field.name}"


def every_other():
    """Configs that differ from the plain one in one setting each."""
    for section in (None, "data", "noise", "lr", "optimizer", "hybrid"):
        whole = PLAIN if section is None else getattr(PLAIN, section)
        kinds = typing.get_type_hints(type(whole))
        for field in fields(whole):
            if dataclasses.is_dataclass(kinds[field.name]):
                continue
            value, rule = getattr(whole, field.name), field.metadata["rule"]
            if field.name == "stages":
                other = (Stage(5, 128),)
            elif field.name == "model":
                other = "small20"
            elif name_of(section, field) == "optimizer.name":
                other = "lamb"
            elif field.name == "channels":
                other = 3
            else:
                other = another(value, rule, kinds[field.name])
            config = replace(whole, **{field.name: other})
            yield (
                name_of(section, field),
                config if section is None else replace(PLAIN, **{section: config}),
            )


def test_what_may_change_on_resume_is_a_property_of_the_setting():
    found = dict(every_other())
    assert len(found) == sum(1 for _ in settings_of(PLAIN))
    for name, config in found.items():
        difference = PLAIN.resume_difference(config)
        assert (difference is None) == (name in FREE), name
        assert difference is None or difference.startswith(f"{name} ")
    assert PLAIN.resume_difference(PLAIN) is None


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


def test_json_brings_back_every_setting():
    for name, config in every_other():
        assert Config.from_json(config.to_json()) == config != PLAIN, name


def test_settings_that_are_left_away_keep_their_defaults():
    assert Config.from_json("{}") == Config()
    assert Config.from_json('{"lr": {"warmup": 3}}') == Config(lr=LearningRate(warmup=3))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_resizing_keeps_a_recipes_proportions(name):
    recipe = mb.recipes.named(name)
    longer = recipe.resized(epochs=recipe.epochs * 2, batch=recipe.batch * 4)
    by_rule = {"linear": 4, "sqrt": 2, "none": 1}
    grow = 1 if recipe.lr.per is None else by_rule[recipe.lr.scaling]
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


@pytest.mark.parametrize(
    ("scaling", "peak", "grown", "formula"),
    [
        ("linear", 0.4, 4, "reference * batch / per = 0.1 * 1024 / 256"),
        ("sqrt", 0.2, 2, "reference * sqrt(batch / per) = 0.1 * sqrt(1024 / 256)"),
        ("none", 0.1, 1, "reference = 0.1"),
    ],
)
def test_the_rate_is_scaled_by_the_rule_that_is_set(scaling, peak, grown, formula):
    config = replace(
        PLAIN, batch=1024, stages=(Stage(5, 4096),), lr=LearningRate(warmup=2, scaling=scaling)
    ).check()
    assert config.lr_at(2) == pytest.approx(peak, rel=1e-12)
    assert config.lr_at(2, 4096) == pytest.approx(grown * peak, rel=1e-12)
    said = {name: (value, how) for name, value, how in config.derived(10_000, 1)}
    assert said["peak rate"] == (f"{peak:g}", formula)
    assert f"rate x {grown}," in said["batch from epoch 5"][1]


def test_the_table_says_by_what_it_trains():
    """A recipe that follows its batch changes the optimizer with it, and nobody had asked."""

    def said(name, batch):
        config = mb.recipes.named(name, batch=batch)
        return next(row[1:] for row in config.derived(100_000, 1) if row[0] == "optimizer")

    assert said("tiny30", 256) == ("SGD", "momentum 0.9, weight decay 0.0001")
    unadapted = "; 0.0292 of the rate for what does not adapt"
    muon = "momentum 0.9, weight decay 5e-05, trust 0.001"
    assert said("tiny30", 1024) == ("Muon", muon + unadapted)
    assert said("tiny30", 4096) == ("Muon", muon + unadapted.replace("0.0292", "0.0333"))
    assert said("mlperf", 32768) == ("LARS", "momentum 0.94, weight decay 2.5e-05, trust 0.001")
    titles = [
        OptimizerConfig(**given).title
        for given in ({"name": "lamb"}, {"policy": "clip"}, {"trust": 0.0}, {"trust": None})
    ]
    assert titles == ["LAMB", "LARC", "SGD", "SGD"]
    assert OptimizerConfig(name="lamb").in_words() == "momentum 0.9, weight decay 5e-05"


def test_the_table_says_on_which_grid_a_plan_sums():
    def how(plan, grid):
        config = replace(PLAIN, plan=plan).check()
        return next(row[2] for row in config.derived(1000, 4, grid) if row[0] == "plan")

    assert how("torus", (2, 2)).endswith("; on a grid of 2 x 2")
    assert how("torus", (1, 4)).endswith("; on a grid of 1 x 4, one row: --grid makes more")
    for plan, grid in (("ring", (1, 4)), ("ring:halving_doubling", (1, 4)), ("torus", None)):
        assert "grid" not in how(plan, grid)


def test_the_rate_follows_the_batch_or_not():
    config = replace(PLAIN, stages=(Stage(5, 256),), lr=LearningRate(warmup=0, decay="constant"))
    assert config.lr_at(6, batch=256) == 4 * config.lr_at(1)
    assert replace(config, rate_follows_batch=False).lr_at(6, batch=256) == config.lr_at(1)


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


def test_the_table_says_what_evaluation_sees():
    def sees(**settings):
        config = Config(data=Data(path="pictures", size=224, channels=3, **settings))
        return next(row[1:] for row in config.derived(1000, 1) if row[0] == "evaluation sees")

    assert sees() == ("all", "whole images, as training does")
    cropped = "of the shorter side, in the middle: "
    assert sees(crop_area=(0.08, 1.0)) == ("87.5 %", cropped + "7 / 8, for training crops")
    assert sees(resize=256) == ("87.5 %", cropped + "224 / 256")
    digits = Config(data=Data(crop_area=(0.5, 1.0)))  # in memory nothing is cropped
    assert digits.derived(1000, 1)[-1][1] == "all"
