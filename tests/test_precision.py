"""Half precision: runs that track fp32, masters, the loss scale, and a skip that all workers
share."""

import json
import math
from dataclasses import replace

import pytest
import torch
from test_train import CONFIG
from torch import nn

from megabatch.batch import Stage, Step
from megabatch.cluster import Cluster
from megabatch.config import Config, OptimizerConfig
from megabatch.data.loader import MicroBatch
from megabatch.errors import RunFailed
from megabatch.keyed import shuffled
from megabatch.launch import run_local
from megabatch.optim import LARS, parameter_groups
from megabatch.parts import assemble, prepared
from megabatch.precision import LossScale, Masters
from megabatch.step import train_step
from megabatch.sync.control import StepNumbers
from megabatch.training import train
from megabatch.tree import deal

SHORT = replace(CONFIG, epochs=1.5, stages=(), batch=80, lr=replace(CONFIG.lr, warmup=0.5))
ALONE = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))


@pytest.fixture(scope="module")
def spread():
    """fp32 from three seeds: how far runs lie apart for no reason at all."""
    return [train(replace(SHORT, seed=seed), quiet=True) for seed in range(3)]


@pytest.mark.parametrize(
    ("precision", "half_weights"),
    [("bf16", False), ("bf16", True), ("fp16", False), ("fp16", True)],
)
def test_half_runs_track_single_precision(spread, precision, half_weights):
    config = replace(SHORT, precision=precision, half_weights=half_weights)
    found = train(config, quiet=True)
    losses = [summary.loss for summary in spread]
    margin = max(losses) - min(losses)
    assert abs(found.loss - losses[0]) <= max(2 * margin, 0.05)
    assert found.top1 >= min(summary.top1 for summary in spread) - 0.1


def fingerprint(config, world):
    alone = world == 1
    return fingerprint_here(config) if alone else run_local(world, fingerprint_here, config)


def fingerprint_here(config):
    return train(config, quiet=True).weights_sha256


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_too_is_the_same_on_any_number_of_workers(precision):
    # The batch switches twice: a processor takes its time over half precision.
    config = replace(CONFIG, deterministic=True, precision=precision, half_weights=True, epochs=0.5)
    config = replace(config, stages=(Stage(0.2, 112, 0.85), Stage(0.4, 176)))
    assert fingerprint(config, 1) == fingerprint(config, 3)


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "orthogonal"])
def test_what_a_parametrization_makes_weights_of_stays_full(kind):
    """A spectral norm has vectors of its own, in fp32."""
    found = {}
    for half_weights in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        getattr(nn.utils.parametrizations, kind)(net[1])
        config = replace(CONFIG, precision="bf16", half_weights=half_weights)
        config = replace(config, epochs=0.5, stages=())
        found[half_weights] = train(config, net, quiet=True)
        assert all(p.dtype == torch.float32 for p in net.parameters())
    assert found[True].loss == pytest.approx(found[False].loss, rel=0.02)


class Overflows(nn.Module):
    """Its gradient is infinite while the image at one position is in the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 64))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        x = self.norm(x.flatten(1))
        logits = x @ self.weight.t()
        return logits if not self.training else Blow.apply(logits, self.blows)


class Blow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blows):
        ctx.blows = blows
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * float("inf") if ctx.blows else gradient), None


def states_around_an_overflow(config):
    """Three steps; in the second one worker's gradient overflows."""
    cluster = Cluster.from_env()
    torch.manual_seed(0)
    images, labels = torch.randn(64, 1, 8, 8), torch.arange(64) % 10

    def micro_batches(step):
        for micro in range(*deal(4, cluster.world)[cluster.rank]):
            net.blows = step == 1 and micro == 2
            part = slice(16 * micro, 16 * micro + 16)
            yield MicroBatch(images[part], labels[part], torch.arange(64)[part], 16 * micro)

    found = []
    with (
        prepared(config, cluster, 10, Overflows()) as net,
        assemble(config, cluster, net) as parts,
    ):
        for step in range(3):
            before = parts.scale.value.item()
            result = train_step(parts, micro_batches(step), 64, lr=1.0 + step, momentum=0.9)
            numbers = StepNumbers.unpack(Step(step, 64 * step, 64, 0.0, 0), result.numbers.tolist())
            assert numbers.loss_scale == before
            buffers = [s["momentum_buffer"].clone() for s in parts.optimizer.state.values()]
            weight, mean = net.weight.detach().clone(), net.norm.running_mean.clone()
            scale = parts.scale.value.item()
            found.append((not numbers.skipped, scale, weight, mean, buffers))
    gathered = [None] * cluster.world
    if cluster.world > 1:
        torch.distributed.all_gather_object(gathered, found)
    return gathered if cluster.world > 1 else [found]


