"""Studies: which runs there are, what is run again and what is not, and what the numbers say."""

import json
import math
import os
import random
import re
import signal
import statistics
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import dying
import pytest
import torch
from run_folders import made_up, step_line
from studies import changed, made_up_run
from waiting import PATIENCE_SECONDS

import megabatch as mb
from megabatch import models
from megabatch.batch import count_steps
from megabatch.cli import main
from megabatch.config import Config
from megabatch.data.opening import open_sources
from megabatch.data.source import for_tuning
from megabatch.elastic.supervisor import Losses
from megabatch.errors import DONE, FAILED, STOPPED, RunFailed, UserError
from megabatch.launch import run_local
from megabatch.models.resnet import open_blocks
from megabatch.recipes.by_batch import fitted
from megabatch.report.differences import differences
from megabatch.report.figure import arm_figure, error_figure
from megabatch.report.study import study_page
from megabatch.report.study_rows import table_lines
from megabatch.report.study_settings import noise
from megabatch.runs import checkpoint
from megabatch.runs.folder import RunFolder
from megabatch.study import sweep
from megabatch.study.arms import ARMS
from megabatch.study.reading import reading
from megabatch.study.results import read
from megabatch.study.spread import Mean, difference, mean, quantile
from megabatch.study.trials import RECIPE, StudyPlan, Trial, state, write_label
from megabatch.verbs.study import read_flags, study_here

# --- intervals ---------------------------------------------------------------------------------


def test_quantiles_of_students_t():
    """Of any table of the distribution."""
    for freedom, t in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042)):
        assert quantile(freedom) == pytest.approx(t, abs=6e-4)
    assert quantile(1e4) == pytest.approx(1.9602, abs=1e-3)
    assert quantile(2.5) < quantile(2.4) and quantile(2.5) > quantile(3)
    assert math.isnan(quantile(0))


def test_quantiles_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 1.3, 2, 2.7, 5, 17.5, 100):
        assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


def test_means_and_differences():
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2 and found.half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert math.isnan(mean([5.0]).half) and mean([]).seeds == 0
    # Equal spreads and counts: Welch is the plain test with 2 n - 2 degrees of freedom.
    one, other = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    found = difference(other, one)
    assert found.value == 3
    assert found.half == pytest.approx(2.7764 * math.sqrt(2 / 3), rel=1e-4)
    assert math.isnan(difference([1.0], one).half)
    assert difference([2.0, 2.0], [1.0, 1.0]) == (1.0, 0.0, 2)


def test_differences_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    one, other = [45.1, 45.9, 46.3], [44.0, 44.9, 44.2, 44.6]
    test = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    found = difference(one, other)
    assert found.value - found.half == pytest.approx(test.low, rel=1e-4)
    assert found.value + found.half == pytest.approx(test.high, rel=1e-4)


# --- what is asked for -------------------------------------------------------------------------


def test_every_batch_and_arm_from_every_seed():
    plan, _ = read_flags(
        "digits",
        ["--batches", "256,32", "--seeds", "2", "--arms", "no_warmup", "slow=--lr.reference 8",
         "--arm-batches", "256"],
    )  # fmt: skip
    found = [trial.name for trial in plan.runs({})]
    assert found == [
        "32-s0", "256-s0", "256-no_warmup-s0", "256-slow-s0",
        "32-s1", "256-s1", "256-no_warmup-s1", "256-slow-s1",
    ]  # fmt: skip
    by_name = {trial.name: trial.config for trial in plan.runs({})}
    recipe = by_name["256-s0"]
    assert recipe.stages == () and recipe.batch == 256 and recipe.lr.peak(256) == 64
    assert by_name["256-no_warmup-s1"] == replace(recipe, seed=1, lr=replace(recipe.lr, warmup=0.0))
    assert by_name["256-slow-s0"].lr.reference == 8
    plan, _ = read_flags("digits", ["--batches", "64", "--arms", "long=--epochs 40"])
    assert (plan.configs["long", 64].epochs, plan.configs["long", 64].lr.warmup) == (40, 4)


def test_any_flag_of_the_recipe_may_be_given():
    plan, _ = read_flags("digits", ["--batches", "64", "--epochs", "10", "--model", "small20"])
    config = plan.configs[RECIPE, 64]
    assert (config.epochs, config.model, config.lr.warmup) == (10, "small20", 1)


def test_passes_fit_each_batch():
    plan, _ = read_flags("tiny30", ["--batches", "64,256,4096"])
    found = {batch: plan.configs[RECIPE, batch].micro for batch in (64, 256, 4096)}
    assert found == {64: 64, 256: 256, 4096: 1024}
    plan, _ = read_flags("tiny30", ["--batches", "64,256", "--micro", "128"])
    assert {batch: plan.configs[RECIPE, batch].micro for batch in (64, 256)} == {64: 64, 256: 128}
    with pytest.raises(UserError, match="batch 256 cannot be made of micro-batches of 192"):
        read_flags("tiny30", ["--batches", "64,256", "--micro", "192"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "study needs batches"),
        (["--batches", "256", "--batch", "64"], "a study has several batches"),
        (["--batches", "64", "--stages", "3:128"], "compares fixed batches: leave --stages away"),
        (["--batches", "64", "--noise.follow"], "or take the arm follow_noise"),
        (["--batches", "64", "--keep_best"], "leave --keep-best away"),
        (["--batches", "64", "--keep", "3"], "--keep-checkpoints keeps"),
        (["--batches", "64", "--resume"], "goes on by itself"),
        (["--batches", "64", "128"], "with commas between: --batches 64,128"),
        (["--batches", "a,b"], "--batches is 'a,b': give whole numbers"),
        (["--batches", "0,64"], "--batches has 0"),
        (["--batches", "64", "--seeds", "0"], "--seeds is 0"),
        (["--batches", "64", "--rates", "-1,2"], "--rates is '-1,2'"),
        (["--batches", "64", "--arms", "no_warmpu"], "there is no arm 'no_warmpu': did you mean"),
        (["--batches", "64", "--arms", "fp32"], "the arm fp32 changes nothing"),
        (["--batches", "64", "--arms", "sgd=--seed 1"], "an arm of your own is NAME=FLAGS"),
        (["--batches", "64", "--arms", "x=--lr.refrence 1"], "--lr.refrence is no flag"),
        (["--batches", "64", "--arms", "x=--model 'a"], '"x=--model \'a" cannot be read: No clos'),
        (["--batches", "64", "--arms", "x=--seed 5"], "every arm is run from the study's seeds"),
        (["--batches", "64", "--arms", "x=--batch 128"], "arms run at the study's batches"),
        (["--batches", "64", "--arms", "x=--keep-best"], "leave --keep-best away"),
        (["--batches", "64", "--arms", "x=--data.tuning-share=0.2"], "arms are judged by the"),
        (["--batches", "64", "--arms", "x=--data.val-share 0.5"], "arms are judged by the"),
        (["--batches", "64", "--arms", "x=--lr.warmup 0 --workers 1"], "--workers is for a whole"),
        (["--batches", "64", "--arms", "x=--lr.warmup 0 --keep-epochs"], "give it outside its"),
        (["--batches", "64", "--arms", "x=--lr.warmup 0", "x=--lr.warmup 1"], "has x twice"),
        (["--batches", "64", "--arms", "x" * 101 + "=--lr.warmup 0"], "at most 100 of them"),
        (["--batches", "64", "--rates", "1,2", "--data.tuning-share", "0.3"], "--rates holds"),
        (["--batches", "64", "--deterministic", "--plan", "torus"], "sums along one tree in fp32"),
        (["--batches", "64", "--hybrid.small", "ring"], "this run sums by plan backend"),
        (
            ["--batches", "64", "--deterministic", "--arms", "x=--plan ring"],
            "the arm x at 64: a deterministic run sums along one tree in fp32",
        ),
        (
            ["--batches", "64", "--plan", "torus", "--arms", "x=--hybrid.threshold-mb 1"],
            "the arm x at 64: --hybrid is for plan hybrid, and this run sums by plan torus",
        ),
    ],
)
def test_mistakes_are_one_sentence(flags, sentence):
    with pytest.raises(UserError) as refused:
        read_flags("digits", flags)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


