"""train_step against a plain loop in double precision, and the numbers the host reads later."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, OptimizerConfig
from megabatch.data.loader import MicroBatch
from megabatch.launch import run_local
from megabatch.parts import assemble, prepared
from megabatch.step import DelayedNumbers, StepResult, train_step
from megabatch.sync.control import StepNumbers
from megabatch.tree import deal

SGD = OptimizerConfig(trust=None, form="pytorch", momentum=0.9, weight_decay=0.01)
CONFIG = Config(
    batch=12,
    micro=4,
    span=4,
    precision="fp64",
    optimizer=SGD,
    label_smoothing=0.1,
    data=Data(size=3),
)
RATES = (0.5, 0.3, 0.7)


def micro_batches(step, first=0, last=3):
    """Plain values made here: a step needs no loader."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(12, 1, 3, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (12,), generator=generator)
    for index in range(first, last):
        part = slice(4 * index, 4 * index + 4)
        yield MicroBatch(images[part], labels[part], torch.arange(12)[part], 4 * index)


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()


def trained(config=CONFIG, net=None):
    """Weights and numbers after each of three steps."""
    cluster = Cluster.from_env()
    own, found = net or small_net(), []
    with prepared(config, cluster, 5, own) as net, assemble(config, cluster, net) as parts:
        for step, rate in enumerate(RATES):
            dealt = deal(3, cluster.world)[cluster.rank]
            result = train_step(parts, micro_batches(step, *dealt), 12, lr=rate, momentum=0.9)
            numbers = StepNumbers.unpack(Step(step, 12 * step, 12, 0.0, 0), result.numbers.tolist())
            weights = {name: t.clone() for name, t in net.state_dict().items()}
            found.append((weights, numbers))
    return found


def plain():
    """The same steps written out with torch alone."""
    net, found = small_net(), []
    decaying = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    mean, var = net[2].running_mean.clone(), net[2].running_var.clone()
    for step, rate in enumerate(RATES):
        losses, squares, statistics = [], 0.0, []
        optimizer.zero_grad()
        for micro in micro_batches(step):
            before = [
                torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()
            ]
            logits = net(micro.images)
            loss = nn.functional.cross_entropy(
                logits, micro.labels, reduction="sum", label_smoothing=0.1
            )
            (loss / 12).backward()
            squares += sum(
                (p.grad - b).square().sum().item()
                for p, b in zip(net.parameters(), before, strict=True)
            )
            hidden = net[:2](micro.images).detach()
            statistics.append((hidden.mean(0), hidden.var(0)))
            losses.append(loss.item())
        square = sum(p.grad.square().sum().item() for p in net.parameters())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        mean = 0.9 * mean + 0.1 * sum(m for m, _ in statistics) / 3
        var = 0.9 * var + 0.1 * sum(v for _, v in statistics) / 3
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        weights |= {"2.running_mean": mean, "2.running_var": var}
        found.append((weights, sum(losses) / 12, squares, square))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_step_is_a_plain_loops_on_the_whole_batch(world):
    found = trained() if world == 1 else run_local(world, trained)
    for (weights, numbers), (expected, loss, squares, square) in zip(found, plain(), strict=True):
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-12, atol=1e-13), name
        assert numbers.loss == pytest.approx(loss, rel=1e-12)
        assert numbers.squares == pytest.approx(squares, rel=1e-10)
        assert numbers.gradient_square == pytest.approx(square, rel=1e-10)
        assert not numbers.skipped and not numbers.stop


class Seldom(nn.Module):
    """Has a layer that one micro-batch of the second step alone comes to, and one that none does;
    both would decay."""

    def __init__(self):
        super().__init__()
        self.often, self.seldom = nn.Linear(9, 5), nn.Linear(9, 5)
        self.never = nn.Linear(2, 2)
        firsts = [[float(m.images[0].sum()) for m in micro_batches(step)] for step in range(3)]
        self.one = max(firsts[1])
        assert sum(found == self.one for step in firsts for found in step) == 1

    def forward(self, x):
        found = self.often(x.flatten(1))
        return found + self.seldom(x.flatten(1)) if float(x[0].sum()) == self.one else found


def seldom_reached():
    torch.manual_seed(1)
    return Seldom().double()


def seldom_trained(optimizer, deterministic=True):
    """The same with the optimizer's state, at the end of each step."""
    config = replace(CONFIG, optimizer=optimizer, deterministic=deterministic)
    return [weights for weights, _ in trained(config, seldom_reached())]


