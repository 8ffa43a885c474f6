"""A whole run: one result on any number of workers, exact evaluation, anyone's module and data."""

import json
import os
from dataclasses import replace

import pytest
import torch
from on_gpu import ON_A_GPU
from torch import nn

import megabatch as mb
from megabatch import models
from megabatch.batch import Stage
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, LearningRate, OptimizerConfig
from megabatch.data.loader import StepLoader
from megabatch.data.opening import open_sources
from megabatch.errors import UserError
from megabatch.launch import run_local
from megabatch.step import score
from megabatch.training import train

# Two switches of the batch, uneven numbers of micro-batches, dropout, an epoch's end inside a
# batch.
CONFIG = Config(
    name="test",
    epochs=1.5,
    batch=80,
    micro=16,
    span=8,
    stages=(Stage(0.5, 112, 0.85), Stage(1, 176)),
    label_smoothing=0.1,
    data=Data(source="digits", shift=1, val_share=0.2),
    lr=LearningRate(reference=16, warmup=0.3),
    optimizer=OptimizerConfig(weight_decay=1e-4, unadapted_rate=0.1, momentum_correction=True),
    eval_every=0,
)


# The same for runs that are asked for their bits alone: 6 steps instead of 19.
BITS = replace(
    CONFIG,
    deterministic=True,
    data=replace(CONFIG.data, source="synthetic", images=500, classes=10),
)


def coloured(count, size):
    """Images that any net learns to tell apart: each class has a colour, in noise."""
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(4, (count,), generator=draw)
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[labels]
    noise = torch.rand(count, 3, size, size, generator=draw)
    return list(zip(0.3 * colours[:, :, None, None] + 0.7 * noise, labels.tolist(), strict=True))