# --- arms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_good_config_that_differs_from_the_recipe(name):
    lars = ARMS["lars"].change(mb.recipes.named("tiny30", batch=4096))
    if name == "lars":
        lars = mb.recipes.named("tiny30", batch=4096)
        assert lars.optimizer.name == "muon"
    elif name in ("bf16", "span64", "moving_average", "share_10th", "pytorch_form"):
        lars = mb.recipes.named("mlperf", batch=32768)
        lars = replace(lars, bn_momentum=1.0)
    elif name in ("constant_warmup", "fixed_rate", "sqrt_rate"):
        lars = mb.recipes.goyal2017()
    arm = fitted(ARMS[name].change(lars)).check()
    least = 8 if name == "follow_noise" else 4  # noise is told by eight passes a step
    assert arm != lars and arm.micro >= lars.micro // least
    assert len(ARMS[name].says) < 70


def test_the_rates_that_goyal_holds_his_own_against():
    """By the paper's tables at 8k: no warm-up, a constant one, 0.1 and 0.1 times the root of 32."""
    config = mb.recipes.goyal2017()

    def rates(arm):
        changed = ARMS[arm].change(config)
        return [changed.lr_at(epoch, 8192) for epoch in (0, 2.5, 4.99, 5, 29, 31)]

    assert rates("no_warmup") == pytest.approx([3.2, 3.2, 3.2, 3.2, 3.2, 0.32])
    assert rates("constant_warmup") == pytest.approx([0.1, 0.1, 0.1, 3.2, 3.2, 0.32])
    assert rates("fixed_rate") == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.01])
    assert rates("sqrt_rate")[3:] == pytest.approx([0.1 * 32**0.5] * 2 + [0.01 * 32**0.5])
    # At the batch that the reference is for there is nothing to scale, nor to warm up to.
    at_reference = config.resized(batch=256)
    for arm in ("constant_warmup", "fixed_rate", "sqrt_rate"):
        assert ARMS[arm].change(at_reference) == at_reference
    plan, _ = read_flags(
        "goyal2017",
        ["--batches", "256,8192", "--arms", "no_warmup", "constant_warmup", "fixed_rate",
         "sqrt_rate", "gamma_one"],
    )  # fmt: skip
    assert ("fixed_rate", 8192) in plan.configs and ("fixed_rate", 256) not in plan.configs
    with pytest.raises(UserError, match="the arm fixed_rate changes nothing"):
        read_flags("tiny30", ["--batches", "4096", "--arms", "fixed_rate"])


def test_a_batch_that_grows_takes_as_many_steps_at_the_same_rate():
    config = mb.recipes.named("tiny30", batch=4096)
    grown = ARMS["grow"].change(config)
    steps, _ = count_steps(config.all_stages, 100_000, config.epochs)
    grown_steps, _ = count_steps(grown.all_stages, 100_000, grown.epochs)
    assert grown_steps == pytest.approx(steps, rel=0.02)
    assert grown.lr_at(15, grown.stages[0].batch) == config.lr_at(15, 4096)