def seldom_plain():
    net, found = seldom_reached(), []
    matrices = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    for step, rate in enumerate(RATES):
        optimizer.zero_grad()
        for micro in micro_batches(step):
            loss = nn.functional.cross_entropy(
                net(micro.images), micro.labels, reduction="sum", label_smoothing=0.1
            )
            (loss / 12).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found.append({name: t.clone() for name, t in net.state_dict().items()})
    return found


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_no_pass_of_a_step_reaches_is_left_alone_as_torch_leaves_it(world, deterministic):
    arguments = SGD, deterministic
    found = seldom_trained(*arguments) if world == 1 else run_local(
        world, seldom_trained, *arguments
    )  # fmt: skip
    before = seldom_reached().state_dict()
    for step, (weights, expected) in enumerate(zip(found, seldom_plain(), strict=True)):
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=1e-12, atol=1e-13), (step, name)
        for name in ("never.weight", "never.bias"):
            assert torch.equal(weights[name], before[name])
    seldom = [weights["seldom.weight"] for weights in found]
    assert torch.equal(seldom[0], before["seldom.weight"])
    assert not torch.equal(seldom[1], seldom[0])
    assert torch.equal(seldom[2], seldom[1])  # its momentum rests, too


OPTIMIZERS = {
    "lars": OptimizerConfig(weight_decay=0.01, momentum_correction=True),
    "lars, pytorch's form": OptimizerConfig(weight_decay=0.01, form="pytorch", nesterov=True),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.01),
    "muon": OptimizerConfig(name="muon", weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_and_so_on_any_number_of_workers_with_the_same_bits(name):
    alone = seldom_trained(OPTIMIZERS[name])
    assert torch.equal(alone[2]["seldom.weight"], alone[1]["seldom.weight"])
    assert not torch.equal(alone[1]["seldom.weight"], alone[0]["seldom.weight"])
    for world in (2, 3):
        for mine, theirs in zip(
            alone, run_local(world, seldom_trained, OPTIMIZERS[name]), strict=True
        ):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_layer_that_two_places_share_is_one_layer():
    """Weights of both uses get one gradient, its batch norm is replaced once."""
    torch.manual_seed(2)
    shared = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)).double()
    head = nn.Linear(9, 5).double()
    net = nn.Sequential(nn.Flatten(), shared, shared, head)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    twin = nn.Sequential(nn.Flatten(), shared, shared, head)
    (weights, _), *_ = trained(net=net)
    assert net[1] is net[2] is shared and type(shared[1]) is nn.BatchNorm1d
    twin.load_state_dict(before)
    twin.train()
    for micro in micro_batches(0):
        loss = nn.functional.cross_entropy(
            twin(micro.images), micro.labels, reduction="sum", label_smoothing=0.1
        )
        (loss / 12).backward()
    expected = before["3.weight"] - 0.5 * (head.weight.grad + 0.01 * before["3.weight"])
    assert torch.allclose(weights["3.weight"], expected, rtol=1e-12)
    linear = shared[0]
    expected = before["1.0.weight"] - 0.5 * (linear.weight.grad + 0.01 * before["1.0.weight"])
    assert torch.allclose(weights["1.0.weight"], expected, rtol=1e-12)


def test_numbers_are_read_one_step_later_and_survive_a_checkpoint():
    steps = [Step(index, 8 * index, 8, 0.0, 0) for index in range(3)]
    results = [
        StepResult(
            torch.tensor([1.0, float(i == 1), 0.0, 8.0 * i, 0.0, 0.0, 1.0, 1.0, 1.0]),
            [(i, torch.tensor(1.0))],
        )
        for i in range(3)
    ]
    delayed = DelayedNumbers()
    assert delayed.take() is None
    assert delayed.put(steps[0], results[0]) is None
    first = delayed.put(steps[1], results[1])
    assert (first.step, first.loss, delayed.losses) == (steps[0], 0.0, results[0].losses)
    resumed = DelayedNumbers(delayed.state())
    second, again = delayed.put(steps[2], results[2]), resumed.put(steps[2], results[2])
    assert second.stop and not again.stop  # whoever resumes does not want to stop
    assert replace(second, stop=False) == again
    assert delayed.take().loss == resumed.take().loss == 2.0
    assert delayed.take() is None