@pytest.mark.parametrize(
    "model,changes",
    [
        ("small", {"precision": "fp32"}),
        ("small", {"precision": "bf16"}),
        ("small", {"precision": "bf16", "half_weights": True}),
        pytest.param("resnet18", {"precision": "fp32"}, marks=ON_A_GPU),
        pytest.param("resnet18", {"precision": "bf16"}, marks=ON_A_GPU),
        pytest.param("resnet18", {"precision": "bf16", "graphs": "never"}, marks=ON_A_GPU),
        pytest.param("resnet18", {"precision": "bf16", "compile": "never"}, marks=ON_A_GPU),
        pytest.param("resnet18", {"precision": "fp16", "half_weights": True}, marks=ON_A_GPU),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # in torch's compiler
def test_what_training_learns_evaluation_sees(model, changes):
    """In every precision and by every kind of pass: both look at the same weights."""
    size = 64 if model == "resnet18" else 16
    config = Config(
        model=model, epochs=6, batch=64, micro=32, span=16, eval_every=1,
        data=Data(size=size, channels=3, classes=4, val_share=0.2),
        lr=LearningRate(reference=0.05, per=64, warmup=1),
        optimizer=OptimizerConfig(trust=None, form="pytorch"), **changes,
    ).check()  # fmt: skip
    summary = mb.train(config, data=coloured(640, size), quiet=True)
    assert summary.top1 > 0.9 and summary.loss < 0.5


class WithDropout(nn.Module):
    """A module of someone's own: torch's batch norm and dropout, and noise from torch's
    generator."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))
        self.droppath = nn.Dropout2d(0.1)

    def forward(self, x):
        return self.head(self.droppath(self.body(x)))


def run(config, own_module, **options):
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the first worker's weights count
    model = WithDropout() if own_module else None
    return train(config, model=model, quiet=True, **options)


def on_workers(world, config, own_module=False, **options):
    if world == 1:
        return run(config, own_module, **options)
    return run_local(world, run_with, config, own_module, options)


def run_with(config, own_module, options):
    return run(config, own_module, **options)


@pytest.fixture(scope="module")
def alone():
    return {own: on_workers(1, BITS, own) for own in (False, True)}


@pytest.mark.parametrize("world", range(2, 9))
def test_any_number_of_workers_ends_with_the_same_bits(alone, world):
    summary = on_workers(world, BITS)
    assert summary.world == world
    assert summary.weights_sha256 == alone[False].weights_sha256
    assert (summary.top1, summary.top5, summary.loss) == (
        alone[False].top1,
        alone[False].top5,
        alone[False].loss,
    )


@pytest.mark.parametrize("world", [3, 4])
def test_a_module_with_dropout_too(alone, world):
    summary = on_workers(world, BITS, own_module=True)
    assert summary.weights_sha256 == alone[True].weights_sha256


def test_the_seed_changes_the_result_and_is_all_that_does(alone):
    again = on_workers(1, BITS)
    assert again.weights_sha256 == alone[False].weights_sha256
    other = on_workers(1, replace(BITS, seed=1))
    assert other.weights_sha256 != alone[False].weights_sha256


def weights_after(config, steps):
    """Flat weights after so many steps of a run that is not deterministic."""
    images = 1438
    config = replace(config, epochs=(steps * config.batch - 1) / images, stages=())
    cluster = Cluster.from_env()
    torch.manual_seed(config.seed)
    net = models.build(config.model, 10, config.data.channels, config.data.size)
    train(config, model=net, cluster=cluster, quiet=True)
    return torch.cat([t.flatten().double() for t in net.state_dict().values()])


# In single precision the same runs lie 1e-8 apart.
STEPS_IN_DOUBLE = 8


@pytest.fixture(scope="module")
def alone_in_double():
    return weights_after(replace(CONFIG, precision="fp64"), STEPS_IN_DOUBLE)


@pytest.mark.parametrize("world", [2, 3, 6, 8])
def test_without_the_tree_double_precision_agrees_to_1e_12(alone_in_double, world):
    found = run_local(world, weights_after, replace(CONFIG, precision="fp64"), STEPS_IN_DOUBLE)
    assert (found - alone_in_double).norm() / alone_in_double.norm() < 1e-12


@pytest.mark.parametrize("world", [3, 8])
def test_one_step_in_single_precision_agrees_to_1e_6(world):
    config = replace(CONFIG, lr=replace(CONFIG.lr, warmup=0, decay="constant"))
    alone = weights_after(config, 1)
    found = run_local(world, weights_after, config, 1)
    assert (found - alone).norm() / alone.norm() < 1e-6


def batches(config, steps):
    """Everything this worker's loader gives, by position of the first image."""
    cluster = Cluster.from_env()
    source, _ = open_sources(config)
    loader = StepLoader(source, None, config, cluster, torch.float32)
    mine = {}
    for step in steps:
        for micro in loader.micro_batches(step):
            mine[micro.first] = (micro.images.double().sum().item(), micro.labels.tolist())
    loader.close()
    gathered = [None] * cluster.world
    if cluster.world == 1:
        return mine
    torch.distributed.all_gather_object(gathered, mine)
    return {first: value for part in gathered for first, value in part.items()}


def test_all_workers_together_see_the_same_batches_and_augmentation():
    from megabatch.batch import steps

    taken = list(steps(CONFIG.all_stages, 1438, 1.5))
    alone = batches(CONFIG, taken)
    assert sorted(alone) == list(range(0, taken[-1].seen + taken[-1].batch, 16))
    for world in (2, 3, 7):
        assert run_local(world, batches, CONFIG, taken) == alone


def scores(sizes):
    """Top-1 of an untrained net over parts of the data of several sizes."""
    cluster = Cluster.from_env()
    found = []
    for size in sizes:
        images = [(torch.full((1, 8, 8), float(i)), i % 10) for i in range(size)]
        _, source = open_sources(CONFIG, (images, images))
        loader = StepLoader(None, source, CONFIG, cluster, torch.float32)
        found.append(score(FirstPixel(), loader.validation(), size, CONFIG, cluster))
        loader.close()
    return found


class FirstPixel(nn.Module):
    """Right for the images whose number is a multiple of 3, second best for the others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        number = x[:, 0, 0, 0].long()
        label = number % 10
        one_hot = nn.functional.one_hot
        best = torch.where(number % 3 == 0, label, (label + 1) % 10)
        return self.scale * (2.0 * one_hot(best, 10) + one_hot(label, 10))


def test_evaluation_counts_each_image_once():
    sizes = [1, 15, 16, 17, 100, 333]
    for world in (1, 2, 3, 5, 8):
        found = scores(sizes) if world == 1 else run_local(world, scores, sizes)
        for size, result in zip(sizes, found, strict=True):
            assert result["top1"] == len(range(0, size, 3)) / size
            assert result["top5"] == 1.0


def test_a_pair_of_map_style_sets_and_a_module():
    train_set = [(torch.randn(3), i % 2) for i in range(64)]
    val_set = [(torch.randn(3), i % 2) for i in range(10)]
    config = replace(CONFIG, epochs=2, batch=32, stages=(), data=replace(CONFIG.data, classes=2))
    summary = mb.train(config, model=nn.Linear(3, 2), data=(train_set, val_set), quiet=True)
    assert summary.steps == 4
    assert summary.seen == 128
    assert summary.top5 == 1.0


def test_a_single_set_is_split_by_hash():
    data = [(torch.full((1, 8, 8), i, dtype=torch.uint8), i % 10) for i in range(200)]
    first, held = open_sources(CONFIG, data)
    assert (len(first), len(held)) == (160, 40)
    numbers = [
        source.read(torch.arange(len(source)), None)[0][:, 0, 0, 0].tolist()
        for source in (first, held)
    ]
    assert sorted(numbers[0] + numbers[1]) == list(range(200))


def test_a_target_accuracy_ends_the_run(tmp_path):
    config = replace(CONFIG, epochs=20, stages=(), eval_every=0.25, target_accuracy=0.3)
    summary = train(config, out=tmp_path / "run", quiet=True)
    assert summary.ended == "target"
    assert summary.top1 >= 0.3
    assert summary.epochs < 20


def test_the_run_folder_tells_the_whole_story(tmp_path):
    out = tmp_path / "run"
    summary = train(replace(CONFIG, eval_every=0.5), out=out, quiet=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(summary.steps))
    assert steps[-1]["seen"] == summary.seen
    assert {line["batch"] for line in steps} == {80, 112, 176}
    assert {line["momentum"] for line in steps if line["batch"] > 80} == {0.85}
    names = {"loss", "top1", "top5", "lr", "momentum", "batch", "images_per_second", "epoch"}
    assert names <= set(steps[0])
    for line in steps:
        assert line["lr"] == CONFIG.lr_at(line["epoch"], line["batch"])
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert len(evaluations) == 3
    assert evaluations[-1]["top1"] == summary.top1
    assert Config.from_json((out / "config.json").read_text()) == replace(CONFIG, eval_every=0.5)
    assert {"torch", "python", "platform"} <= set(
        json.loads((out / "environment.json").read_text())
    )
    assert (
        json.loads((out / "summary.json").read_text())["weights_sha256"] == summary.weights_sha256
    )
    assert list((out / "tensorboard").iterdir())
    assert mb.evaluate(out)["top1"] == summary.top1


def test_a_run_of_ones_own_parts_is_evaluated_with_them(tmp_path):
    out = tmp_path / "run"
    summary = on_workers(1, CONFIG, own_module=True, out=out)
    with pytest.raises(UserError, match=r"megabatch\.evaluate"):
        mb.evaluate(out)
    assert mb.evaluate(out, model=WithDropout())["loss"] == summary.loss


def test_the_digits_recipe_reaches_what_it_claims():
    summary = train(replace(mb.recipes.digits(), target_accuracy=0.97), quiet=True)
    assert summary.ended == "target" and summary.top1 >= 0.97
