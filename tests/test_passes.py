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
from megabatch.graphs import CapturedPass, captured
from megabatch.models.resnet import resnet18
from megabatch.parts import assemble, prepared
from megabatch.passes import FusedPass, PlainPass, choose
from megabatch.step import train_step

# What torch imports for its compiler warns.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CPU = torch.device("cpu")
ALONE = Cluster(0, 1, 0, 1, CPU, (1, 1))
CONFIG = Config(
    batch=8, micro=4, span=2, loss_scale=64.0, label_smoothing=0.1, data=Data(size=8, classes=10)
)


def micro_batches(batch):
    """All in one place, one after another, as a loader may bring them."""
    draw = torch.Generator().manual_seed(batch)
    images = torch.randn(batch, 1, 8, 8, generator=draw)
    labels = torch.randint(10, (batch,), generator=draw)
    place = MicroBatch(torch.empty(4, 1, 8, 8), torch.empty_like(labels[:4]), torch.arange(4), 0)
    for at in range(0, batch, 4):
        place.images.copy_(images[at : at + 4])
        place.labels.copy_(labels[at : at + 4])
        place.positions.copy_(torch.arange(at, at + 4))
        yield replace(place, first=at)


class Replayed:
    """A graph as far as a CPU can have one: replay computes anew and writes where it wrote."""

    def __init__(self, captured, ways):
        self._captured = captured
        self.results = [captured._work(way) for way in range(ways)]

    def replay(self):
        for way, (held_found, held_gradients) in enumerate(self.results):
            found, gradients = self._captured._work(way)
            static = (*held_found, *held_gradients.values())
            for held, new in zip(static, (*found, *gradients.values()), strict=True):
                held.copy_(new)


class Drops(nn.Module):
    """A net with dropout, and a layer that no image reaches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 10)
        )
        self.idle = nn.Linear(3, 3)

    def forward(self, images):
        return self.layers(images)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("model", [None, Drops])
@pytest.mark.parametrize(("scale", "ways"), [(1.0, 1), (64.0, 1), (64.0, 3)])
def test_a_step_by_replayed_passes_has_the_bits_of_one_by_backward(
    scale, ways, model, refused, monkeypatch, capsys
):
    """One by one or side by side, and where the device would not capture them."""
    sizes = []

    def capture(those, ways):
        if refused:
            those._refuse(RuntimeError("not while a stream is captured\nand much more"))
        else:
            graph = Replayed(those, ways)
            those._graphs[ways] = (graph, graph.results)
            sizes.append(ways)

    monkeypatch.setattr(CapturedPass, "_capture", capture)
    monkeypatch.setattr(CapturedPass, "_warmed_up", lambda those: those._ways)
    config = replace(CONFIG, loss_scale=scale)
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        own = model and model()
        with prepared(config, ALONE, 10, own) as net, assemble(config, ALONE, net) as parts:
            assert parts.graph is None
            if graph:
                parts = replace(parts, graph=CapturedPass(parts.run, net, ways))
            results = [  # the batch switches, the passes do not
                train_step(parts, micro_batches(batch), batch, lr=0.1, momentum=0.9)
                for batch in (8, 16, 8)
            ]
            numbers = [result.numbers.clone() for result in results]
            losses = [loss for result in results for _, loss in result.losses]
            firsts = [[first for first, _ in result.losses] for result in results]
        assert firsts == [[0, 4], [0, 4, 8, 12], [0, 4]]
        found.append([*net.state_dict().values(), *numbers, *losses])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert sizes == ([] if refused else [1] if ways == 1 else [2, 3, 1])
    said = capsys.readouterr().err
    assert said.count("\n") == refused and ("while a stream is captured)" in said) is refused


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


def test_which_passes_are_captured():
    """Small ones; by kernels of our own also large ones, if nothing is to leave meanwhile; those of
    somebody else's model only when asked."""
    net, gpu = nn.Linear(2, 2), torch.device("cuda")
    fused, plain = FusedPass.__new__(FusedPass), PlainPass(Config(), CPU, net, MovingAverages(net))
    small, large = (Config(batch=m, micro=m, span=m, data=Data(size=224)) for m in (256, 1024))

    def is_captured(config, run, world=1, own=False, device=gpu):
        cluster = Cluster(0, world, 0, world, device, (1, world))
        return captured(config, cluster, run, net, own) is not None

    for world in (1, 2):
        assert is_captured(small, fused, world) and is_captured(small, plain, world)
        assert is_captured(large, fused, world) is (world == 1)
        assert not is_captured(large, plain, world)
    for config in (replace(small, compile="never"), replace(small, deterministic=True)):
        assert is_captured(config, fused) and not is_captured(config, plain)
    assert not is_captured(small, plain, own=True)
    always, never = (replace(large, graphs=wish) for wish in ("always", "never"))
    assert is_captured(always, plain, own=True) and not is_captured(never, fused)
    assert not is_captured(always, plain, device=CPU)


