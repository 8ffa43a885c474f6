"""bench step and bench optim beside others: the same work on both sides, and floors that are
floors."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megabatch import models
from megabatch.bench import optim, rivals, step
from megabatch.bench.steady import noted, unsteady
from megabatch.cli import main
from megabatch.config import Config, Data
from megabatch.models.resnet import residual_blocks
from megabatch.optim import lars_host
from megabatch.planner import load

CPU = torch.device("cpu")
CONFIG = Config(
    model="small", batch=8, micro=4, span=4, label_smoothing=0.1,
    data=Data("synthetic", size=8, channels=1, classes=10),
).check()  # fmt: skip


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_optim_prints_each_optimiser_beside_its_floor(capsys):
    assert main(["bench", "optim", "--model", "small", "--seconds", "0.01", "--json"]) == 0
    found = last_line(capsys)
    names = [row["optimizer"] for row in found["rows"]]
    assert names[0].startswith("LARS") and any("SGD" in name for name in names)
    for row in found["rows"]:
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["ms"])
    # LARS reads weights and gradients once more, for their norms.
    lars, sgd = (found["rows"][names.index(n)]["floor_ms"] for n in (names[0], "torch's SGD"))
    assert lars / sgd == pytest.approx(7 / 5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--out", "no/machine.json"], "name a file in a folder that is there"),
        (["--out", "notes.json"], "is no machine's file, and would be lost"),
        (["--rivals", "--export", "net.json"], "--export measures nothing: leave --rivals away"),
        (["--export", "no/net.json"], "name a file in a folder that is there"),
        (["--export", "net.txt"], "the name of a workload ends with .json"),
        (["--micro", "0"], "--micro is 0"),
        (["--passes", "0"], "--passes is 0"),
        (["--micro", "4", "6", "--span", "4"], "micro 6 is not a multiple of span 4"),
        (["--size", "-1"], "data.size is -1"),
        (["--seconds", "0"], "--seconds is 0"),
    ],
)
def test_bench_step_refuses_before_it_measures(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    assert main(["bench", "step", "--device", "cpu", *flags]) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("flags", "images", "told"),
    [
        ([], 4, "written to machine.json"),
        (["--size", "8"], 4, "written to machine.json"),
        (["--size", "16"], 4, "not written to machine.json: these are of images of 16 px"),
        (["--passes", "3"], 12, "not written to machine.json: these are of steps of 3 passes"),
    ],
)
def test_the_planner_gets_rates_of_what_it_takes_them_for(
    flags, images, told, tmp_path, monkeypatch, capsys
):
    """One pass with its update, over images that the model was made for; others are shown."""
    taken, train_step = [], step.train_step

    def noted(parts, micro_batches, batch, **rates):
        taken.append((len(micro_batches), batch))
        return train_step(parts, micro_batches, batch, **rates)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "train_step", noted)
    monkeypatch.setattr(step, "time_of", lambda work, seconds, device: work() or 0.5)
    assert main(["bench", "step", "--device", "cpu", "--micro", "4", *flags, "--json"]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out.splitlines()[-1])["rows"]
    assert row["images_per_second"] == 2 * images and taken == [(images // 4, images)]
    assert told in said.err
    written = (tmp_path / "machine.json").exists()
    assert written is told.startswith("written")
    if written:
        (rate,) = load("machine.json").rates
        assert (rate.model, rate.micro, rate.images_per_second) == ("small", 4, 8.0)


def test_bench_optim_steps_as_training_does(monkeypatch):
    """With its layout and its freedom to round; on a CPU without a gate, which the host has read
    there."""
    seen = []
    monkeypatch.setattr(
        lars_host.FusedSGD, "__call__", lambda self, weights, *rest: seen.append((weights, rest))
    )
    net = models.build("small", 10, 1, 8).to(memory_format=torch.channels_last)
    _, _, work = next(optim._contenders(net, "cpu"))
    work()
    assert {w for weights, _ in seen for w in weights} == set(net.parameters())
    assert all(good is None for _, (_, _, _, good, _) in seen)


def test_an_unsteady_machine_is_told_and_a_steady_one_is_not():
    warm_up = [9.0, 9.0, 9.0]
    assert unsteady([*warm_up, 1.0, 1.01, 1.02, 1.03, 1.1, 1.0]) is None
    assert unsteady([*warm_up, 1.0, 2.0]) is None  # too few to tell
    said = unsteady([*warm_up, *[1.0] * 10, *[2.0] * 10, *[3.0] * 10])
    assert "over 1.50 times the median, a quarter under 0.50" in said


def test_every_turn_is_noted():
    done = []
    taken, timed = noted(lambda: done.append(1))
    for _ in range(5):
        timed()
    assert len(taken) == len(done) == 5 and min(taken) >= 0


def test_bench_optim_refuses_in_one_sentence(capsys):
    assert main(["bench", "optim", "--seconds", "0"]) == 2
    assert "--seconds is 0" in capsys.readouterr().err


@pytest.mark.parametrize("tuned", [False, True])
def test_the_rival_takes_the_step_that_anyone_would_write(monkeypatch, tuned):
    torch.manual_seed(1)
    net = models.build("small", 10, 1, 8)
    twin = copy.deepcopy(net)
    monkeypatch.setattr(rivals, "_net", lambda config: net)
    torch.manual_seed(2)
    rivals.plain_step(CONFIG, CPU, compiled=False, tuned=tuned)()
    torch.manual_seed(2)
    images, labels = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    optimizer = torch.optim.SGD(twin.parameters(), 1e-6, 0.9, weight_decay=5e-5)
    for _ in range(2):
        loss = cross_entropy(twin(images), labels, label_smoothing=0.1, reduction="sum")
        (loss / 8).backward()
    optimizer.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if tuned else 0, atol=1e-9 * tuned)


def test_every_convolution_counts_there_and_back(monkeypatch):
    """Each shape is timed once and counts as often as the net has it."""
    calls, done = [], []
    monkeypatch.setattr(rivals, "time_of", lambda work, seconds, device: done.append(work()) or 1.0)
    forward = nn.functional.conv2d
    monkeypatch.setattr(
        nn.functional, "conv2d", lambda *a, **k: calls.append(a) or forward(*a, **k)
    )
    net = models.build("resnet18", 10)
    config = Config(
        model="resnet18", batch=2, micro=2, span=2, data=Data(size=32, channels=3, classes=10)
    )
    layers = sum(isinstance(layer, nn.Conv2d) for layer in net.modules())
    assert rivals.convolutions_alone(config, CPU, torch.float32, 0.1) == layers
    assert len(done) < layers


def test_the_blocks_of_a_bare_step_are_open_as_in_training(monkeypatch):
    """Closed ones have no gradients behind them, and on a GPU that costs less."""
    nets, assemble = [], step.assemble
    monkeypatch.setattr(step, "assemble", lambda *given: nets.append(given[2]) or assemble(*given))
    with step.one_worker(CONFIG, CPU) as train:
        train()
    blocks = residual_blocks(nets[0])
    assert blocks
    assert all(block.closing_norm.weight.min() > 0.5 for block in blocks)


@pytest.mark.parametrize("with_torchvision", [False, True])
def test_the_rivals_blocks_are_open_where_ours_are(with_torchvision, monkeypatch):
    """Where torchvision is not installed our own net is the rival, with as much to compute."""
    if not with_torchvision:
        monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    data = Data("synthetic", size=32, channels=3, classes=10)
    net = rivals._net(Config(model="resnet18", batch=2, micro=2, span=2, data=data))
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms and all(norm.weight.min() == 1 for norm in norms)
