"""Keyed randomness: the same bits everywhere, permutations that are permutations, keyed dropout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch.keyed import Dropout, Purpose, key_dropout, keyed, shuffled, uniform


@given(st.integers(0, 2**62), st.lists(st.integers(0, 2**60), min_size=1, max_size=5))
def test_tensors_hash_as_integers_do(seed, keys):
    """Python's integers do not wrap, so they are the reference for the wrapping of int64
    tensors."""
    plain = keyed(seed, Purpose.CROP, *keys)
    tensors = keyed(seed, Purpose.CROP, *(torch.tensor([key]) for key in keys))
    assert isinstance(plain, int)
    assert tensors.item() == plain
    assert 0 <= plain < 2**32


def test_the_bits_are_these():
    """Frozen: a change here changes every run."""
    assert keyed(0, 0) == 0
    frozen = [2319405578, 4188058769, 1281977724]
    assert [keyed(7, Purpose.ORDER, k) for k in (0, 1, 2**33)] == frozen


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 2**40))
def test_an_epoch_holds_every_image_once(images, epoch, seed):
    positions = torch.arange(epoch * images, (epoch + 1) * images)
    assert shuffled(seed, positions, images).sort().values.tolist() == list(range(images))


def test_any_part_of_the_stream_is_read_alone():
    whole = shuffled(3, torch.arange(5000), 1000)
    for first, last in ((0, 10), (990, 1010), (2345, 4711)):
        assert torch.equal(shuffled(3, torch.arange(first, last), 1000), whole[first:last])


def test_epochs_and_seeds_differ_and_look_random():
    images = 10_000
    stream = shuffled(0, torch.arange(3 * images), images).view(3, images).double()
    other = shuffled(1, torch.arange(images), images).double()
    place = torch.arange(images).double()
    for a, b in ((stream[0], stream[1]), (stream[0], other), (stream[2], place)):
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(images)
    neighbours = torch.corrcoef(torch.stack([stream[0, 1:], stream[0, :-1]]))[0, 1].item()
    assert abs(neighbours) < 5 / math.sqrt(images)


def test_uniform_numbers_fill_their_range_evenly():
    drawn = uniform(1, Purpose.FLIP, torch.arange(100_000))
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, 50, 0, 1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum().item()
    assert 20 < chi_squared < 100  # 49 degrees of freedom


def test_dropout_belongs_to_the_image_not_to_the_batch():
    layer = Dropout(0.5, seed=3, layer=0).train()
    x = torch.ones(8, 16)
    layer.positions = torch.arange(100, 108)
    whole = layer(x)
    layer.positions = torch.arange(104, 108)
    assert torch.equal(layer(x[4:]), whole[4:])
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    layer.layer = 1
    assert not torch.equal(layer(x[4:]), whole[4:])


def test_dropout_keeps_its_share_and_rests_in_evaluation():
    layer = Dropout(0.25, seed=0, layer=0).train()
    layer.positions = torch.arange(1000)
    kept = (layer(torch.ones(1000, 100)) > 0).float().mean().item()
    assert kept == pytest.approx(0.75, abs=0.01)
    x = torch.randn(4, 4)
    assert layer.eval()(x) is x


def test_key_dropout_replaces_by_type_and_numbers_the_layers():
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Dropout(0.1))
    )
    key_dropout(net, seed=5)
    found = [m for m in net.modules() if isinstance(m, Dropout)]
    assert [(m.p, m.layer, m.seed) for m in found] == [(0.5, 0, 5), (0.1, 1, 5)]
    for layer in found:
        layer.positions = torch.arange(3)
    assert net.train()(torch.randn(3, 4)).shape == (3, 4)