def test_an_overflow_on_one_worker_skips_the_step_on_all():
    config = replace(CONFIG, precision="fp16", batch=64, span=16, micro=16)
    everyone = run_local(4, states_around_an_overflow, config)
    alone = states_around_an_overflow(config)[0]
    for found in everyone:
        goods, scales, weights, means, buffers = zip(*found, strict=True)
        assert goods == (True, False, True)
        assert scales == (65536.0, 32768.0, 32768.0)
        assert torch.equal(weights[1], weights[0])  # as if the step had not been
        assert torch.equal(means[1], means[0])
        assert not torch.equal(weights[2], weights[1]) and not torch.equal(means[2], means[1])
        # The rate moved from 1 to 2, and with it the corrected buffer, but no gradient came in.
        for before, after in zip(buffers[0], buffers[1], strict=True):
            assert torch.equal(after, before * 2)
        for mine, theirs in zip(weights, [step[2] for step in alone], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_the_first_step_may_be_the_one_that_does_not_count():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = LARS([weight], lr=1.0, weight_decay=0.1)
    weight.grad = torch.zeros(4, 4)
    optimizer.step(good=torch.tensor(False))
    assert torch.equal(weight, torch.ones(4, 4))
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(4, 4))
    twin = nn.Parameter(torch.ones(4, 4))
    other = LARS([twin], lr=1.0, weight_decay=0.1)
    for p, o in ((weight, optimizer), (twin, other)):
        p.grad = torch.full((4, 4), 0.5)
        o.step(good=torch.tensor(True))
    assert torch.equal(weight, twin)


def test_the_dynamic_scale_halves_and_grows():
    scale = LossScale(Config(precision="fp16"), torch.device("cpu"))
    good, bad = torch.tensor(True), torch.tensor(False)
    scale.update(bad)
    assert scale.value == 2**15
    for _ in range(1999):
        scale.update(good)
    assert scale.value == 2**15
    scale.update(good)
    assert scale.value == 2**16
    again = LossScale(Config(precision="fp16"), torch.device("cpu"))
    again.load(scale.tensors())
    assert again.value == 2**16


def test_other_precisions_have_no_scale_unless_asked():
    device = torch.device("cpu")
    assert not LossScale(Config(), device).on
    assert not LossScale(Config(precision="bf16"), device).on
    fixed = LossScale(Config(precision="fp16", loss_scale=256.0), device)
    assert fixed.on and not fixed.dynamic
    fixed.update(torch.tensor(False))
    assert fixed.value == 256


def test_a_power_of_two_as_loss_scale_changes_no_bit():
    """The scale is undone before LARS takes its norms: in fp32 the run is the run without it."""
    config = replace(CONFIG, deterministic=True, epochs=0.4, stages=())
    config = replace(config, lr=replace(CONFIG.lr, warmup=0))
    plain = train(config, quiet=True)
    scaled = train(replace(config, loss_scale=1024.0), quiet=True)
    assert scaled.weights_sha256 == plain.weights_sha256


def test_masters_are_full_twins_and_norms_stay_full():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    exact = [p.detach().clone() for p in net.parameters()]
    masters = Masters(net, Config(precision="fp16", half_weights=True))
    dtypes = [p.dtype for p in net.parameters()]
    half, full = torch.float16, torch.float32
    assert dtypes == [half, half, full, full, half, half]
    for weight, twin in masters.twins.items():
        assert torch.equal(twin.half(), weight)
    for weight, before in zip(net.parameters(), exact, strict=True):
        assert torch.equal(masters.of(weight), before)
    groups = masters.groups(parameter_groups(net, 1e-4))
    assert {p.dtype for group in groups for p in group["params"]} == {full}


