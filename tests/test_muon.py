"""Muon against what it says: singular values by a float64 reference that takes matrices apart, the
direction of torch's own Muon, lengths as shares of the weights."""

import pytest
import torch
from torch import nn

from megabatch.cluster import Cluster
from megabatch.config import Config, Data, LearningRate, OptimizerConfig
from megabatch.errors import UserError
from megabatch.optim import Muon, parameter_groups
from megabatch.optim.muon_step import orthogonal
from megabatch.parts import assemble, prepared


def polynomial(matrix, a=3.4445, b=-4.7750, c=2.0315, times=5):
    """Of the singular values, by taking the matrix apart."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(times):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9), (1, 7), (16, 3, 3, 3), (4, 2, 1, 1)])
def test_it_is_the_polynomial_of_the_singular_values(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (found,) = orthogonal([tensor])
    assert found.shape == tensor.shape
    expected = polynomial(tensor.flatten(1))
    torch.testing.assert_close(found.flatten(1).double(), expected, rtol=2e-4, atol=2e-5)


def test_singular_values_come_out_about_alike():
    generator = torch.Generator().manual_seed(2)
    left, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(64, 32, generator=generator))
    skewed = left @ torch.logspace(0, -2, 32).diag() @ right.mT
    values = torch.linalg.svdvals(orthogonal([skewed])[0])
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("size", [1e-42, 1e-25, 1e-19, 1e19, 1e37])
def test_how_large_the_numbers_are_does_not_matter(size):
    """Squares of the small ones are 0, of the large ones infinite."""
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(4))
    scaled = matrix * size  # of 1e-42 few digits are left
    (found,) = orthogonal([scaled])
    (expected,) = orthogonal([scaled.double()])
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_stay_zeros(dtype):
    assert not orthogonal([torch.zeros(3, 4, dtype=dtype)])[0].any()


def test_a_layer_without_gradients_any_more_keeps_its_weights_finite():
    """Its momentum decays until nothing is left, through numbers whose squares are 0."""
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([weight], lr=0.1, momentum=0.5, trust=0.01)
    for step in range(200):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    assert weight.isfinite().all()
    assert not optimizer.state[weight]["momentum_buffer"].any()


@pytest.mark.parametrize("pad", [False, True])
def test_layers_go_together_as_they_go_alone(pad):
    shapes = [(5, 8)] * 3 + [(8,), (2, 5, 8), (8, 5), (5, 2), (5, 5), (5, 4, 3, 3), (0, 3)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [
        torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(40, 5, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(7, 5).mT,
        torch.randn(3, 5, 4).permute(1, 2, 0),
        torch.randn(5, 16)[:, ::2],
        torch.randn(6, 4, 6, 3).to(memory_format=torch.channels_last)[:, :, ::2],
        torch.randn(5, 9, dtype=torch.float64),
    ]
    before = [tensor.clone() for tensor in tensors]
    for tensor, held, found in zip(tensors, before, orthogonal(tensors, pad), strict=True):
        assert torch.equal(tensor, held) and found is not tensor
        alone = held.flatten(1) if held.ndim > 1 else held
        (expected,) = orthogonal([alone.contiguous()], pad=False)
        torch.testing.assert_close(found, expected.view(found.shape))
        if tensor.ndim == 1:
            assert torch.equal(found, tensor)


def across(step, weight):
    """What of a step is not along its weight, whose length it changes."""
    return step - (step * weight).sum() / weight.square().sum() * weight


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_points_where_torchs_does(nesterov):
    start = torch.randn(24, 48, generator=torch.Generator().manual_seed(3))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([ours], lr=1.0, momentum=0.9, trust=0.01, nesterov=nesterov)
    torchs = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.0)
    for t in range(4):
        before = ours.detach().clone(), theirs.detach().clone()
        ours.grad = torch.randn(24, 48, generator=torch.Generator().manual_seed(10 + t))
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
        moved = [
            across(p.detach() - q, before[0]) for p, q in zip((ours, theirs), before, strict=True)
        ]
        # Theirs averages the gradients where ours sums them, and computes in bf16.
        cosine = torch.nn.functional.cosine_similarity(*(m.flatten() for m in moved), dim=0)
        assert cosine > 0.999


def turned(weight, direction, share):
    """A step of so much of a weight's length, and back to that length."""
    moved = weight - share * weight.norm() / direction.norm() * direction
    return moved * (weight.norm() / moved.norm())


def test_a_step_is_a_share_of_its_weight_and_ratios_tell():
    weight, bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
    optimizer = Muon(
        [{"params": [weight]}, {"params": [bias], "adapt": False, "share": 0.5}],
        lr=2.0,
        trust=0.01,
        momentum=0.9,
    )
    before = weight.detach().clone(), bias.detach().clone()
    weight.grad, bias.grad = torch.randn(6, 4) * 1e-6, torch.randn(6)
    optimizer.step()
    expected = turned(before[0].double(), polynomial(weight.grad), 2.0 * 0.01)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias.detach(), before[1] - 2.0 * 0.5 * bias.grad)
    assert set(optimizer.ratios) == {weight}


def test_weights_of_zeros_begin_to_move_and_without_a_gradient_nothing_does():
    zeros, still = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([zeros, still], lr=1.0, trust=0.01)
    zeros.grad, still.grad = torch.randn(4, 4), torch.zeros(4, 4)
    optimizer.step()
    assert 0 < zeros.detach().norm() < 0.01 * 1.3 * 2
    assert torch.equal(still.detach(), torch.ones(4, 4))


