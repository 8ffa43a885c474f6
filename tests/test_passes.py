"""Which pass a run takes, what a compiled one leaves behind, and a step by replayed passes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megabatch import kernels
from megabatch.batchnorm import MovingAverages
from megabatch.cluster import Cluster
from megabatch.compiling import compile_net
from megabatch.config import Config, Data
from megabatch.data.loader import MicroBatch
from megabatch.graphs import CapturedPass
from megabatch.models.resnet import resnet18
from megabatch.parts import assemble, prepared
from megabatch.passes import PlainPass, choose
from megabatch.step import train_step

# What torch imports for its compiler warns.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CPU = torch.device("cpu")
ALONE = Cluster(0, 1, 0, 1, CPU, (1, 1))
CONFIG = Config(
    batch=8, micro=4, span=2, loss_scale=64.0, label_smoothing=0.1, data=Data(size=8, classes=10)
)


def micro_batches(batch):
    draw = torch.Generator().manual_seed(batch)
    images = torch.randn(batch, 1, 8, 8, generator=draw)
    labels = torch.randint(10, (batch,), generator=draw)
    for at in range(0, batch, 4):
        part = slice(at, at + 4)
        yield MicroBatch(images[part], labels[part], torch.arange(at, at + 4), at)


class Replayed:
    """A graph as far as a CPU can have one: replay computes anew and writes where it wrote."""

    def __init__(self, captured):
        self._captured = captured
        captured._found, captured._gradients = captured._work()

    def replay(self):
        found, gradients = self._captured._work()
        static = (*self._captured._found, *self._captured._gradients)
        for held, new in zip(static, (*found, *gradients), strict=True):
            held.copy_(new)


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_step_by_replayed_passes_has_the_bits_of_one_by_backward(scale, monkeypatch):
    monkeypatch.setattr(CapturedPass, "_captured", lambda captured: Replayed(captured))
    config = replace(CONFIG, loss_scale=scale)
    found = []
    for graph in (False, True):
        with prepared(config, ALONE, 10) as net, assemble(config, ALONE, net) as parts:
            assert parts.graph is None
            if graph:
                parts = replace(parts, graph=CapturedPass(parts.run, net))
            results = [  # the batch switches, the passes do not
                train_step(parts, micro_batches(batch), batch, lr=0.1, momentum=0.9)
                for batch in (8, 16, 8)
            ]
            numbers = [result.numbers.clone() for result in results]
            losses = [loss for result in results for _, loss in result.losses]
        found.append([*net.state_dict().values(), *numbers, *losses])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_gpu_whose_kernels_are_left_out_is_told(monkeypatch):
    net = resnet18(10)
    for lacking, says in (("", ""), ("Triton finds no C compiler", "torch's kernels run instead")):
        monkeypatch.setattr(kernels, "lacking", lambda lacking=lacking: lacking)
        plain = PlainPass(Config(), torch.device("cuda"), net, MovingAverages(net))
        assert plain.how.startswith(lacking) and says in plain.how
        assert (plain.how == "") is (lacking == "")
        assert PlainPass(Config(), CPU, net, MovingAverages(net)).how == ""


@pytest.mark.parametrize("world", [1, 2])
def test_on_a_cpu_a_net_runs_as_it_is_unless_asked(world):
    """Compiled whole on one worker, and by blocks where gradients are to leave during backward."""
    net = resnet18(10)
    moving = MovingAverages(net)
    cluster = Cluster(0, world, 0, world, CPU, (1, world))
    for wish, compiled in (("auto", False), ("never", False), ("always", True)):
        config = Config(model="resnet18", precision="bf16", compile=wish)
        run = choose(config, cluster, net, moving)
        assert isinstance(run, PlainPass) and not run.copies
        assert bool(run.how) is compiled
        blocks = [block for stage in (net.layer1, net.layer4) for block in stage]
        by_blocks = compiled and world > 1
        assert all((block._compiled_call_impl is not None) is by_blocks for block in blocks)
        assert (net._compiled_call_impl is not None) is (compiled and world == 1)
        run.close()
        assert all(module._compiled_call_impl is None for module in net.modules())


def test_a_net_without_blocks_is_compiled_whole():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    limit = torch._dynamo.config.recompile_limit
    undo = compile_net(net, whole=False)
    assert net._compiled_call_impl is not None
    undo()
    assert net._compiled_call_impl is None
    assert torch._dynamo.config.recompile_limit == limit


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(capsys):
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    config = Config(compile="always")
    run = choose(config, ALONE, net, MovingAverages(net))

    def fails(*_):
        raise RuntimeError("no kernel for that\nand much more")

    net._compiled_call_impl = fails
    images, labels = torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long)
    for _ in range(2):
        found = run(images, labels)
        assert found.loss.item() == pytest.approx(
            nn.functional.cross_entropy(net(images), labels, reduction="sum").item()
        )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no kernel for that" in said and "--compile never" in said