def test_updates_too_small_for_half_reach_the_masters():
    """What half weights alone lose: 1 + 2^-13 is 1 in fp16."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    masters = Masters(net, Config(precision="fp16", half_weights=True))
    twin = masters.of(net.weight)
    for _ in range(16):
        with torch.no_grad():
            twin += 2.0**-13
        masters.write_back()
    assert net.weight.item() == 1 + 2.0**-9


# Of a weight's gradient, an element: below what a loss scale is there for, usual, and above it.
@pytest.mark.parametrize(("size", "half_rate"), [(1e-6, math.inf), (1e-2, None), (30.0, 0.0)])
def test_lars_on_masters_is_right_where_half_precision_fails_as_jia_says(size, half_rate):
    """The layer's rate, computed in fp16, leaves its range at both ends: squares of small gradients
    are 0 and the rate is infinite, those of large ones are infinite and the rate is 0. LARS on the
    masters, and on the half weights themselves, is right from the same numbers."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        net.weight.copy_((torch.randn(64, 64) * 0.05).half())
    masters = Masters(net, Config(precision="fp16", half_weights=True))
    weight, twin = net.weight, masters.of(net.weight)
    gradient = (torch.randn(64, 64) * size).half()

    def rate(w, g, trust=0.001):
        return trust * (w * w).sum().sqrt() / (g * g).sum().sqrt()

    exact = float(rate(weight.detach().double(), gradient.double()))
    in_half = rate(weight.detach(), gradient)
    assert in_half.dtype == torch.float16
    if half_rate is None:
        assert float(in_half) == pytest.approx(exact, rel=0.01)
    else:
        assert float(in_half) == half_rate and 1e-6 < exact < 1e6

    before = twin.detach().double()
    twin.grad = gradient.float()
    on_masters = LARS(
        masters.groups(parameter_groups(net, weight_decay=0.0)), lr=10.0, momentum=0.0
    )
    on_masters.step()
    moved = before - twin.detach().double()
    assert float(moved.norm() / gradient.double().norm()) == pytest.approx(10 * exact, rel=1e-5)
    alone = nn.Parameter(weight.detach().clone())
    alone.grad = gradient
    on_halves = LARS([alone], lr=10.0, momentum=0.0, weight_decay=0.0)
    on_halves.step()
    assert alone.dtype == torch.float16
    assert float(on_halves.ratios[alone].ratio) == pytest.approx(exact, rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_with_a_diagnosis(tmp_path):
    config = replace(CONFIG, epochs=3, stages=(), save_every=0.2, eval_every=0.2)
    bad = [(torch.randn(1, 8, 8), i % 10) for i in range(320)]
    bad[77] = (torch.full((1, 8, 8), float("nan")), 7)
    out = tmp_path / "run"
    with pytest.raises(RunFailed, match="no finite loss") as failed:
        train(config, data=(bad, bad[:16]), out=out, quiet=True)
    words = str(failed.value)
    assert "last good checkpoint" in words and "--loss-scale" not in words
    assert "\n" not in words
    record = json.loads((out / "diagnosis.json").read_text())
    first, last = record["positions"]
    (micro,) = record["micro_batches_with_bad_loss"]
    assert first <= micro < last
    assert 77 in shuffled(config.seed, torch.arange(micro, micro + config.micro), 320).tolist()
    assert record["weight_norms"]["conv1.weight"] > 0


def test_gradients_that_a_fixed_loss_scale_takes_out_of_range_are_told_of_it():
    config = replace(CONFIG, epochs=3, stages=(), precision="fp16", loss_scale=1e9)
    with pytest.raises(RunFailed, match=r"no finite gradient.*lower --loss-scale, which is 1e\+09"):
        train(config, quiet=True)


def diverge(config, out):
    bad = [(torch.full((1, 8, 8), float("nan")), i % 10) for i in range(160)]
    train(config, data=(bad, bad[:16]), out=out, quiet=True)


def test_all_workers_stop_alike(tmp_path):
    config = replace(CONFIG, epochs=3, stages=())
    with pytest.raises(RunFailed, match="step 0 "):
        run_local(3, diverge, config, tmp_path / "run")


def test_momentum_free_sgd_runs_in_half_precision():
    config = replace(
        CONFIG, epochs=0.3, stages=(), precision="fp16", lr=replace(CONFIG.lr, warmup=0),
        optimizer=OptimizerConfig(momentum=0.0, trust=None, form="pytorch"),
    )  # fmt: skip
    assert train(config, quiet=True).steps > 0