def test_what_began_with_zeros_grows_by_its_steps_and_not_by_shares_of_itself():
    zeros = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([zeros], lr=72.0, trust=0.001)
    draw = torch.Generator().manual_seed(0)
    for _ in range(500):
        zeros.grad = torch.randn(8, 8, generator=draw)
        optimizer.step()
    most = 500 * 0.072 * 1.3 * 8**0.5  # if all steps went the same way
    assert 0.1 < zeros.detach().norm() < most


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_gate_leaves_all_as_it_is(first, dtype):
    weight = nn.Parameter(torch.randn(64, 64).to(dtype))
    optimizer = Muon([weight], lr=1.0, trust=0.1)

    def step(good):
        weight.grad = torch.randn_like(weight) * good
        optimizer.step(good=torch.tensor(good))

    if not first:
        step(True)
    before = weight.detach().clone()
    held = {name: value.clone() for name, value in optimizer.state[weight].items()}
    step(False)
    assert torch.equal(weight.detach(), before)
    assert all(torch.equal(optimizer.state[weight][name], value) for name, value in held.items())
    step(True)
    assert not torch.equal(weight.detach(), before)
    torch.testing.assert_close(weight.norm().item(), before.norm().item(), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_without_a_gradient_nothing_creeps(dtype):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64).to(dtype) * 20)
    optimizer = Muon([weight], lr=1.0, trust=0.1)
    weight.grad = torch.zeros_like(weight)
    before = weight.detach().clone()
    for _ in range(3):
        optimizer.step()
    assert torch.equal(weight.detach(), before)


def test_a_length_beyond_its_dtype_is_free():
    weight = nn.Parameter(torch.full((300, 300), 250.0, dtype=torch.float16))
    optimizer = Muon([weight], lr=0.1, trust=0.1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert weight.isfinite().all()


def test_halves_follow_weights_that_were_brought_back():
    weight = nn.Parameter(torch.randn(6, 4))
    half = torch.empty(6, 4, dtype=torch.float16)
    optimizer = Muon([weight], lr=1.0, trust=0.5)
    weight.grad = torch.randn(6, 4)
    optimizer.step(copies={weight: half})
    assert torch.equal(half, weight.detach().half())


def test_vectors_and_single_numbers_have_no_length_to_keep():
    weights = [nn.Parameter(torch.ones(shape)) for shape in [(), (3,), (1, 1)]]
    optimizer = Muon(weights, lr=1.0, trust=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9))


def test_what_does_not_adapt_decays_too_where_it_is_told_to():
    bias = nn.Parameter(torch.ones(3))
    bias.grad = torch.zeros(3)
    Muon([{"params": [bias], "adapt": False}], lr=0.5, trust=0.1, weight_decay=0.2).step()
    torch.testing.assert_close(bias.detach(), torch.full((3,), 1 - 0.5 * 0.2))


@pytest.mark.parametrize("adapt_head", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_weights_that_adapt_keep_their_lengths(adapt_head, weight_decay):
    """Steps that are shares of a weight would make it longer at every turn, and themselves: in a
    hundred of these more than twenty times."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
    net.append(nn.Linear(16, 4))
    groups = parameter_groups(net, weight_decay, share=0.001, adapt_head=adapt_head)
    optimizer = Muon(groups, lr=96.0, trust=0.001)
    layer, head = net[0].weight, net[3].weight
    began = layer.norm().item(), head.norm().item()
    directions = layer.detach().clone()
    for _ in range(100):
        images = torch.randn(64, 20, generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), (images[:, 0] > 0).long()).backward()
        optimizer.step()
    assert layer.norm().item() == pytest.approx(began[0], rel=1e-6)
    assert (head.norm().item() == pytest.approx(began[1], rel=1e-6)) is adapt_head
    assert nn.functional.cosine_similarity(layer.flatten(), directions.flatten(), dim=0) < 0.9


def config(name="muon", **optimizer):
    return Config(
        batch=64,
        micro=16,
        span=16,
        epochs=2,
        data=Data("digits"),
        lr=LearningRate(reference=20.0, per=64),
        optimizer=OptimizerConfig(name=name, **optimizer),
    )


@pytest.mark.parametrize("name", ["muon", "lars", "lamb"])
@pytest.mark.parametrize("adapt_head", [True, False])
def test_the_last_layer_of_a_run_adapts_unless_told_not_to_and_never_with_muon(name, adapt_head):
    told = config(name, adapt_head=adapt_head, unadapted_rate=0.05)
    alone = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
    with prepared(told, alone, 10) as net, assemble(told, alone, net) as parts:
        last = [layer.weight for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
        (group,) = [
            group
            for group in parts.optimizer.param_groups
            if any(p is last for p in group["params"])
        ]
        adapts = adapt_head and name != "muon"
        assert group["adapt"] is adapts
        assert group["share"] == (1.0 if adapts else 0.05)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"trust": None}, "muon needs --optimizer.trust"),
        ({"form": "pytorch"}, "muon has no form"),
        ({"policy": "clip"}, "muon has no policy"),
        ({"eps": 1e-6}, "muon has no eps"),
    ],
)
def test_what_muon_would_ignore_is_refused(optimizer, words):
    with pytest.raises(UserError, match=words):
        config(**optimizer)
