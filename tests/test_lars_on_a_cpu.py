"""LARS where the host computes it: torch's fused SGD against the plain twin, norms by rows, weights
in lists that a cache holds."""

import gc
import weakref

import pytest
import torch
from torch import nn

from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.optim import LARS, lars_host, layerwise, norms
from megabatch.optim.layout import flat
from megabatch.parts import assemble, prepared

SHAPES = [(6, 4), (8, 3, 5, 5), (5,), (7, 1, 3, 3), (0,), ()]
SETTINGS = {
    "paper": {},
    "pytorch": {"form": "pytorch"},
    "corrected": {"momentum_correction": True},
    "clip": {"policy": "clip", "trust": 0.02},
    "scale": {"policy": "scale", "eps": 1e-3},
    "still": {"momentum": 0.0},
    "still, pytorch": {"momentum": 0.0, "form": "pytorch"},
    "sgd": {"trust": None, "form": "pytorch"},
    "sgd, paper": {"trust": None},
    "climbing": {"maximize": True},
    "without decay": {"weight_decay": 0.0},
    "nesterov": {"nesterov": True},
}
last = torch.channels_last


def weights_of(seed=0):
    draw = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    made[1].data = made[1].data.contiguous(memory_format=last)
    return made


def give_gradients(weights, t):
    """In a layout of their own, as a stranger's backward may leave them."""
    draw = torch.Generator().manual_seed(100 + t)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draw)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_by_fused_sgd_a_step_is_the_plain_one_to_rounding(settings, monkeypatch):
    calls = []
    fused_sgd = torch._fused_sgd_
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *a, **k: (calls.append(a), fused_sgd(*a, **k)))
    found = []
    for fused in (True, None):
        weights = weights_of()
        optimizer = LARS(weights, 0.1, **{"weight_decay": 0.01, "fused": fused, **settings})
        for t, rate in enumerate((0.1, 0.0, 0.3, 0.2)):
            give_gradients(weights, t)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        held = [state["momentum_buffer"] for state in optimizer.state.values() if state]
        ratios = [value for seen in optimizer.ratios.values() for value in seen]
        found.append([*weights, *held, *ratios])
    assert bool(calls) is not settings.get("nesterov", False)
    # What is not contiguous torch's kernel copies there and back, twice the time of the update.
    assert all(tensor.is_contiguous() for lists in calls for each in lists for tensor in each)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_a_rate_too_small_for_dampening_is_taken_plainly():
    """1 - (1 - 1e-12) has four digits left."""
    found = []
    for fused in (True, False):
        weights = weights_of()
        optimizer = LARS(weights, 1e-11, trust=0.1, fused=fused)
        give_gradients(weights, 0)
        optimizer.step()
        found.append([optimizer.state[weight]["momentum_buffer"] for weight in weights])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_closed_gate_leaves_all_as_it_was():
    weights, untouched = weights_of(), weights_of()
    optimizer = LARS(weights, 0.1, fused=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step(good=torch.tensor(False))
    assert all(torch.equal(one, other) for one, other in zip(weights, untouched, strict=True))


def test_copies_are_written_with_the_weights():
    weights = weights_of()
    optimizer = LARS(weights, 0.1, fused=True)
    give_gradients(weights, 0)
    copies = {weights[1]: torch.zeros_like(weights[1], dtype=torch.bfloat16)}
    optimizer.step(copies=copies)
    assert torch.equal(copies[weights[1]], weights[1].detach().bfloat16())


def test_momentum_from_a_checkpoint_takes_its_weights_layout():
    weights = weights_of()
    optimizer, twin = LARS(weights, 0.1, fused=True), LARS(weights_of(), 0.1, fused=True)
    for each in (optimizer, twin):
        own = each.param_groups[0]["params"]
        for t in range(2):
            give_gradients(own, t)
            each.step()
            for state in each.state.values():  # as a file has it
                if each is twin:
                    state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    for one, other in zip(weights, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


def test_weights_that_move_between_steps_are_found_where_they_lie():
    """What is kept from one step to the next is not what they were."""
    weights, twins = weights_of(), weights_of()
    optimizer, twin = LARS(weights, 0.1, fused=True), LARS(twins, 0.1, fused=True)
    for t in range(3):
        for each, own in ((optimizer, weights), (twin, twins)):
            give_gradients(own, t)
            each.step()
        weights[1].data = weights[1].data.contiguous(
            memory_format=(torch.contiguous_format, last)[t % 2]
        )
        weights[0].data = weights[0].data.clone()
    for one, other in zip(weights, twins, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_a_weight_that_is_turned_where_it_lies_is_found_so():
    turned, twin = ([nn.Parameter(torch.arange(9.0).view(3, 3))] for _ in range(2))
    for weights, fused in ((turned, True), (twin, False)):
        optimizer = LARS(weights, 0.1, trust=None, form="pytorch", fused=fused)
        for t in range(3):
            give_gradients(weights, t)
            optimizer.step()
            weights[0].data = weights[0].data.t()
    torch.testing.assert_close(turned, twin, rtol=2e-6, atol=1e-7)


def test_a_weight_that_is_cut_off_where_it_lies_moves_nothing_beyond_its_end():
    whole, left = torch.randn(6, 4), []
    for fused in (True, False):
        weight = nn.Parameter(whole.clone())
        storage = weight.data
        optimizer = LARS([weight], 0.1, trust=None, form="pytorch", fused=fused)
        give_gradients([weight], 0)
        optimizer.step()
        beyond = storage[3:].clone()
        weight.data = weight.data[:3]
        momentum = optimizer.state[weight]
        momentum["momentum_buffer"] = momentum["momentum_buffer"][:3]
        give_gradients([weight], 1)
        optimizer.step()
        assert torch.equal(storage[3:], beyond)
        left.append(weight.detach())
    torch.testing.assert_close(*left, rtol=2e-6, atol=1e-7)


def test_weights_that_are_nobodys_any_more_are_not_kept():
    weights = weights_of()
    optimizer = LARS(weights, 0.1, fused=True)
    give_gradients(weights, 0)
    optimizer.step()
    seen = [weakref.ref(weight) for weight in weights]
    optimizer.param_groups[0]["params"] = others = weights_of(1)
    optimizer.state.clear()
    give_gradients(others, 1)
    optimizer.step()
    del weights
    gc.collect()
    assert not any(one() is not None for one in seen)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_takes_it_unless_it_is_deterministic(deterministic, monkeypatch):
    config = Config(batch=4, micro=4, span=4, deterministic=deterministic, data=Data(size=8))
    alone = Cluster(0, 1, 0, 1, torch.device("cpu"), (1, 1))
    with prepared(config, alone, 10) as net, assemble(config, alone, net) as parts:
        taken = []
        step = lars_host.FusedSGD.__call__
        monkeypatch.setattr(
            lars_host.FusedSGD, "__call__", lambda *given: (taken.append(1), step(*given))[1]
        )
        for weight in net.parameters():
            weight.grad = torch.zeros_like(weight)
        parts.optimizer.step()
    assert bool(taken) is not deterministic


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-6, 1.0, 1e12, 1e18])
@pytest.mark.parametrize("size", [(3, 4), (1 << 16,), (257, 11, 7, 5)])
def test_norms_of_long_tensors_are_as_float64_has_them(size, scale):
    torch.manual_seed(0)
    drawn = torch.randn(size)
    tensors = [drawn * scale, drawn.square() * scale]
    if drawn.dim() == 4:
        tensors.append(tensors[0].contiguous(memory_format=last))
        tensors.append(tensors[0].transpose(0, 3))  # of no order that is known here
    (found,) = norms.norms(tensors)
    assert found.dtype == torch.float64
    for norm, tensor in zip(found, tensors, strict=True):
        assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_long_gradient_that_is_not_finite_has_no_finite_norm(value):
    tensor = torch.ones(1 << 17)
    tensor[77_777] = value
    (found,) = norms.norms([tensor])
    torch.testing.assert_close(found, torch.tensor([value]).double(), equal_nan=True)


@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_a_long_gradient_of_zeros_has_norm_zero_and_a_tiny_one_has_its_own(value):
    tensor = torch.zeros(1 << 17)
    tensor[77_777] = value
    (found,) = norms.norms([tensor])
    assert found.item() == tensor[77_777].double().item()


def test_short_tensors_have_the_bits_of_float64():
    tensors = [torch.randn(n) for n in (1, 100, (1 << 16) - 1)]
    (found,) = norms.norms(tensors)
    expected = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    assert torch.equal(found, torch.stack(expected))


def test_flat_is_a_view_of_what_is_dense():
    images = torch.randn(2, 3, 4, 5)
    for tensor in (images, images.contiguous(memory_format=last), images[0], torch.tensor(1.0)):
        assert flat(tensor).data_ptr() == tensor.data_ptr()
        assert flat(tensor).sort().values.equal(tensor.flatten().sort().values)


# --- lists ---------------------------------------------------------------------------------------


def test_lists_that_a_cache_holds_have_the_bits_of_one_list(monkeypatch):
    found = []
    for nbytes in (1, 300, 1 << 40):
        monkeypatch.setattr(layerwise, "_CACHED_BYTES", nbytes)
        weights = weights_of()
        optimizer = LARS(weights, 0.1, weight_decay=0.01)
        parts = layerwise.together(optimizer.param_groups[0], weights)
        assert sorted(id(w) for part in parts for w in part) == sorted(map(id, weights))
        for t in range(3):
            give_gradients(weights, t)
            optimizer.step()
        found.append([len(parts), weights])
    assert found[0][0] > found[1][0] > found[2][0] == 1
    for _, weights in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0][1], strict=True))