@pytest.mark.parametrize(
    ("recipe", "batch"), [("digits", 32), ("digits", 64), ("digits", 256), ("tiny30", 4096)]
)
def test_a_batch_that_follows_the_noise_has_passes_enough_to_tell_it(recipe, batch):
    """A step of one pass tells no noise: the batch would stay where it began."""
    plan, _ = read_flags(recipe, ["--batches", f"{batch}", "--arms", "follow_noise"])
    config = plan.configs["follow_noise", batch]
    passes, spans = config.noise.least // config.micro, config.noise.least // config.span
    assert passes == min(8, spans) >= 2
    assert config.batch == config.noise.least <= max(batch // 4, 2 * config.span)
    assert config.noise.most == 2 * batch
    # In proportion to the batch; Muon's is a share of the weights at any batch.
    times = 1 if config.optimizer.name == "muon" else config.batch / batch
    assert config.lr_at(15, config.batch) == pytest.approx(
        plan.configs[RECIPE, batch].lr_at(15, batch) * times
    )
    assert config.rate_follows_batch == (config.optimizer.name != "muon")


def test_spans_that_a_batch_is_not_made_of_are_no_arm():
    """It would be another span's under this one's name."""
    plan, _ = read_flags("digits", ["--batches", "64,256", "--arms", "span256"])
    assert plan.configs["span256", 256].span == 256 and ("span256", 64) not in plan.configs


def test_an_arm_of_the_recipes_own_optimizer_is_none():
    """It would be another rate under an optimizer's name: over 90 epochs Muon has 72, not 48."""
    plan, _ = read_flags("tiny", ["--batches", "256,4096", "--arms", "muon"])
    assert [batch for arm, batch in plan.configs if arm == "muon"] == [256]


@pytest.mark.parametrize("name", ["larc", "lamb"])
def test_what_does_not_adapt_has_the_full_rate_under_larc_and_lamb(name):
    for recipe in (mb.recipes.digits(), mb.recipes.named("tiny30", batch=4096)):
        assert recipe.optimizer.unadapted_rate < 1
        assert ARMS[name].change(recipe).optimizer.unadapted_rate == 1


def test_an_arm_that_cannot_be_had_at_a_batch_is_named_with_it():
    with pytest.raises(UserError, match="the arm correction at 4,096: muon has no"):
        read_flags("tiny30", ["--batches", "256,4096", "--arms", "correction"])
    flags = ["--batches", "256,4096", "--arms", "correction", "--arm-batches", "256"]
    assert ("correction", 256) in read_flags("tiny30", flags)[0].configs


def test_runs_do_not_end_at_a_recipes_target():
    """They would all end with the same accuracy."""
    assert mb.recipes.mlperf().target_accuracy is not None
    plan, _ = read_flags("mlperf", ["--batches", "4096,8192"])
    assert {config.target_accuracy for config in plan.configs.values()} == {None}
    plan, _ = read_flags("mlperf", ["--batches", "4096", "--target-accuracy", "0.7"])
    assert plan.configs[RECIPE, 4096].target_accuracy == 0.7


def test_decay_on_everything_and_gamma_one():
    net = models.build("small", 10, 1)
    groups = mb.parameter_groups(net, 1e-4, decay_all=True)
    assert [group["weight_decay"] for group in groups] == [1e-4, 1e-4]
    assert [group["adapt"] for group in groups] == [True, False]
    gammas = [m.weight for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert sum(not gamma.any() for gamma in gammas) == 3  # a block each
    open_blocks(net)
    assert all(bool((gamma == 1).all()) for gamma in gammas)
    with pytest.raises(UserError, match="no residual blocks"):
        open_blocks(models.build("alexnet", 10))


# --- tuning ------------------------------------------------------------------------------------


def test_a_search_never_sees_the_validation_images():
    config = mb.recipes.digits()
    train, val = open_sources(config)
    tuned = replace(config, data=replace(config.data, tuning_share=0.25))
    rest, held = open_sources(tuned)
    assert len(rest) + len(held) == len(train) and len(held) == round(0.25 * len(train))

    def pictures(source):
        images, _ = source.read(torch.arange(len(source)), None)
        return [bytes(image.numpy().tobytes()) for image in images]

    every, unseen = pictures(train), set(pictures(val))
    assert sorted([*pictures(rest), *pictures(held)]) == sorted(every)
    assert not unseen & set(every)
    assert for_tuning((train, val), 0.0) == (train, val)


class Unread:
    """Validation images that go to the device, and that nobody may look at."""

    def on(self, device):
        return self


def test_a_search_runs_without_the_validation_images(tmp_path, monkeypatch):
    real = sweep.open_sources
    monkeypatch.setattr(sweep, "open_sources", lambda *given: (real(*given)[0], Unread()))
    config = replace(mb.recipes.named("digits", epochs=0.2, batch=64), bn_recompute=64)
    plan = StudyPlan({(RECIPE, 64): config}, range(1), rates=(0.5, 1.0))
    cluster = mb.Cluster.from_env(device="cpu")
    searching = sweep.Sweep(
        tmp_path,
        cluster,
        print,
        keep_checkpoints=False,
        verbose=False,
        progress=sweep.StudyProgress(),
    )
    assert searching.run_all(plan.search(), "the search") == "finished"
    assert all(run.finished for run in read(tmp_path).tried)
    searching.run_all(plan.runs({}), "the runs")  # these need them
    assert "Unread" in str(read(tmp_path).cells[0].runs[0].failure)


def test_rates_are_searched_at_each_batch_and_chosen_by_held_out_images(tmp_path):
    plan, _ = read_flags(
        "digits",
        ["--batches", "32,256", "--rates", "0.5,1,2", "--arms", "sgd", "no_warmup",
         "mine=--lr.reference 5"],
    )  # fmt: skip
    search = plan.search()
    assert [trial.name for trial in search] == [
        "rate-32-x0.5-s0", "rate-32-x1-s0", "rate-32-x2-s0",
        "rate-256-x0.5-s0", "rate-256-x1-s0", "rate-256-x2-s0",
        "rate-32-sgd-x0.5-s0", "rate-32-sgd-x1-s0", "rate-32-sgd-x2-s0",
        "rate-256-sgd-x0.5-s0", "rate-256-sgd-x1-s0", "rate-256-sgd-x2-s0",
    ]  # fmt: skip
    assert all(trial.config.data.tuning_share == 0.1 for trial in search)
    for batch, top1s in ((32, (0.5, 0.9, 0.7)), (256, (0.6, 0.7, 0.8))):
        for factor, top1 in zip((0.5, 1, 2), top1s, strict=True):
            made_up_run(tmp_path, batch, 0, top1, kind="rate", factor=factor)
    study = read(tmp_path)
    assert study.chosen_factors() == {(RECIPE, 32): 1, (RECIPE, 256): 2}
    lines = list(study.search_in_words())
    assert "8 is chosen" in lines[0] and "edge" not in lines[0]
    assert "128 is chosen, at the edge of what was tried" in lines[1]
    runs = {trial.name: trial.config for trial in plan.runs(study.chosen_factors())}
    assert runs["256-s0"].lr.peak(256) == 128 and runs["256-s0"].data.tuning_share == 0
    assert runs["256-no_warmup-s0"].lr.peak(256) == 128
    assert runs["256-mine-s0"].lr.peak(256) == 5  # given by hand
    assert runs["256-sgd-s0"].lr.peak(256) == pytest.approx(0.1)  # a search of its own
    made_up_run(tmp_path, 256, 0, 0.8, arm="sgd", kind="rate", factor=2)
    found = read(tmp_path)
    runs = {trial.name: trial.config for trial in plan.runs(found.chosen_factors())}
    assert runs["256-sgd-s0"].lr.peak(256) == pytest.approx(0.2)
    assert "rates at 256 for sgd, by held-out training images" in list(found.search_in_words())[2]
    assert "chosen" in study_page(found)


def test_rates_that_lie_close_have_a_folder_each():
    plan, _ = read_flags("digits", ["--batches", "64", "--rates", "0.1,0.10000001,1"])
    names = [trial.name for trial in plan.search()]
    assert names == ["rate-64-x0.1-s0", "rate-64-x0.10000001-s0", "rate-64-x1-s0"]


# --- running -----------------------------------------------------------------------------------

SHORT = ["digits", "--batches", "64,256", "--epochs", "0.2", "--workers", "1", "--device", "cpu"]


def test_a_study_grows_and_nothing_is_run_twice(tmp_path, capfd, monkeypatch):
    out = str(tmp_path / "study")
    assert main(["study", *SHORT, "--out", out, "--json"]) == DONE
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert [(row["arm"], row["batch"], row["seeds"]) for row in result["rows"]] == [
        ("recipe", 64, [0]), ("recipe", 256, [0])
    ]  # fmt: skip
    assert "run 2 of 2: 256-s0; left 0:0" in said.err
    # What a run would say beforehand is said once, though its runs say nothing.
    assert said.err.count("64-s0: warning: 5 steps in all are few to learn in") == 1
    assert said.err.count("256-s0: warning: 2 steps in all are few to learn in") == 1
    assert (tmp_path / "study/report.html").exists() and (tmp_path / "study/error.svg").exists()
    assert not (tmp_path / "study/64-s0/checkpoints").exists()
    before = (tmp_path / "study/64-s0/summary.json").read_bytes()

    ran = []
    real = sweep.train
    monkeypatch.setattr(sweep, "train", lambda *a, **k: ran.append(k["out"].name) or real(*a, **k))
    grown = [*SHORT, "--seeds", "2", "--arms", "gamma_one", "--arm-batches", "256"]
    assert main(["study", *grown, "--out", out]) == DONE
    assert ran == ["256-gamma_one-s0", "64-s1", "256-s1", "256-gamma_one-s1"]
    assert (tmp_path / "study/64-s0/summary.json").read_bytes() == before

    other = ["--label-smoothing", "0"]
    assert main(["study", *SHORT, *other, "--out", out]) == 2
    assert "was begun with label_smoothing 0.1 but 0 is asked for now" in capfd.readouterr().err


def test_runs_share_the_opened_images_and_end_as_they_would_alone(tmp_path, monkeypatch):
    opened = []
    real = sweep.open_sources
    monkeypatch.setattr(sweep, "open_sources", lambda *a: opened.append(a) or real(*a))
    cluster = mb.Cluster.from_env(device="cpu")
    config = mb.recipes.named("digits", epochs=0.2)
    configs = {(RECIPE, b): replace(config, batch=b, stages=(), micro=16) for b in (32, 64)}
    plan = StudyPlan(configs, range(2), rates=(1.0,))
    assert sweep.study(plan, tmp_path / "study", cluster, print) == "finished"
    assert len(opened) == 1
    alone = mb.train(replace(configs[RECIPE, 64], seed=1), cluster=cluster, quiet=True)
    summary = json.loads((tmp_path / "study/64-s1/summary.json").read_text())
    assert summary["weights_sha256"] == alone.weights_sha256


def test_a_failing_run_is_written_down_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    out, real = tmp_path / "study", sweep.train

    def failing(config, **how):
        if config.batch == 64:
            raise RuntimeError("no memory left")
        return real(config, **how)

    monkeypatch.setattr(sweep, "train", failing)
    assert main(["study", *SHORT, "--out", str(out)]) == FAILED
    assert "64-s0: failed: RuntimeError: no memory left" in capfd.readouterr().err
    study = read(out)
    assert [run.finished for cell in study.cells for run in cell.runs] == [False, True]
    assert "no memory left" in study_page(study)
    # Not again, unless that is asked for.
    monkeypatch.setattr(sweep, "train", real)
    assert main(["study", *SHORT, "--out", str(out)]) == FAILED
    assert "2, 1 finished already, 1 failed before (--retry" in capfd.readouterr().err
    assert main(["study", *SHORT, "--out", str(out), "--retry"]) == DONE
    assert all(run.finished for cell in read(out).cells for run in cell.runs)


def test_a_stopped_study_goes_on_from_the_checkpoint(tmp_path, monkeypatch):
    out, real = tmp_path / "study", sweep.train
    stops = [True]

    def stopping(config, **how):
        if config.batch == 256 and stops:
            stops.clear()
            os.kill(os.getpid(), signal.SIGTERM)  # kept, and heard at the first step
        return real(config, **how)

    monkeypatch.setattr(sweep, "train", stopping)
    assert main(["study", *SHORT, "--out", str(out)]) == STOPPED
    assert (out / "256-s0/checkpoints").is_dir()
    assert main(["study", *SHORT, "--out", str(out)]) == DONE
    lone = mb.train(
        Config.read(out / "256-s0/config.json"),
        cluster=mb.Cluster.from_env(device="cpu"),
        quiet=True,
    )
    summary = json.loads((out / "256-s0/summary.json").read_text())
    assert summary["weights_sha256"] == lone.weights_sha256


def test_a_stop_that_comes_in_the_last_moment_of_a_run_stops_the_next(tmp_path, monkeypatch):
    out, real, asked = tmp_path / "study", checkpoint.weights_sha256, []

    def asking(net):
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return real(net)

    monkeypatch.setattr(checkpoint, "weights_sha256", asking)
    assert main(["study", *SHORT, "--out", str(out)]) == STOPPED
    assert (out / "64-s0/summary.json").exists() and not (out / "256-s0/config.json").exists()
    assert main(["study", *SHORT, "--out", str(out)]) == DONE


TWO = ["digits", "--batches", "64,256", "--epochs", "1", "--deterministic", "--device", "cpu"]


def test_a_lost_worker_is_no_failure_of_the_run_it_was_in(tmp_path):
    out = tmp_path / "study"
    line = [sys.executable, "-m", "megabatch.cli", "study", *TWO, "--workers", "2"]
    line += ["--out", str(out)]
    with dying.held(line, out / "256-s0", first=2, last=6) as (running, workers):  # of six steps
        os.kill(random.choice(workers), signal.SIGKILL)
    _, said = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == DONE, said
    assert "ended by SIGKILL: loss 1 of 3, replaced" in said
    assert all(run.finished for cell in read(out).cells for run in cell.runs)
    for name in ("64-s0", "256-s0"):
        lone = mb.train(
            Config.read(out / name / "config.json"),
            cluster=mb.Cluster.from_env(device="cpu"),
            quiet=True,
        )
        summary = json.loads((out / name / "summary.json").read_text())
        assert summary["weights_sha256"] == lone.weights_sha256


FAILURES = [
    ("0", RunFailed("no room")),
    ("1", RunFailed("no room")),
    ("01", RunFailed("it diverged")),
    ("1", LookupError("nothing there")),
    ("0", RuntimeError("no memory")),
]


@pytest.mark.parametrize(("ranks", "error"), FAILURES)
def test_a_run_that_fails_on_one_worker_or_all_fails_and_the_others_go_on(ranks, error, tmp_path):
    """Also where the others were in the middle of a step and know nothing of it."""
    out = tmp_path / "study"
    plan, flags = read_flags("digits", [*SHORT[1:], "--retry"])
    made = run_local(2, failing_on, ranks, error, plan, str(out), flags, losses=Losses(3))
    assert made == (True, "finished")
    runs = {run.run.name: run for cell in read(out).cells for run in cell.runs}
    assert runs["256-s0"].finished
    assert str(error).strip("'") in str(runs["64-s0"].failure)


def failing_on(ranks, error, plan, out, flags):
    """A worker of a study that fails in the third step of the first run."""
    whole = RunFolder.check

    def check(folder):
        if folder._config.batch == 64 and os.environ["RANK"] in ranks:
            check.steps += 1
            if check.steps == 3:
                raise error
        whole(folder)

    check.steps = 0
    RunFolder.check = check
    return study_here(plan, out, flags)


def test_a_probe_forecasts(tmp_path, capfd):
    out = str(tmp_path / "study")
    flags = ["digits", "--batches", "256", "--epochs", "1", "--workers", "1", "--device", "cpu"]
    assert main(["study", *flags, "--probe", "--out", out, "--json"]) == DONE
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert (result["forecast"] is None) == ("noise scale is undefined" in said.err)


def test_a_probe_that_failed_forecasts_nothing(tmp_path):
    folder = made_up_run(tmp_path, 256, 0, 0.3, kind="probe", noise=600.0)
    assert read(tmp_path).noise_scale == 600
    (folder / "summary.json").unlink()
    changed(folder / "trial.json", failure="it diverged")
    study = read(tmp_path)
    assert math.isnan(study.noise_scale)
    assert study.forecast_in_words() == "the probe failed, and forecasts nothing"
    assert "forecast, after" not in study_page(study)


def test_time_left_is_by_whole_runs_and_counts_what_comes_after_a_search(tmp_path, monkeypatch):
    """A run that fails in its first steps, or is resumed in its last, takes no time at all."""
    said = []

    def train(config, **how):
        if config.batch == 128:
            raise RunFailed("it diverged")
        seconds = 10.0 * config.epochs
        return SimpleNamespace(ended="finished", seconds=seconds, steps=1, top1=0.5,
                               images_per_second=1.0)  # fmt: skip

    monkeypatch.setattr(sweep, "train", train)
    config = mb.recipes.named("digits", epochs=6)
    configs = {(RECIPE, b): replace(config, batch=b, stages=(), micro=16) for b in (64, 128)}
    plan = StudyPlan(configs, range(1), rates=(0.5, 1.0))
    cluster = mb.Cluster.from_env(device="cpu")
    assert sweep.study(plan, tmp_path, cluster, said.append) == "finished"
    began = [line for line in said if line.startswith("run ")]
    # Six runs of a minute each, as the first was.
    assert began == [
        "run 1 of 4: rate-64-x0.5-s0",
        "run 2 of 4: rate-64-x1-s0; left 5:00",
        "run 3 of 4: rate-128-x0.5-s0; left 4:00",
        "run 4 of 4: rate-128-x1-s0; left 3:00",
        "run 1 of 2: 64-s0; left 2:00",
        "run 2 of 2: 128-s0; left 1:00",
    ]


def test_a_study_that_goes_on_in_another_world_does_not_repeat_itself(tmp_path):
    plan = StudyPlan(
        {(RECIPE, 64): mb.recipes.named("digits", epochs=0.2, batch=64)}, range(2), probe=True
    )
    cluster, said, progress = mb.Cluster.from_env(device="cpu"), [], sweep.StudyProgress()
    for _ in range(2):
        assert sweep.study(plan, tmp_path, cluster, said.append, progress=progress) == "finished"
    for begin in ("a probe of the noise: 1", "forecast: ", "the probe does not", "the runs: 2"):
        assert sum(line.startswith(begin) for line in said) <= 1
    assert [line for line in said if line.startswith("the runs")] == ["the runs: 2"]
    sweep.study(replace(plan, seeds=range(3)), tmp_path, cluster, said.append)
    assert "the runs: 3, 2 finished already" in said
    assert any(line.startswith("run 3 of 3: 64-s2") for line in said)


def test_a_study_says_once_that_a_plan_gives_way(tmp_path):
    """Its runs, which would say it each, are quiet."""
    config = replace(mb.recipes.named("digits", epochs=0.1, batch=64), stages=())
    torus = replace(config, plan="torus", wire="fp16")
    configs = {(RECIPE, 64): torus, ("x", 64): replace(torus, lr=replace(torus.lr, warmup=0.0))}
    cluster, said = mb.Cluster.from_env(device="cpu"), []
    sweep.study(StudyPlan(configs, range(2)), tmp_path, cluster, said.append)
    told = [line for line in said if "plan" in line]
    assert told == ["plan none: torus in fp16 gives way: one worker has nothing to sum"]


def test_states_of_a_folder(tmp_path):
    trial = Trial("run", RECIPE, 64, mb.recipes.digits())
    folder = tmp_path / trial.name
    assert state(folder, trial) == "new"
    write_label(folder, trial)
    assert state(folder, trial) == "new"
    made_up(folder, config=json.loads(trial.config.to_json()))
    assert state(folder, trial) == "begun"
    write_label(folder, trial, "it broke")
    assert state(folder, trial) == "failed"
    (folder / "summary.json").write_text('{"ended": "stopped"}')
    assert state(folder, trial) == "failed"
    (folder / "summary.json").write_text('{"ended": "finished", "top1": 0.5}')
    assert state(folder, trial) == "finished"


def test_a_long_run_says_how_far_it_is():
    said, due = [], iter([False, True])
    trial = Trial("run", RECIPE, 64, mb.recipes.digits())
    voice = sweep.Voice(trial, said.append, lambda: next(due))
    voice.write("evaluation", {"epoch": 1.0, "top1": 0.5})
    assert said == []  # what ends soon needs no words
    voice.write("train", {"step": 1})
    voice.write("evaluation", {"epoch": 2.0, "top1": 0.5})
    assert said == ["64-s0: 2.0 of 20 epochs, top-1 50.00%"]


def test_a_folder_of_a_study_has_a_report(tmp_path, capfd):
    made_up_run(tmp_path / "study", 64, 0, 0.9)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "study"), "--out", str(out), "--json"]) == DONE
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["rows"][0]["batch"] == 64
    assert "Error against batch" in out.read_text()


