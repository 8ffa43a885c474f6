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
