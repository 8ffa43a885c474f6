"""Batch norm by spans: groups by themselves, statistics for all workers, torch's layer when span =
batch."""

from dataclasses import replace

import pytest
import torch
from on_gpu import ON_A_GPU
from test_train import CONFIG
from torch import nn

import megabatch as mb
from megabatch import batchnorm
from megabatch.batchnorm import MovingAverages, SpanBatchNorm, use_spans
from megabatch.cluster import Cluster
from megabatch.config import LearningRate
from megabatch.errors import UserError
from megabatch.launch import run_local
from megabatch.training import train


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("affine", [True, False])
def test_spans_that_are_taken_at_once_are_those_that_are_taken_one_by_one(
    affine, device, monkeypatch
):
    """On a GPU one call has them all, with a scale and a shift or without, as AlexNet-BN is."""
    layer = SpanBatchNorm(nn.BatchNorm2d(64, affine=affine), 4).to(device)
    x = torch.randn(12, 64, 3, 3).to(device)

    def found(images):
        images = images.clone().requires_grad_()
        out = layer.to(images.dtype)(images)
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
        return out.double(), layer.take().double(), images.grad.double()

    monkeypatch.setattr(batchnorm, "_at_once", lambda x: False)
    exact = found(x.double())
    monkeypatch.setattr(batchnorm, "_at_once", lambda x: True)
    monkeypatch.setattr(SpanBatchNorm, "_one_span", None)  # one by one would not do
    for one, other in zip(found(x), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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


def by_channels(layer, x, span):
    """Batch norm by spans as one call: groups become channels. Output and statistics."""
    groups = len(x) // span
    folded = x.unflatten(0, (groups, span)).transpose(0, 1).flatten(1, 2)
    mean = torch.zeros(folded.shape[1], dtype=x.dtype)
    var = torch.zeros_like(mean)
    weight, bias = layer.weight.repeat(groups), layer.bias.repeat(groups)
    out = nn.functional.batch_norm(folded, mean, var, weight, bias, True, 1.0, layer.eps)
    out = out.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)
    return out, torch.stack([mean, var]).view(2, groups, -1).mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_spans_one_by_one_have_the_bits_of_one_call_for_all(groups, dtype):
    torch.manual_seed(groups)
    layer = SpanBatchNorm(nn.BatchNorm2d(6).to(dtype), span=4)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(4 * groups, 6, 5, 5, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    found = []
    for way in ("one by one", "one call"):
        out, statistics = layer(x), layer.statistics
        if way == "one call":
            out, statistics = by_channels(layer, x, 4)
        wanted = torch.autograd.grad(out, (x, layer.weight, layer.bias), gradient)
        found.append([out, statistics, *wanted])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("span", [4, 8])
def test_channels_last_stay_last_there_and_back(span):
    layer = SpanBatchNorm(nn.BatchNorm2d(6), span)
    x = torch.randn(8, 6, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = layer(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_statistics_are_the_mean_over_spans():
    _, net = pair(span=4)
    x = torch.randn(12, 5, 3, 3, dtype=torch.float64)
    net(x)
    found = MovingAverages(net).statistics(x)
    groups = x.view(3, 4, 5, 3, 3).transpose(1, 2).flatten(2)
    expected = torch.cat([groups.mean(2).mean(0), groups.var(2).mean(0)])
    assert torch.allclose(found, expected)
    assert len(found) == MovingAverages(net).length == 10


@pytest.mark.parametrize("span", [4, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_statistics_of_an_overflow_are_forgotten(dims, span):
    """The next pass writes over them: a number that is none, times 0, would stay for ever."""
    _, net = pair(span, dims)
    x = torch.randn((4, 5) + (3,) * (2 * dims - 2), dtype=torch.float64)
    net(x)
    wanted = net[0].take().clone()
    for bad in (torch.inf, torch.nan):
        net(x * bad)
        assert not net[0].take().isfinite().any()
        net(x)
        assert torch.equal(net[0].take(), wanted)


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


# --- statistics computed anew ------------------------------------------------------------------


class Seen(nn.Module):
    """A net of two batch norms that keeps what came into them in training."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(1), nn.BatchNorm2d(3)])
        self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(3 * 36, 10)
        self.inputs = []

    def forward(self, x):
        inner = self.conv(self.norms[0](x))
        if self.training:
            self.inputs.append((x.detach().clone(), inner.detach().clone()))
        return self.fc(self.norms[1](inner).flatten(1))


RECOMPUTED = mb.Config(
    batch=64, micro=16, span=8, epochs=128 / 1438, bn_recompute=96, deterministic=True,
    lr=LearningRate(warmup=0), data=mb.recipes.digits().data,
)  # fmt: skip


def test_recomputed_statistics_are_those_of_the_images_exactly():
    torch.manual_seed(0)
    net = Seen()
    mb.train(RECOMPUTED, model=net, quiet=True)
    # The last six passes before the only evaluation are the 96 images'.
    assert len(net.inputs) == 2 * 4 + 6
    for norm, each in zip(net.norms, zip(*net.inputs[-6:], strict=True), strict=True):
        whole = torch.cat(each).double().transpose(0, 1).flatten(1)
        assert torch.allclose(norm.running_mean.double(), whole.mean(1), rtol=1e-5, atol=1e-6)
        assert torch.allclose(norm.running_var.double(), whole.var(1, correction=0), rtol=1e-5)
    # They are the first images of the order, those that the first steps saw.
    first = torch.cat([x for x, _ in net.inputs[:6]])
    assert torch.equal(first, torch.cat([x for x, _ in net.inputs[-6:]]))


def recomputed(images):
    """The whole net after two steps, by name."""
    cluster = Cluster.from_env()
    torch.manual_seed(0)
    net = mb.models.build("small", 10, 1, 8)
    mb.train(replace(RECOMPUTED, bn_recompute=images), model=net, cluster=cluster, quiet=True)
    return net.state_dict()


def test_recomputed_statistics_are_the_same_on_any_number_of_workers():
    alone, moving = recomputed(96), recomputed(0)
    for workers in (2, 3, 4):  # six micro-batches: as many for each, and not
        several = run_local(workers, recomputed, 96)
        assert all(torch.equal(alone[name], several[name]) for name in alone)
    # Only the statistics differ from a run without: training does not know of it.
    other = {name for name in alone if not torch.equal(alone[name], moving[name])}
    assert other == {name for name in alone if "running" in name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bn_recompute": 100}, "bn_recompute 100 is not a multiple of micro 16: use 112"),
        ({"ema": 0.9}, "drop --ema or --bn-recompute"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        replace(RECOMPUTED, **change).check()


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)),
        nn.Sequential(nn.Conv2d(1, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10)),
    ],
    ids=["vectors", "1 x 1"],
)
def test_one_value_a_channel_is_one_sentence(net):
    config = replace(CONFIG, span=1, stages=(), epochs=0.1, lr=replace(CONFIG.lr, warmup=0))
    with pytest.raises(UserError, match=r"one value a channel.*raise --span, or --data\.size$"):
        train(config, model=net, quiet=True)
    # Two images have a variance, and so have features of 1 x 2.
    assert train(replace(config, span=2), model=net, quiet=True).steps == 2
    wide = nn.Sequential(nn.Conv2d(1, 4, (8, 7)), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 10))
    assert train(config, model=wide, quiet=True).steps == 2