# --- what the numbers say ----------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    for batch, top1s in ((64, (0.90, 0.91, 0.92)), (256, (0.89, 0.91, 0.915)), (1024, (0.7, 0.71))):
        for seed, top1 in enumerate(top1s):
            made_up_run(tmp_path, batch, seed, top1)
    for seed, top1 in enumerate((0.80, 0.81, 0.805)):
        made_up_run(tmp_path, 256, seed, top1, arm="no_warmup")
    made_up_run(tmp_path, 256, 0, 0.9, arm="gamma_one")
    made_up_run(tmp_path, 1024, 0, 0.3, kind="probe", noise=600.0)
    return read(tmp_path)


def test_cells_and_differences(study):
    assert [(cell.arm, cell.batch, len(cell.runs)) for cell in study.cells] == [
        ("recipe", 64, 3), ("recipe", 256, 3), ("recipe", 1024, 2),
        ("gamma_one", 256, 1), ("no_warmup", 256, 3),
    ]  # fmt: skip
    assert study.baseline is study.cells[0]
    rows = {(row["arm"], row["batch"]): row for row in study.rows()}
    assert rows["recipe", 64]["to_baseline"] is None
    assert rows["recipe", 256]["to_baseline"] == pytest.approx(
        100 * (statistics.fmean((0.89, 0.91, 0.915)) - 0.91)
    )
    assert rows["no_warmup", 256]["to_recipe"] == pytest.approx(-10, abs=0.01)
    assert rows["gamma_one", 256]["to_recipe_half"] is None
    assert rows["recipe", 64]["epochs_to_baseline"] == 4
    assert rows["recipe", 1024]["epochs_to_baseline"] is None
    assert study.epochs_to_baseline(study.cells[2], 0.75) == 4
    assert study.noise_scale == 600


