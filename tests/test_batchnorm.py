"""Batch norm by spans: groups by themselves, statistics for all workers, torch's layer when span =
batch."""

import pytest
import torch
from torch import nn

from megabatch.batchnorm import MovingAverages, SpanBatchNorm, use_spans


def pair(span, dims=2, channels=5):
    kinds = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    plain = kinds[dims](channels).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    net = nn.Sequential(kinds[dims](channels).double())
    net[0].load_state_dict(plain.state_dict())
    use_spans(net, span)
    return plain, net


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_each_span_is_normalised_by_itself_and_gradients_are_right(dims):
    plain, net = pair(span=4, dims=dims)
    shape = (12, 5) + (3,) * (dims if dims > 1 else 0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out = net(x)
    expected = torch.cat([plain(part) for part in y.split(4)])
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-9, atol=1e-12)
    assert torch.allclose(net[0].weight.grad, plain.weight.grad, rtol=1e-9, atol=1e-12)
    assert torch.allclose(net[0].bias.grad, plain.bias.grad, rtol=1e-9, atol=1e-12)


def test_one_span_is_torchs_layer_bit_for_bit():
    plain, net = pair(span=8)
    x = torch.randn(8, 5, 3, 3, dtype=torch.float64)
    assert torch.equal(net(x), plain(x))
    averages = MovingAverages(net)
    averages.move(averages.statistics(x), momentum=0.1)
    assert torch.allclose(net[0].running_mean, plain.running_mean, rtol=1e-14, atol=0)
    assert torch.allclose(net[0].running_var, plain.running_var, rtol=1e-14, atol=0)
    assert net[0].num_batches_tracked == plain.num_batches_tracked == 1
    net.eval(), plain.eval()
    assert torch.allclose(net(x), plain(x), rtol=1e-14, atol=1e-14)


def test_statistics_are_the_mean_over_spans():
    _, net = pair(span=4)
    x = torch.randn(12, 5, 3, 3, dtype=torch.float64)
    net(x)
    found = MovingAverages(net).statistics(x)
    groups = x.view(3, 4, 5, 3, 3).transpose(1, 2).flatten(2)
    expected = torch.cat([groups.mean(2).mean(0), groups.var(2).mean(0)])
    assert torch.allclose(found, expected)
    assert len(found) == MovingAverages(net).length == 10


def test_forward_alone_moves_nothing():
    _, net = pair(span=4)
    before = net[0].running_mean.clone()
    net(torch.randn(8, 5, 3, 3, dtype=torch.float64))
    assert torch.equal(net[0].running_mean, before)


def test_momentum_one_keeps_the_last_step_only():
    _, net = pair(span=4)
    for _ in range(3):
        x = torch.randn(8, 5, 3, 3, dtype=torch.float64)
        net(x)
        averages = MovingAverages(net)
        last = averages.statistics(x)
        averages.move(last, momentum=1.0)
    assert torch.equal(torch.cat([net[0].running_mean, net[0].running_var]), last)


def test_a_layer_in_evaluation_keeps_its_averages():
    _, net = pair(span=4)
    x = torch.randn(8, 5, 3, 3, dtype=torch.float64)
    averages = MovingAverages(net)
    net(x)
    averages.move(averages.statistics(x), momentum=0.5)
    net.eval()
    kept = net[0].running_mean.clone()
    net(x)
    averages.move(averages.statistics(x), momentum=0.5)
    assert torch.equal(net[0].running_mean, kept)


def test_names_parameters_and_options_survive():
    net = nn.ModuleDict(
        {
            "a": nn.BatchNorm2d(3, eps=1e-3),
            "b": nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm2d(2)),
            "c": nn.BatchNorm2d(3, track_running_stats=False),
        }
    )
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    weight = net["a"].weight
    use_spans(net, 2)
    assert list(net.state_dict()) == list(before)
    assert net["a"].weight is weight
    assert net["a"].eps == 1e-3
    assert sum(isinstance(m, SpanBatchNorm) for m in net.modules()) == 4
    assert MovingAverages(net).length == 2 * (3 + 4 + 2)
    use_spans(net, 2)  # again: nothing happens
    assert sum(isinstance(m, SpanBatchNorm) for m in net.modules()) == 4


def test_images_that_no_spans_can_make_are_refused():
    _, net = pair(span=4)
    with pytest.raises(ValueError, match="not a multiple of the span"):
        net(torch.randn(6, 5, 3, 3, dtype=torch.float64))
