"""Recipes: the numbers derived from each are its paper's, and each takes two steps on a CPU."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import megabatch_process
from ranks import run_ranks

import megabatch as mb
from megabatch.config import LearningRate, OptimizerConfig
from megabatch.errors import UserError
from megabatch.plans.names import named as named_plan
from megabatch.plans.names import plan_of
from megabatch.recipes import BY_BATCH, RECIPES, named
from megabatch.recipes.imagenet import IMAGES
from megabatch.recipes.mlperf import ROWS, mlperf
from megabatch.sync.buckets import buckets_of
from megabatch.sync.choice import choose_plan
from megabatch.sync.execute import Pipeline
from megabatch.verbs.train import read_flags

IMAGENET = sorted(set(RECIPES) - {"digits", "tiny", "tiny30"})


def table(config):
    """The derived numbers of a recipe on ImageNet, as train prints them."""
    return {name: value for name, value, _ in config.derived(images=1_281_167, world=1)}


def rates(config, *epochs):
    return [config.lr_at(epoch) for epoch in epochs]


# --- the papers' numbers -----------------------------------------------------------------------


def test_imagenet_has_so_many_training_images():
    assert IMAGES == 1_281_167


def test_goyal2017():
    config = mb.recipes.goyal2017()
    found = table(config)
    # 5.1 of the paper: 90 epochs of 8k; 0.1 * kn / 256, from 0.1 in 5 epochs, a tenth at 30, 60, 80
    assert found["steps an epoch"] == "156.39"
    assert found["warm-up steps"] == "782"  # 780 in Intel's solver of this recipe
    assert found["peak rate"] == "3.2"
    assert found["steps in all"] == "14,076"  # Intel's: 14,075, whole batches only
    assert found["images in all"] == "115,310,592"
    assert rates(config, 0, 2.5, 5, 29.9) == pytest.approx([0.1, 1.65, 3.2, 3.2], rel=1e-12)
    assert rates(config, 30, 60, 80) == pytest.approx([0.32, 0.032, 0.0032], rel=1e-12)
    assert (config.span, config.batch // config.span) == (32, 256)  # workers of the paper
    assert config.optimizer == OptimizerConfig(
        momentum=0.9, weight_decay=1e-4, trust=None, nesterov=True, form="pytorch"
    )
    assert config.data.crop_area == (0.08, 1.0)
    assert config.data.crop_aspect == (3 / 4, 4 / 3)
    assert (config.data.flip, config.data.size, config.data.resize) == (True, 224, 256)


@pytest.mark.parametrize(
    ("batch", "rate"),
    [(64, 0.025), (128, 0.05), (256, 0.1), (512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6),
     (8192, 3.2), (16384, 6.4), (32768, 12.8), (65536, 25.6)],
)  # fmt: skip
def test_goyal2017_at_the_batches_of_the_papers_results(batch, rate):
    config = replace(named("goyal2017", batch=batch), micro=32).check()
    assert config.lr_at(5) == pytest.approx(rate, rel=1e-12)
    # 5.3 of the paper: above 256 always from 0.1; below there is no warm-up, and no rate above
    assert config.lr_at(0) == min(0.1, rate)
    assert max(rates(config, *range(6))) == pytest.approx(rate, rel=1e-12)
    first = next(how for name, _, how in config.derived(IMAGES, 1) if name == "warm-up steps")
    assert first == f"5 epochs from {min(0.1, rate):g}"


def test_you2018():
    config = mb.recipes.you2018()
    found = table(config)
    # The paper's results: 32,768 for 90 epochs on 2,048 nodes
    assert found["steps an epoch"] == "39.10"
    assert found["steps in all"] == "3,519"
    assert found["images in all"] == "115,310,592"
    assert config.batch // config.span == 2048
    # The authors' group's 32k: 2^5, warm-up 14, power 2
    assert found["warm-up steps"] == "548"
    assert found["peak rate"] == "32"
    assert rates(config, 0, 7, 14, 52, 90) == pytest.approx([0, 16, 32, 8, 0], abs=1e-12)
    assert (config.data.size, config.data.scale, config.data.flip) == (224, (256, 256), True)
    assert config.optimizer.trust == 0.001
    # 64 epochs in 14 minutes is the same recipe, shorter
    assert table(named("you2018", epochs=64))["steps in all"] == "2,503"


@pytest.mark.parametrize(
    ("batch", "power"), [(512, 2), (1024, 2.5), (4096, 3.5), (8192, 4), (16384, 4.5), (32768, 5)]
)
def test_you2018_at_the_batches_of_the_authors_later_code(batch, power):
    config = replace(named("you2018", batch=batch), micro=16).check()
    assert config.lr_at(14) == pytest.approx(2**power, rel=1e-12)


def test_you2018_alexnet():
    config = mb.recipes.you2018_alexnet()
    found = table(config)
    # The authors' solver for AlexNet-BN at 32k: base rate 32, ramp from 1 in 400 steps, decay 5e-4
    assert found["warm-up steps"] == "400"
    assert found["peak rate"] == "32"
    assert found["steps in all"] == "3,910"  # 100 epochs; the solver's 4,000 are 102
    assert found["images in all"] == "128,122,880"
    half = config.lr.warmup / 2
    assert rates(config, 0, half) == pytest.approx([1, 1 + 31 / 4], rel=1e-12)
    # Caffe: base_lr * (1 - iteration / max_iter) ^ 2, the ramp's iterations counted
    after = [config.lr.warmup, 50, 100]
    assert rates(config, *after) == pytest.approx(
        [32 * (1 - epoch / 100) ** 2 for epoch in after], abs=1e-12
    )
    assert config.batch // config.span == 2048
    assert (config.data.size, config.data.scale, config.data.flip) == (227, (256, 256), True)
    assert (config.optimizer.weight_decay, config.optimizer.trust) == (5e-4, 0.001)
    assert (config.optimizer.form, config.optimizer.momentum_correction) == ("paper", False)


def test_jia2018():
    config = mb.recipes.jia2018()
    found = table(config)
    # The paper: 64k, 90 epochs, 2,048 GPUs; weights and gradients fp16, LARS in fp32
    assert found["steps an epoch"] == "19.55"
    assert found["steps in all"] == "1,760"
    assert found["images in all"] == "115,343,360"
    assert config.batch // config.span == 2048
    assert (config.precision, config.half_weights) == ("fp16", True)
    # MLPerf's 65,536
    assert found["warm-up steps"] == "607"
    assert found["peak rate"] == "24.699"
    assert rates(config, 31, 60.5, 90) == pytest.approx(
        [24.699, 24.699 / 4 + 0.75e-4, 1e-4], rel=1e-12
    )
    row = mlperf(65536)
    assert config.optimizer == row.optimizer
    assert config.lr == row.lr


def test_jia2018_alexnet():
    config = mb.recipes.jia2018_alexnet()
    found = table(config)
    # The paper: 64k, 95 epochs, 1,024 GPUs, batch norm after pool5
    assert config.model == "alexnet_bn_pool5"
    assert found["steps in all"] == "1,858"
    assert found["images in all"] == "121,765,888"
    assert config.batch // config.span == 1024
    assert (config.precision, config.half_weights) == ("fp16", True)
    assert config.data.size == 227
    # LARS's authors' solver at 32k: 32 after a tenth of the run
    assert found["peak rate"] == "32"
    assert found["warm-up steps"] == "196"
    assert config.optimizer == mb.recipes.you2018_alexnet().optimizer


def test_mikami2018():
    config = mb.recipes.mikami2018()
    found = table(config)
    # The first version: 34k, later 68k, 90 epochs on 2,176 GPUs, 16 and then 32 images each
    assert [stage.batch for stage in config.all_stages] == [34_816, 69_632]
    assert [stage.batch // 2176 for stage in config.all_stages] == [16, 32]
    assert config.span == 16
    assert found["steps an epoch"] == "36.80"
    # 30 epochs of 36.8 steps and 60 of 18.4
    assert found["steps in all"] == "2,208"
    assert found["images in all"] == "115,310,592"
    assert config.bn_momentum == 1.0  # no moving averages
    assert config.label_smoothing == 0  # the second version's
    # MLPerf's 32,768: 21.2 and 16 epochs of warm-up
    assert found["peak rate"] == "22.525"  # 21.2 * 34,816 / 32,768
    assert found["warm-up steps"] == "589"
    assert config.lr_at(53, batch=69_632) == config.lr_at(53)  # the batch grows, the rate does not
    assert config.optimizer == replace(mlperf(32768).optimizer, eps=1e-6)
    assert config.lr == mlperf(32768).lr


def test_mikami2018_54k():
    config = mb.recipes.mikami2018_54k()
    # The second version: 16 images on each of 3,456 GPUs, smoothed labels
    assert [stage.batch for stage in config.all_stages] == [16 * 3456]
    assert (config.span, config.label_smoothing, config.bn_momentum) == (16, 0.1, 1.0)
    assert table(config)["steps in all"] == "2,086"
    # MLPerf's 58,880, the rate in proportion
    assert config.lr_at(29) == pytest.approx(23.246 * 55_296 / 58_880, rel=1e-12)
    assert config.optimizer == replace(mlperf(58880).optimizer, eps=1e-6)


def test_mikami2018_119k():
    config = mb.recipes.mikami2018_119k()
    # The largest batch of the paper: 32 images on each of 3,808 GPUs
    assert [stage.batch for stage in config.all_stages] == [16 * 3808, 32 * 3808]
    assert config.all_stages[-1].batch == 119 * 1024
    assert config.stages[0].epoch > config.lr.warmup  # not two ramps at once


def test_goyal2017_resnet101():
    deeper = mb.recipes.goyal2017_resnet101()
    assert deeper == replace(mb.recipes.goyal2017(), name=deeper.name, model="resnet101")


# --- how gradients are summed ------------------------------------------------------------------

SUMMED = {
    "digits": ("backend", "fp32"),
    "goyal2017": ("three_phase", "fp32"),
    "goyal2017_resnet101": ("three_phase", "fp32"),
    "you2018": ("ring", "fp32"),
    "you2018_alexnet": ("ring", "fp32"),
    "jia2018": ("hybrid", "fp16"),
    "jia2018_alexnet": ("hybrid", "fp16"),
    "mikami2018": ("torus", "fp16"),
    "mikami2018_54k": ("torus", "fp16"),
    "mikami2018_119k": ("torus", "fp16"),
    "mlperf": ("backend", "fp32"),
    "tiny": ("backend", "fp32"),
    "tiny30": ("backend", "fp32"),
}


def test_each_recipe_sums_as_its_paper_does():
    assert {name: (r().plan, r().wire) for name, r in RECIPES.items()} == SUMMED
    # Goyal, section 4: inside the server, halving-doubling between servers, back into the server
    assert [(p.op, p.axis, p.via) for p in plan_of("three_phase")] == [
        ("reduce", "x", "backend"),
        ("all_reduce", "y", "halving_doubling"),
        ("broadcast", "x", "backend"),
    ]


def test_jias_hybrid_sends_fc6_and_fc7_by_a_ring_and_all_else_hierarchically():
    config = mb.recipes.jia2018_alexnet()
    assert config.hybrid == mb.recipes.jia2018().hybrid
    assert config.bucket_mb <= config.hybrid.threshold_mb  # what is fused is small
    choice = choose_plan("hybrid", "gloo", thresholds=config.hybrid.thresholds)
    ring, hierarchical = named_plan("ring", "gloo"), named_plan("hierarchical", "gloo")
    with torch.device("meta"):
        net = mb.models.build(config.model, 1000).half()
    names = {parameter: name for name, parameter in net.named_parameters()}
    way = {}
    for bucket in buckets_of(net.parameters(), config.bucket_mb * 1e6):
        plan = choice.plan(2 * bucket.tree.length)  # in fp16
        way.update({names[parameter]: plan for parameter in bucket.parameters})
    large = {name for name, plan in way.items() if plan == ring}
    assert large == {"fc6.weight", "fc7.weight"}
    assert all(plan == hierarchical for name, plan in way.items() if name not in large)


def way_of_two_steps(cluster, name, plan=None):
    """How far a small net's weights go by a recipe's way of summing, on this worker's grid of two
    rows; and the plans by which its gradients went, each with what they were on the wire."""
    cluster = replace(cluster, grid=(2, 2))
    recipe = RECIPES[name]()
    config = mb.Config(
        batch=64,
        micro=16,
        span=16,
        epochs=128 / 1438,
        lr=LearningRate(warmup=0),
        bucket_mb=0.01,
        plan=plan or recipe.plan,
        wire="fp32" if plan else recipe.wire,
        # Thresholds for a net of 78k weights, whose largest tensor has 148 kB
        hybrid=replace(recipe.hybrid, threshold_mb=0.01),
        data=mb.recipes.digits().data,
    )
    torch.manual_seed(0)
    net = mb.models.build("small", 10, 1, 8)
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    real, went = Pipeline.submit, set()

    def submit(pipeline, phases, flat, **how):
        if how["bucket"] < buckets:  # the last is the control vector
            went.add((phases, how["wire"]))
        return real(pipeline, phases, flat, **how)

    buckets = len(buckets_of(net.parameters(), config.bucket_mb * 1e6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "submit", submit)
        mb.train(config, model=net, cluster=cluster, quiet=True)
    return torch.cat([p.detach().flatten() for p in net.parameters()]) - before, went


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("goyal2017", ["three_phase"]),
        ("you2018", ["ring"]),
        ("jia2018", ["hierarchical", "ring"]),
        ("mikami2018", ["torus"]),
    ],
)
def test_four_workers_train_by_the_papers_sums(name, plans):
    ranks = run_ranks(way_of_two_steps, 4, name)
    half = SUMMED[name][1] == "fp16"
    wire = torch.float16 if half else None
    for _, went in ranks:
        assert went == {(named_plan(plan, "gloo"), wire) for plan in plans}
    found = ranks[0][0]
    backend, _ = run_ranks(way_of_two_steps, 4, name, "backend")[0]
    # Without a loss scale the small gradients of this net are a few of fp16's smallest steps.
    assert (found - backend).norm() < (0.03 if half else 1e-5) * backend.norm()
    assert not half or not torch.equal(found, backend)


@pytest.mark.parametrize("name", sorted(name for name, (plan, _) in SUMMED.items()
                                        if plan != "backend"))  # fmt: skip
def test_a_recipes_plan_gives_way_with_a_line_that_says_so(name):
    config = RECIPES[name]()
    plan, wire = SUMMED[name]

    def said(config, world):
        return {title: (value, how) for title, value, how in config.derived(IMAGES, world)}["plan"]

    gone = f"{plan} in {wire} gives way: "
    assert said(config, 4)[0] == plan
    assert said(config, 1) == ("none", gone + "one worker has nothing to sum")
    tree = replace(config, deterministic=True).check()
    assert said(tree, 4) == ("none", gone + "a deterministic run sums along one tree in fp32")


def test_on_the_command_line_a_plan_beside_deterministic_is_refused_but_not_the_recipes():
    config, _ = read_flags("mikami2018", ["--deterministic"])
    assert (config.deterministic, config.plan) == (True, "torus")
    assert read_flags("mikami2018", ["--deterministic", "--plan", "backend", "--wire", "fp32"])
    for flags in (["--plan", "ring"], ["--wire", "bf16"], ["--plan", "torus"]):
        with pytest.raises(UserError, match="a deterministic run sums along one tree"):
            read_flags("mikami2018", ["--deterministic", *flags])
    assert read_flags("jia2018", ["--deterministic"])
    with pytest.raises(UserError, match="a deterministic run sums along one tree"):
        read_flags("jia2018", ["--deterministic", "--hybrid.threshold-mb", "1"])


SMALL = (
    "--data.source digits --data.channels 1 --data.size 8 --model small --device cpu --batch 64 "
    "--micro 16 --span 16 --epochs 0.2 --stages 0.1:128 --lr.warmup 0 --lr.start 0"
)


@pytest.mark.parametrize(
    ("flags", "at_first", "later"),
    [
        ("mikami2018 --workers 1,4 --grid 2 2", "torus in fp16 gives way: one worker",
         "4 workers; plan torus: in fp16, buckets of 25 MB; on a grid of 2 x 2"),
        ("jia2018 --workers 2,1", "hierarchical up to 25 MB, then ring; on a grid of 1 x 2",
         "1 worker; plan none: hybrid in fp16 gives way: one worker has nothing to sum"),
        ("mikami2018 --workers 1,2 --deterministic", "torus in fp16 gives way: one worker",
         "2 workers; plan none: torus in fp16 gives way: a deterministic run sums along one tree"),
        ("mikami2018 --workers 1 --grid 2 2", "torus in fp16 gives way: one worker", None),
    ],
)  # fmt: skip
def test_a_plan_and_a_grid_come_and_go_with_the_workers(flags, at_first, later, tmp_path):
    """As many as a stage has; a line says so each time."""
    done = megabatch_process("train", *flags.split(), *SMALL.split(), "--out", tmp_path / "run")
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, said
    table = said.partition("goes on at step")[0]
    assert at_first in table
    assert (later is None) == ("goes on at step" not in said)
    assert later is None or f"goes on at step 3 on {later}" in said


# --- MLPerf ------------------------------------------------------------------------------------

# Batch, rate, warm-up, momentum, weight decay, steps of decay, where they are counted from, span:
# MLPerf's reference convergence points, rcps_resnet.json of training 4.0; of 1,632 we have its 35
# epochs alone.
MLPERF = [
    (1632, 7.4, 2, 0.9, 5e-5, 27476, "start", 204),
    (3264, 10.5, 2, 0.9, 5e-5, 14523, "start", 204),
    (4096, 10.0, 5, 0.9, 2e-4, 13137, "start", 64),
    (8192, 17.0, 5, 0.9, 2e-4, 6095, "warm-up", 64),
    (13056, 12.8, 9, 0.9, 2.5e-5, 4710, "start", 204),
    (32768, 21.2, 16, 0.94, 2.5e-5, 2267, "start", 128),
    (49152, 19.405, 24, 0.951807, 1e-4, 1846, "start", 256),
    (58880, 23.246, 29, 0.951807, 1e-4, 1785, "start", 230),
    (65536, 24.699, 31, 0.951807, 1e-4, 1133, "warm-up", 128),
]


@pytest.mark.parametrize("row", MLPERF, ids=[str(row[0]) for row in MLPERF])
def test_mlperf(row):
    batch, rate, warmup, momentum, weight_decay, steps, counted_from, span = row
    config = named("mlperf", batch=batch).check()
    assert config == mlperf(batch)
    assert config.batch == batch
    assert config.lr == LearningRate(
        reference=rate, per=batch, warmup=warmup, decay="poly", power=2, end=1e-4
    )
    assert config.lr_at(warmup) == pytest.approx(rate, rel=1e-12)
    assert config.lr_at(config.epochs) == pytest.approx(1e-4, rel=1e-6)
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (momentum, weight_decay)
    assert (config.optimizer.trust, config.optimizer.eps) == (0.001, 0.0)
    assert config.span == span
    assert config.label_smoothing == 0.1
    begins = warmup if counted_from == "warm-up" else 0
    assert abs((config.epochs - begins) * 1_281_167 / batch - steps) < 1


def test_mlperf_has_the_rows_and_no_others():
    assert [row.batch for row in ROWS] == [row[0] for row in MLPERF]


def test_a_batch_of_no_image_is_refused():
    with pytest.raises(UserError, match="batch is 0; it must be at least 1"):
        named("mlperf", batch=0).check()


# --- what all have -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_another_length_or_batch_is_the_recipes_own(name):
    recipe = RECIPES[name]()
    assert named(name) == recipe
    assert named(name, epochs=3) == recipe.resized(epochs=3)
    assert named(name, batch=recipe.batch) == recipe
    if name not in BY_BATCH:
        assert named(name, 3, 2 * recipe.batch) == recipe.resized(3, 2 * recipe.batch)


@pytest.mark.parametrize("name", IMAGENET)
def test_a_recipe_says_where_its_numbers_come_from(name):
    said = RECIPES[name].__doc__
    assert f"Command:   megabatch train {name} --data.path imagenet.arrow" in said
    assert "Published: " in said


@pytest.mark.parametrize("name", IMAGENET)
def test_images_are_asked_for_when_the_training_begins(name):
    with pytest.raises(UserError, match=r"^no images were named: give --data\.path") as refused:
        mb.train(RECIPES[name](), quiet=True)
    assert "\n" not in str(refused.value)


DOCS = Path(__file__).parent.parent / "docs"


def rows_of(page, first_column):
    """The cells of a page's table whose first column has that title, without stars and commas."""
    lines = iter((DOCS / page).read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {first_column} |"))
    next(lines)
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        yield [cell.strip(" `*") for cell in line.replace(",", "").split("|")[1:-1]]


def test_the_table_of_recipes_in_the_docs():
    found = list(rows_of("recipes.md", "recipe"))
    assert [row[0] for row in found] == list(RECIPES)
    for name, _, batches, epochs, _, rate, warmup, steps, *_ in found:
        if name == "mlperf":
            continue
        config = RECIPES[name]()
        images = {"digits": 1438, "tiny": 100_000, "tiny30": 100_000}.get(name, 1_281_167)
        derived = config.derived(images, world=1)
        values = {title: value.replace(",", "") for title, value, _ in derived}
        assert batches.split() == [str(stage.batch) for stage in config.all_stages]
        assert epochs == f"{config.epochs:g}"
        assert rate == values["peak rate"]
        assert steps == values["steps in all"]
        length, unit = warmup.split()[:2]
        assert length == (values["warm-up steps"] if unit == "steps" else f"{config.lr.warmup:g}")


def test_the_table_of_mlperfs_rows_in_the_docs():
    found = [[float(cell) for cell in row[:7]] for row in rows_of("recipes.md", "batch")]
    assert found == [list(map(float, row)) for row in ROWS]


# --- two steps ---------------------------------------------------------------------------------


def small(recipe):
    """The recipe for two steps of a few synthetic images in fp32, one in each stage it has."""
    pixels, batch = (227, 4) if recipe.model.startswith("alexnet") else (32, 8)
    recipe = replace(
        recipe,
        micro=batch // 2,
        span=batch // 2,
        stages=recipe.stages[:1],
        precision="fp32",
        half_weights=False,
        loss_scale=None,
        deterministic=True,  # one thread: two of them stall each other on busy cores
    ).resized(batch=batch)
    first, second = (recipe.all_stages * 2)[:2]
    recipe = recipe.resized(epochs=(first.batch + second.batch) / 32)
    if recipe.stages:
        recipe = replace(recipe, stages=(replace(second, epoch=first.batch / 32),))
    # 32 of 40 images are for training.
    synthetic = replace(
        recipe.data, source="synthetic", size=pixels, images=40, classes=10, val_share=0.2
    )
    return replace(recipe, data=synthetic)


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps(name):
    config = small(RECIPES[name]())
    torch.manual_seed(config.seed)
    net = mb.models.build(config.model, 10, config.data.channels, config.data.size)
    before = [parameter.clone() for parameter in net.parameters()]
    summary = mb.train(config, model=net, quiet=True)
    assert summary.steps == 2
    assert summary.seen == sum(stage.batch for stage in (config.all_stages * 2)[:2])
    assert math.isfinite(summary.loss)
    assert all(tensor.isfinite().all() for tensor in net.state_dict().values())
    assert any((now != then).any() for now, then in zip(net.parameters(), before, strict=True))