def test_the_noise_of_runs_is_told_along_their_way(study, tmp_path):
    """At the end, where the rate is 0, it is a hundred times what it was."""
    lines = [step_line(n, epoch=n + 1.0, noise_scale=s) for n, s in enumerate((9, 50, 70, 8e4))]
    folder = made_up_run(tmp_path, 64, 0, 0.90)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    run = read(tmp_path).cell("recipe", 64).runs[0]
    along = [run.noise_scale_at(share) for share in (0.25, 0.5, 0.75, 1.0)]
    assert along == [9, 50, 70, 8e4] and run.noise_scale == 8e4
    assert math.isnan(run.noise_scale_at(0.2))
    (only,) = [row for row in noise(read(tmp_path)).split("<tr") if ">64</td>" in row]
    assert [number in only for number in ("36", "50", "57", "26,700")] == [True] * 4
    lines[0] = step_line(0, epoch=None, noise_scale=9)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert read(tmp_path).cell("recipe", 64).runs[0].noise_scale == 8e4


def test_the_table_fits_80_columns_and_keeps_its_numbers(study, tmp_path):
    lines = list(table_lines(list(study.rows())))
    assert max(map(len, lines)) <= 80
    heads = "batch seeds top-1 to baseline epochs steps seconds images/s"
    assert " ".join(lines[0].split()) == heads
    assert lines[2].split()[:8] == ["256", "3", "90.50", "±", "3.29", "-0.50", "±", "2.74"]
    arm = next(line for line in lines if line.startswith("no_warmup"))
    assert "80.50 ± 1.24" in arm and "-10.00 ±" in arm
    for seed, top1 in enumerate((0.2, 0.9)):  # wide numbers: what is spare gives way, nothing else
        made_up_run(tmp_path, 1_048_576, seed, top1)
    label = tmp_path / "1048576-s1" / "trial.json"
    label.write_text(json.dumps({**json.loads(label.read_text()), "failure": "it broke"}))
    lines = list(table_lines(list(read(tmp_path).rows())))
    assert max(map(len, lines)) <= 80 and "images/s" not in lines[0]
    assert "1,048,576" in lines[4] and lines[0].split()[:3] == ["batch", "seeds", "failed"]


