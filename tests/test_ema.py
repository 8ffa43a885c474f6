"""The average of weights: its value, its place in evaluation and checkpoints."""

from dataclasses import replace

import pytest
import torch
from test_train import CONFIG
from torch import nn

import megabatch as mb
from megabatch.config import Config
from megabatch.ema import WeightAverage
from megabatch.precision import Masters
from megabatch.training import train


def test_the_average_is_the_recursion_written_out():
    net = nn.Linear(2, 1).double()
    average = WeightAverage(net, Config(ema=0.9))
    expected = net.weight.detach().clone()
    for step in range(5):
        with torch.no_grad():
            net.weight += step
        average.update(torch.tensor(True))
        expected = 0.9 * expected + 0.1 * net.weight.detach()
    kept = net.weight.detach().clone()
    with average.in_place():
        assert torch.allclose(net.weight, expected, rtol=1e-14)
    assert torch.equal(net.weight, kept)


def test_half_weights_are_averaged_in_full_precision():
    net = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(net.weight)
    average = WeightAverage(net, Config(ema=0.999))
    nn.init.constant_(net.weight, 2.0)
    for _ in range(100):
        average.update(torch.tensor(True))
    average.update(torch.tensor(False))  # a step that was skipped
    found = average.tensors()["ema.weight"]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(2 - 0.999**100, rel=1e-4)


def test_of_half_weights_the_masters_are_averaged():
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    config = Config(ema=0.5, precision="fp16", half_weights=True)
    masters = Masters(net, config)
    average = WeightAverage(net, config, masters)
    with torch.no_grad():
        masters.of(net.weight).fill_(1 + 2.0**-13)  # 1 in fp16
    masters.write_back()
    average.update(torch.tensor(True))
    assert average.tensors()["ema.weight"].item() == 1 + 2.0**-14


def test_a_weight_with_two_names_has_one_average():
    net = nn.ModuleDict({"one": nn.Linear(1, 1, bias=False), "two": nn.Linear(1, 1, bias=False)})
    net["two"].weight = net["one"].weight
    nn.init.ones_(net["one"].weight)
    config = Config(ema=0.5, precision="fp16", half_weights=True)
    masters = Masters(net, config)
    average = WeightAverage(net, config, masters)
    masters.of(net["two"].weight).data.fill_(1 + 2.0**-13)
    average.update(torch.tensor(True))
    assert {t.item() for t in average.tensors().values()} == {1 + 2.0**-14}


def test_without_it_nothing_is_kept():
    net = nn.Linear(2, 1)
    average = WeightAverage(net, Config())
    average.update(torch.tensor(True))
    assert average.tensors() == {}


def test_evaluation_uses_it_and_the_checkpoint_holds_it(tmp_path):
    config = replace(CONFIG, ema=0.8, deterministic=True)
    out = tmp_path / "run"
    averaged = train(config, out=out, quiet=True)
    plain = train(replace(config, ema=0.0), quiet=True)
    assert averaged.weights_sha256 == plain.weights_sha256  # training itself is untouched
    assert averaged.loss != plain.loss
    assert mb.evaluate(out)["loss"] == averaged.loss
    resumed = train(config, out=out, resume=True, quiet=True)
    assert resumed.loss == averaged.loss