def test_how_many_passes_run_side_by_side():
    """By kernels of our own, until they have the pixels of a pass that fills the device."""
    net = nn.Linear(2, 2)
    fused, plain = FusedPass.__new__(FusedPass), PlainPass(Config(), CPU, net, MovingAverages(net))
    cluster = Cluster(0, 1, 0, 1, torch.device("cuda"), (1, 1))
    for run, micro, size, ways in (
        (fused, 256, 224, 4),
        (fused, 512, 224, 2),
        (fused, 1024, 224, 1),
        (fused, 1024, 64, 4),
        (plain, 256, 224, 1),
    ):
        config = Config(batch=micro, micro=micro, span=micro, data=Data(size=size))
        assert captured(config, cluster, run, net, False)._ways == ways


class Draws(nn.Module):
    """A net that draws from torch's own generator, and stands in for somebody else's."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images):
        return self.after(nn.functional.dropout(self.before(images.flatten(1)), training=True))


class Waits(Draws):
    """One that asks the device for a number: no graph can."""

    def forward(self, images):
        return super().forward(images) * (1 if images.sum().item() else 0)


def on(device, micro):
    tensors = (t.to(device) for t in (micro.images, micro.labels, micro.positions))
    return MicroBatch(*tensors, micro.first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", [Drops, Draws, Waits])
def test_a_net_of_somebody_elses_gives_the_same_bits_captured(model, capsys):
    gpu = torch.device("cuda")
    alone = Cluster(0, 1, 0, 1, gpu, (1, 1))
    found = []
    for graphs in ("never", "always"):
        config = replace(CONFIG, compile="never", graphs=graphs)
        torch.manual_seed(0)
        with (
            prepared(config, alone, 10, model()) as net,
            assemble(config, alone, net, own=True) as parts,
        ):
            for batch in (8, 16, 8):
                there = [on(gpu, micro) for micro in micro_batches(batch)]
                train_step(parts, there, batch, lr=0.1, momentum=0.9)
        found.append(list(net.state_dict().values()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert ("cannot be replayed" in capsys.readouterr().err) is (model is Waits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_side_by_side_have_the_bits_of_one_after_another():
    gpu = torch.device("cuda")
    alone = Cluster(0, 1, 0, 1, gpu, (1, 1))
    data = Data(size=32, channels=3, classes=10)
    config = Config(
        model="resnet50", batch=64, micro=16, span=8, precision="bf16", graphs="never", data=data
    )
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(6 * 16, 3, 32, 32, generator=draw).to(gpu)
    labels = torch.randint(10, (6 * 16,), generator=draw).to(gpu)
    positions = torch.arange(6 * 16, device=gpu)
    found = []
    for ways in (None, 1, 2, 4):
        torch.manual_seed(0)
        with prepared(config, alone, 10) as net, assemble(config, alone, net) as parts:
            if not isinstance(parts.run, FusedPass):
                pytest.skip("needs a GPU that the kernels were cut for")
            if ways:
                parts = replace(parts, graph=CapturedPass(parts.run, net, ways))
            for count in (4, 6, 4):
                micros = (
                    MicroBatch(images[part], labels[part], positions[part], part.start)
                    for part in (slice(at, at + 16) for at in range(0, 16 * count, 16))
                )
                result = train_step(parts, micros, 16 * count, lr=0.1, momentum=0.9)
            losses = [loss for _, loss in result.losses]
            if ways:
                assert parts.graph._ways == ways and not parts.graph._refused
        found.append([*net.state_dict().values(), result.numbers, *losses])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