def test_the_reading_says_what_can_be_said(study):
    said = reading(study)
    assert "The baseline, a batch of 64, ends with 91.00 % top-1 ± 2.48 over 3 seeds." in said
    assert "A batch of 256 ends 0.50 points below it (95 % interval" in said
    assert "which holds 0" in said
    assert "A batch of 1,024 ends 20.50 points below it" in said
    assert "None of them stays within 0.3 points of the baseline by its mean." in said
    assert (
        "600 images, roughly forecasts where scaling ends; by its mean 256 is the first batch to "
        "lose more than 0.3." in said
    )
    assert (
        "these differ from the recipe by more than their interval: no_warmup at 256 -10.00" in said
    )
    assert "One seed tells nothing of gamma_one at 256." in said and "nan" not in said


def test_nothing_is_concluded_from_one_seed(tmp_path):
    made_up_run(tmp_path, 64, 0, 0.9)
    made_up_run(tmp_path, 256, 0, 0.8)
    made_up_run(tmp_path, 256, 0, 0.3, kind="probe", noise=600.0)
    alone = reading(read(tmp_path))
    assert "A batch of 256 ends 10.00 points below it (one seed: no interval)." in alone
    assert "within 0.3" not in alone and alone.endswith("roughly forecasts where scaling ends.")
    made_up_run(tmp_path, 64, 1, 0.9)  # of the baseline two, of the larger batch one
    assert reading(read(tmp_path)).endswith("roughly forecasts where scaling ends.")
    made_up_run(tmp_path, 512, 0, 0.9)
    made_up_run(tmp_path, 512, 1, 0.9)
    kept = reading(read(tmp_path))
    assert "512 is the largest batch of several seeds that stays within 0.3" in kept
    assert "; by their means up to 512 no batch of several seeds" in kept
    assert kept.endswith(" loses more than 0.3.")
    made_up_run(tmp_path, 256, 1, 0.8)
    every = reading(read(tmp_path))
    assert "256 is the first batch to lose more than 0.3." in every
    assert "512 is the largest batch that stays within 0.3" in every


def test_that_none_stays_is_said_of_batches_with_several_seeds_alone(tmp_path):
    for seed in (0, 1):
        made_up_run(tmp_path, 64, seed, 0.9)
        made_up_run(tmp_path, 256, seed, 0.8)
    assert "None of them stays within 0.3 points" in reading(read(tmp_path))
    made_up_run(tmp_path, 512, 0, 0.95)
    said = reading(read(tmp_path))
    assert "None of those with several seeds stays within 0.3 points" in said


def test_whose_one_seed_it_is_that_leaves_no_interval(tmp_path):
    made_up_run(tmp_path, 64, 0, 0.9)
    for seed, top1 in enumerate((0.8, 0.81, 0.82)):
        made_up_run(tmp_path, 256, seed, top1)
    made_up_run(tmp_path, 512, 0, 0.7)
    said = reading(read(tmp_path))
    assert "256 ends 9.00 points below it (the baseline has one seed: no interval)." in said
    assert "512 ends 20.00 points below it (one seed: no interval)." in said


def test_seeds_that_end_alike_are_no_proof(tmp_path):
    """Of 359 digits two nets often tell as many right; an interval of no width would leave out 0,
    whatever the difference."""
    for seed in (0, 1):
        made_up_run(tmp_path, 64, seed, 0.95)
        made_up_run(tmp_path, 256, seed, 0.96)
        made_up_run(tmp_path, 256, seed, 0.955, arm="gamma_one")
    said = reading(read(tmp_path))
    assert "A batch of 256 ends 1.00 points above it (its seeds end alike: no interval)." in said
    assert "nothing can be said of gamma_one at 256." in said and "± 0.00" not in said
    assert "differ from the recipe" not in said and "No difference" not in said


def test_chance_is_named_where_many_arms_are_compared(tmp_path):
    def study(arms):
        for seed in (0, 1, 2):
            made_up_run(tmp_path, 64, seed, 0.9 + seed / 1000)
            for arm in range(arms):
                made_up_run(tmp_path, 64, seed, (0.8 if arm == 0 else 0.9) + seed / 1000, f"a{arm}")
        return reading(read(tmp_path))

    assert "a0 at 64 -10.00" in study(9) and "by chance" not in study(9)
    assert "One interval in twenty leaves 0 out by chance." in study(10)


def test_that_the_optimizer_goes_with_the_batch_is_said(tmp_path):
    """A difference to a baseline by SGD does not tell what the batch costs and what Muon gains."""
    for seed in (0, 1):
        for batch, top1 in ((256, 0.49), (4096, 0.52), (8192, 0.50)):
            config = mb.recipes.named("tiny30", batch=batch)
            made_up_run(tmp_path, batch, seed, top1 + seed / 100, config=config)
    said = reading(read(tmp_path))
    assert (
        "The optimizer goes with the batch (SGD at 256; Muon at 4,096, 8,192): these differences "
        "are of both." in said
    )
    assert "better baseline" not in said
    # One optimizer throughout is nothing to tell.
    made_up_run(tmp_path / "one", 64, 0, 0.9)
    made_up_run(tmp_path / "one", 256, 0, 0.9)
    assert "optimizer" not in reading(read(tmp_path / "one"))


def test_an_arm_that_does_better_at_the_baselines_batch_is_what_batches_are_held_against(tmp_path):
    """Or a baseline that nobody would train by makes large batches look free."""
    for seed, less in enumerate((0.0, 0.01, 0.02)):
        made_up_run(tmp_path, 64, seed, 0.90 - less)
        made_up_run(tmp_path, 256, seed, 0.92 - less)
        made_up_run(tmp_path, 256, seed, 0.99 - less, arm="muon")  # at another batch
        made_up_run(tmp_path, 64, seed, 0.905 - less, arm="gamma_one")  # within its interval
    assert "better baseline" not in reading(read(tmp_path))
    made_up_run(tmp_path, 64, 0, 0.95, arm="muon")
    said = reading(read(tmp_path))
    assert (
        "At 64 itself muon may be the better baseline: it ends 6.00 points above the recipe (one "
        "seed: no interval); held against that: 256 -4.00." in said
    )
    made_up_run(tmp_path, 64, 1, 0.96, arm="muon")
    made_up_run(tmp_path, 64, 2, 0.94, arm="muon")
    said = reading(read(tmp_path))
    assert "At 64 itself muon is the better baseline: it ends 6.00 points above" in said
    assert "held against that: 256 -4.00 ± 2.27." in said


def test_an_arm_that_takes_more_steps_is_said_to(tmp_path):
    """A batch that follows the noise may begin at a quarter, and stay there."""
    for seed, less in enumerate((0.0, 0.01, 0.02)):
        made_up_run(tmp_path, 64, seed, 0.80 - less, steps=100)
        made_up_run(tmp_path, 64, seed, 0.90 - less, arm="follow_noise", steps=350)
        made_up_run(tmp_path, 64, seed, 0.70 - less, arm="grow", steps=103)
    study = read(tmp_path)
    assert "follow_noise at 64 +10.00 ± 2.27 in 3.5 times the steps." in reading(study)
    assert "grow at 64 -10.00 ± 2.27; " in reading(study)
    assert ">350<" in study_page(study)


def test_an_arm_at_a_batch_that_the_recipe_does_not_survive_is_held_against_the_baseline(tmp_path):
    """What LARS does where SGD diverges is what a study is made for."""
    for seed, less in enumerate((0.0, 0.01, 0.02)):
        made_up_run(tmp_path, 64, seed, 0.90 - less)
        made_up_run(tmp_path, 512, seed, 0.80 - less, arm="lars")
        fails(tmp_path, 512, seed)
    said = reading(read(tmp_path))
    assert (
        "Where the recipe itself has no finished run, the arms to the baseline: lars at 512 -10.00 "
        "± 2.27." in said
    )


def fails(study, batch, seed, arm=RECIPE):
    """A run that did not finish, and why."""
    trial = Trial("run", arm, batch, replace(mb.recipes.digits(), seed=seed))
    write_label(study / trial.name, trial, "it diverged")


def test_the_reading_tells_of_runs_that_failed(study, tmp_path):
    assert "failed" not in reading(study)
    fails(tmp_path, 1024, 2)
    for seed in range(3):
        fails(tmp_path, 4096, seed)
        fails(tmp_path, 256, seed, arm="sgd")
    said = reading(read(tmp_path))
    assert (
        "Runs failed: 1 of 3 at 1,024, 3 of 3 at 4,096, 3 of 3 of sgd at 256; what is said of a "
        "batch is of the runs that finished." in said
    )


def test_a_smaller_batch_that_never_finished_is_named_beside_the_baseline(study, tmp_path):
    fails(tmp_path, 32, 0)
    said = reading(read(tmp_path))
    assert "The baseline, a batch of 64 (of 32 no run has finished), ends with 91.00 %" in said
    assert "Runs failed: 1 of 1 at 32;" in said


def test_the_probe_of_the_largest_batch_forecasts(tmp_path):
    for batch, scale in ((256, 400.0), (1024, 900.0), (64, 100.0), (4096, None)):
        made_up_run(tmp_path, batch, 0, 0.3, kind="probe", noise=scale)
    study = read(tmp_path)
    assert study.noise_scale == 900 and study.probe.batch == 1024
    assert "scale is 900 images" in study.forecast_in_words()
    made_up_run(tmp_path, 256, 0, 0.9)
    _, _, row = study_page(read(tmp_path)).partition("forecast, after")
    assert "1,024" in row[:80]


def test_a_run_whose_metrics_were_cut_does_not_shift_the_curve(tmp_path):
    for seed in (0, 1):
        folder = made_up_run(tmp_path, 64, seed, 0.8)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    evaluations = [line for line in lines if "evaluation" in line]
    whole = [(1, 0.2), (2, 0.4), (3, 0.6), (4, 0.8)]
    for kept in (evaluations[:2], evaluations[2:], [], [evaluations[0], evaluations[3]]):
        (folder / "metrics.jsonl").write_text("".join(kept))
        study = read(tmp_path)
        assert study.cells[0].curve == [(epoch, pytest.approx(top1)) for epoch, top1 in whole]
        assert study.epochs_to_baseline(study.cells[0]) == 4


def test_a_study_without_a_finished_run_says_so(tmp_path):
    trial = Trial("run", RECIPE, 64, mb.recipes.digits())
    write_label(tmp_path / trial.name, trial, "it broke")
    study = read(tmp_path)
    assert reading(study) == "No run of the recipe has finished yet. Runs failed: 1 of 1 at 64."
    assert "it broke" in study_page(study) and error_figure(study, "t") == ""


def test_the_page_has_every_part_and_shows_words_as_words(study, tmp_path):
    hostile = "<script>alert(1)</script>"
    folder = made_up_run(tmp_path, 256, 5, 0.5, arm="gamma_one")
    label = json.loads((folder / "trial.json").read_text())
    (folder / "trial.json").write_text(json.dumps({**label, "arm": hostile, "failure": hostile}))
    page = study_page(read(tmp_path))
    for title in ("Reading", "Error against batch", "Epochs to the baseline", "Arms", "Curves",
                  "Time", "Gradient noise", "What each batch ran with", "Settings"):  # fmt: skip
        assert title in page
    assert hostile not in page and "nan" not in page.replace("nano", "")
    assert "http://" not in page and "https://" not in page


def test_the_page_says_which_images_judged(tmp_path):
    config = mb.recipes.named("digits", epochs=4, batch=64)
    made_up_run(tmp_path / "plain", 64, 0, 0.9, config=config)
    held_out = replace(config, data=replace(config.data, tuning_share=0.2))
    made_up_run(tmp_path / "held", 64, 0, 0.9, config=held_out)
    assert "error on the validation images after" in study_page(read(tmp_path / "plain"))
    assert "error on held-out training images after" in study_page(read(tmp_path / "held"))


def test_the_figure_is_an_svg_of_its_own(study):
    drawn = error_figure(study, "error <here>")
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg") and "nan" not in drawn
    words = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert "error <here>" in words and {"64", "256", "1,024"} <= set(words)


def test_errors_as_goyal_reports_them(tmp_path):
    """By the paper's own numbers: 23.74 and a deviation of 0.09 over five runs at 8k."""
    medians = [0.7626 + 0.0009 * step for step in (-1.2, -0.6, 0, 0.6, 1.2)]
    for seed, median in enumerate(medians):
        made_up_run(tmp_path, 64, seed, 0.7, median_top1=median, best_top1=0.8)
    for seed in range(2):  # of an earlier version, or torn: there is no median, nor a speed
        made_up_run(tmp_path, 128, seed, 0.6, images_per_second=None)
    first, second = read(tmp_path).rows()
    assert first["median_error"] == pytest.approx(23.74)
    assert first["median_error_deviation"] == pytest.approx(0.09 * 0.9**0.5, rel=1e-9)
    assert first["least_error"] == pytest.approx(20) and first["top1"] == pytest.approx(70)
    assert second["median_error"] is None and second["median_error_deviation"] is None
    page = study_page(read(tmp_path))
    assert "23.74 ± 0.09" in page and "nan" not in page.replace("nano", "")


def drawn_lines(drawn):
    """The names of a picture's lines, and for each the heights of its dots, from the bottom up."""
    root = ET.fromstring(drawn)
    high = float(root.attrib["height"])
    groups = [g for g in root.iter() if g.tag.endswith("}g")]
    return {
        next(e.text for e in g if e.tag.endswith("text")): [
            (float(e.attrib["cx"]), high - float(e.attrib["cy"]))
            for e in g
            if e.attrib.get("class") == "dot"
        ]
        for g in groups
    }


def test_an_arm_and_the_recipe_are_one_picture(study):
    assert arm_figure(study, RECIPE, 256, "t") == ""  # nothing to compare
    assert arm_figure(study, "no_warmup", 64, "t") == ""
    lines = drawn_lines(arm_figure(study, "no_warmup", 256, "256: <top-1>"))
    assert list(lines) == ["recipe", "no_warmup"]
    recipe, worse = lines.values()
    assert len(recipe) == len(worse) == 4  # an evaluation an epoch
    assert [x for x, _ in recipe] == [x for x, _ in worse]
    # Heights are accuracies: 80.5 % and 90.5 % in the end, a quarter of them after an epoch.
    (_, first), (_, last) = recipe[0], recipe[-1]
    share = (worse[-1][1] - first) / (last - first)
    assert share == pytest.approx((0.805 - 0.905 / 4) / (0.905 - 0.905 / 4), abs=0.005)
    # Differences to the recipe, then top-1 by epoch, and the training loss beside it.
    assert study_page(study).count("Arms at 256") == 3


def test_a_difference_stands_out_where_its_interval_tells_it_from_chance(tmp_path):
    for seed, less in enumerate((0.0, 0.002, 0.004)):
        made_up_run(tmp_path, 256, seed, 0.6 - less)
        made_up_run(tmp_path, 256, seed, 0.5 + 2 * less, arm="sgd")
        made_up_run(tmp_path, 256, seed, 0.6 - 5 * less, arm="decay_all")
    made_up_run(tmp_path, 256, 0, 0.2, arm="lamb")
    page = study_page(read(tmp_path))
    assert "<b>-9.40</b>" in page
    assert ">-0.80<" in page and "<b>-0.80" not in page
    assert ">-39.80<" in page and "<b>-39.80" not in page


def test_arms_stand_by_their_distance_to_the_recipe():
    found = {"low": Mean(-3.0, 0.5, 3), "one seed": Mean(1.0, math.nan, 1), "<high>": Mean(2, 1, 3)}
    drawn = differences("Arms", {**found, "failed": Mean(math.nan, math.nan, 0)}, "points")
    names = re.findall(r"<span>([^<]*)</span>", drawn)
    assert names == ["&lt;high&gt;", "one seed", "low"]
    assert re.findall(r'class="n">([^<]*)<', drawn) == ["+2.00 ± 1.00", "+1.00", "-3.00 ± 0.50"]
    places = [float(at) for at in re.findall(r'class="at" style="left:([\d.]+)%', drawn)]
    (zero,) = {float(at) for at in re.findall(r'class="zero" style="left:([\d.]+)%', drawn)}
    by_point = (places[0] - places[2]) / 5
    assert [(at - zero) / by_point for at in places] == pytest.approx([2, 1, -3], abs=0.01)
    widths = [float(wide) for wide in re.findall(r"width:([\d.]+)%", drawn)]
    assert [wide / by_point for wide in widths] == pytest.approx([2, 0, 1], abs=0.01)
    assert differences("Arms", {"failed": Mean(math.nan, math.nan, 0)}, "points") == ""


def test_many_arms_at_one_batch_are_drawn_few_at_a_time(tmp_path):
    arms = [f"arm{number}" for number in range(10)]
    for arm in (RECIPE, *arms):
        made_up_run(tmp_path, 64, 0, 0.5, arm=arm)
    found = read(tmp_path)
    drawn = study_page(found)
    assert drawn.count("Arms at 64") == 1 + 2 * 2  # seven beside the recipe, then three
    assert "<figcaption>Error<" not in drawn and "Error against batch" in drawn
    assert reading(found).endswith(f"One seed tells nothing of {', '.join(arms)} at 64.")


def test_an_arm_that_diverges_is_drawn_as_far_as_it_came(study, tmp_path):
    folder = made_up_run(tmp_path, 64, 0, 0.1, arm="sgd")
    (folder / "summary.json").unlink()
    label = json.loads((folder / "trial.json").read_text())
    (folder / "trial.json").write_text(json.dumps({**label, "failure": "it diverged"}))
    found = read(tmp_path)
    lines = drawn_lines(arm_figure(found, "sgd", 64, "t"))
    assert list(lines) == ["recipe", "sgd (failed)"]
    assert len(lines["sgd (failed)"]) == 4
    assert "sgd (failed)" in study_page(found)
    row = next(row for row in found.rows() if row["arm"] == "sgd")
    assert row["top1"] is None and row["epochs_to_baseline"] is None  # drawn, and not counted


def test_torn_folders_are_left_out(tmp_path):
    made_up_run(tmp_path, 64, 0, 0.9)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/trial.json").write_text('{"batch": "many"')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/trial.json").write_text('{"batch": "many", "seed": []}')
    for seed, batch in enumerate((0, -4, True)):
        changed(made_up_run(tmp_path, 128, seed, 0.9) / "trial.json", batch=batch)
    for seed, top1 in enumerate((None, math.nan, 7)):  # no accuracy that a run can have
        changed(made_up_run(tmp_path, 32, seed, 0.9) / "summary.json", top1=top1)
    study = read(tmp_path)
    assert [cell.batch for cell in study.cells if cell.finished] == [64]
    assert "a batch of 64 (of 32 no run has finished), ends with 90.00 %" in reading(study)
    assert "nan" not in study_page(study).replace("nano", "")


def test_a_search_is_not_decided_by_what_is_no_number(tmp_path):
    for factor, top1 in ((0.5, math.nan), (1.0, 0.5), (2.0, 0.6), (4.0, 0.9)):
        folder = made_up_run(tmp_path, 64, 0, 0.5, kind="rate", factor=factor)
        changed(folder / "summary.json", top1=top1)
    changed(folder / "trial.json", factor=None)
    study = read(tmp_path)
    assert study.chosen_factors() == {(RECIPE, 64): 2.0}
    assert "nan" not in study_page(study).replace("nano", "")
