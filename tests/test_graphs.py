"""Steps by replayed passes: their bits, what is captured, and captures that fail.

Without a GPU on as much of one as a capture needs (fake_gpu.py).
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from fake_gpu import FakeDevice
from torch import nn

from megabatch.batchnorm import MovingAverages
from megabatch.cluster import Cluster
from megabatch.config import Config, Data
from megabatch.data.loader import MicroBatch
from megabatch.errors import UserError
from megabatch.parts import assemble, prepared
from megabatch.passes.graphs import CapturedPass, captured
from megabatch.passes.kinds import FusedPass, PlainPass
from megabatch.precision import full_dtype
from megabatch.step import train_step
from megabatch.sync.buckets import GradientSum

CPU = torch.device("cpu")
ALONE = Cluster(0, 1, 0, 1, CPU, (1, 1))
CONFIG = Config(
    batch=8, micro=4, span=2, loss_scale=64.0, label_smoothing=0.1, data=Data(size=8, classes=10)
)


def micro_batches(batch, dtype=torch.float32):
    """All in one place, one after another, as a loader may bring them."""
    draw = torch.Generator().manual_seed(batch)
    images = torch.randn(batch, 1, 8, 8, generator=draw)
    labels = torch.randint(10, (batch,), generator=draw)
    place = torch.empty(4, 1, 8, 8, dtype=dtype), torch.empty_like(labels[:4]), torch.arange(4)
    place = MicroBatch(*place, 0)
    for at in range(0, batch, 4):
        place.images.copy_(images[at : at + 4])
        place.labels.copy_(labels[at : at + 4])
        place.positions.copy_(torch.arange(at, at + 4))
        yield replace(place, first=at)


@pytest.fixture
def device(monkeypatch):
    return FakeDevice(monkeypatch)


# --- nets ---------------------------------------------------------------------------------------


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


class Draws(nn.Module):
    """A net that draws from torch's own generator, and stands in for somebody else's."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images):
        return self.after(nn.functional.dropout(self.before(images.flatten(1)), training=True))


class Counts(Draws):
    """One that keeps account of its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, images):
        self.passes += 1
        return super().forward(images) / self.passes


class Waits(Draws):
    """One that asks the device for a number: no graph can."""

    def forward(self, images):
        return super().forward(images) * (1 if images.sum().item() else 0)


# --- the same bits ------------------------------------------------------------------------------


def step_by_step(config, model=None, ways=None, own=False, batches=(8, 16, 8)):
    """Weights, buffers, numbers and losses after some steps, of which the batches differ."""
    torch.manual_seed(0)
    made, dtype = model and model(), full_dtype(config)
    with prepared(config, ALONE, 10, made) as net, assemble(config, ALONE, net, own) as parts:
        assert parts.graph is None
        if ways is not None:
            parts = replace(parts, graph=CapturedPass(parts.run, net, ways))
        results = [
            train_step(parts, micro_batches(batch, dtype), batch, lr=0.1, momentum=0.9)
            for batch in batches
        ]
        for batch, result in zip(batches, results, strict=True):
            assert [first for first, _ in result.losses] == list(range(0, batch, 4))
        numbers = [result.numbers.clone() for result in results]
        losses = [loss for result in results for _, loss in result.losses]
        return [*(t.clone() for t in net.state_dict().values()), *numbers, *losses]


def alike(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("model", [None, Drops])
@pytest.mark.parametrize(("scale", "ways"), [(1.0, 1), (40.0, 1), (40.0, 3)])
def test_a_step_by_replayed_passes_has_the_bits_of_one_by_backward(
    scale, ways, model, precision, device, capsys
):
    """One by one or side by side; of twelve images, whose share of the loss is no binary number."""
    config = replace(CONFIG, loss_scale=scale, precision=precision)
    batches = (8, 16, 12)
    plain = step_by_step(config, model, batches=batches)
    assert alike(plain, step_by_step(config, model, ways, batches=batches))
    assert device.sizes == ([1] if ways == 1 else [2, 3, 1])
    assert device.is_whole() and not capsys.readouterr().err


@pytest.mark.parametrize("model", [Draws, Counts])
def test_what_is_drawn_and_counted_before_a_capture_does_not_show(model, device):
    config = replace(CONFIG, compile="never")
    plain = step_by_step(config, model, own=True)
    assert alike(plain, step_by_step(config, model, 1, own=True))
    assert device.sizes == [1]


def test_graphs_of_one_pass_share_memory_and_streams(device):
    """What a stream has freed in a pool only the same stream takes again."""
    step_by_step(CONFIG, ways=4, batches=(16, 8, 12))
    assert device.sizes == [4, 2, 3]
    assert len({graph.memory for graph in device.graphs}) == 1
    streams = [stream for graph in device.graphs for stream in graph.streams]
    assert len(set(streams)) == 4


def test_all_images_of_a_replayed_pass_are_its_own(device):
    """A copy would repeat one image in the place of four."""
    first, *_ = micro_batches(8)
    one = MicroBatch(first.images[:1], first.labels[:1], first.positions[:1], 4)
    with prepared(CONFIG, ALONE, 10) as net, assemble(CONFIG, ALONE, net) as parts:
        graph = CapturedPass(parts.run, net)
        with pytest.raises(UserError, match="--graphs never"):
            list(graph([first, one], 1.0))


def test_a_step_that_failed_midway_shows_in_no_other(device):
    def torn(batch):
        for micro in micro_batches(batch):
            if micro.first == 8:
                raise OSError("the disk is gone")
            yield micro

    plain = step_by_step(CONFIG, batches=(16,))
    torch.manual_seed(0)
    with prepared(CONFIG, ALONE, 10) as net, assemble(CONFIG, ALONE, net) as parts:
        parts = replace(parts, graph=CapturedPass(parts.run, net, 4))
        assert not list(parts.graph([], 1.0))  # nothing was dealt to this worker
        with pytest.raises(OSError, match="disk"):
            train_step(parts, torn(16), 16, lr=0.1, momentum=0.9)
        train_step(parts, micro_batches(16), 16, lr=0.1, momentum=0.9)
        weights = list(net.state_dict().values())
        assert alike(plain[: len(weights)], weights)


# --- captures that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [1, 3])
def test_what_cannot_be_captured_runs_as_it_is_and_leaves_no_trace(
    ways, device, monkeypatch, capsys
):
    class Asks(Drops):
        def forward(self, images):
            device.break_off()
            return super().forward(images)

    plain = step_by_step(CONFIG, Asks)
    added, add = [], GradientSum.add
    monkeypatch.setattr(GradientSum, "add", lambda *_: added.append(True) or add(*_))
    assert alike(plain, step_by_step(CONFIG, Asks, ways))
    assert device.is_whole() and not device.sizes
    assert len(added) == 2  # from the second step on gradients leave during backward again
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(not while a stream is captured)" in said


def test_without_memory_for_so_many_fewer_run_side_by_side(device, capsys):
    device.room = 2
    plain = step_by_step(CONFIG, batches=(16, 20, 8))
    assert alike(plain, step_by_step(CONFIG, ways=4, batches=(16, 20, 8)))
    assert device.sizes == [2, 1] and device.is_whole()
    assert not any(graph.broken or graph.away for graph in device.graphs)
    assert not capsys.readouterr().err


def test_where_memory_ends_later_that_of_larger_graphs_is_given_back(device, capsys):
    batches = (16, 12, 8)
    plain = step_by_step(CONFIG, batches=batches)
    torch.manual_seed(0)
    with prepared(CONFIG, ALONE, 10) as net, assemble(CONFIG, ALONE, net) as parts:
        parts = replace(parts, graph=CapturedPass(parts.run, net, 4))
        for batch in batches:
            train_step(parts, micro_batches(batch), batch, lr=0.1, momentum=0.9)
            device.room = 1
        weights = list(net.state_dict().values())
        assert alike(plain[: len(weights)], weights)
        assert device.sizes == [4, 1] and not parts.graph.refused
        assert list(parts.graph._graphs) == [1] and len(parts.graph._held) == 1
    assert device.is_whole() and not capsys.readouterr().err


def test_a_pass_that_has_no_room_in_a_graph_runs_as_it_is(device, capsys):
    device.room = 0
    plain = step_by_step(CONFIG)
    assert alike(plain, step_by_step(CONFIG, ways=2))
    assert not device.sizes and device.is_whole()
    assert "(CUDA out of memory.)" in capsys.readouterr().err


@pytest.mark.parametrize(("free", "sizes"), [(1000, [4]), (500, [2]), (30, [1])])
def test_as_many_run_side_by_side_as_half_of_the_memory_holds(free, sizes, device):
    """By what the last pass before a capture takes: the first ones try kernels out."""
    device.free, device.peaks = free, [0, 900, 900, 125]
    step_by_step(CONFIG, ways=4, batches=(16,))
    assert device.sizes == sizes


# --- which passes are captured ------------------------------------------------------------------


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


# --- on a GPU -----------------------------------------------------------------------------------


GPU = Cluster(0, 1, 0, 1, torch.device("cuda"), (1, 1))


def on_gpu(micro):
    tensors = (t.to(GPU.device) for t in (micro.images, micro.labels, micro.positions))
    return MicroBatch(*tensors, micro.first)


@contextmanager
def by_kernels(config, ways):
    """The net and the parts of a run by kernels of our own, so many passes side by side (None: not
    captured)."""
    torch.manual_seed(0)
    with prepared(config, GPU, 10) as net, assemble(config, GPU, net) as parts:
        if not isinstance(parts.run, FusedPass):
            pytest.skip("needs a GPU that the kernels were cut for")
        yield net, replace(parts, graph=ways and CapturedPass(parts.run, net, ways))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", [Drops, Draws, Waits])
def test_a_net_of_somebody_elses_gives_the_same_bits_captured(model, capsys):
    found = []
    for graphs in ("never", "always"):
        config = replace(CONFIG, compile="never", graphs=graphs)
        torch.manual_seed(0)
        with (
            prepared(config, GPU, 10, model()) as net,
            assemble(config, GPU, net, own=True) as parts,
        ):
            for batch in (8, 16, 8):
                there = [on_gpu(micro) for micro in micro_batches(batch)]
                train_step(parts, there, batch, lr=0.1, momentum=0.9)
        found.append(list(net.state_dict().values()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert ("cannot be replayed" in capsys.readouterr().err) is (model is Waits)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_a_capture_that_failed_memory_of_two_streams_is_given_back(capsys):
    """As the loader's images are, made on one and read on the other."""
    config = replace(CONFIG, compile="never", graphs="always")
    with prepared(config, GPU, 10, Waits()) as net, assemble(config, GPU, net, True) as parts:
        there = [on_gpu(micro) for micro in micro_batches(8)]
        train_step(parts, there, 8, lr=0.1, momentum=0.9)
        assert parts.graph.refused and "cannot be replayed" in capsys.readouterr().err
        side, reserved = torch.cuda.Stream(), []
        for _ in range(8):
            with torch.cuda.stream(side):
                images = torch.empty(64 << 20, dtype=torch.uint8, device=GPU.device)
            images.record_stream(torch.cuda.current_stream())
            del images
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_side_by_side_have_the_bits_of_one_after_another():
    data = Data(size=32, channels=3, classes=10)
    config = Config(
        model="resnet50", batch=64, micro=16, span=8, precision="bf16", graphs="never", data=data
    )
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(6 * 16, 3, 32, 32, generator=draw).to(GPU.device)
    labels = torch.randint(10, (6 * 16,), generator=draw).to(GPU.device)
    positions = torch.arange(6 * 16, device=GPU.device)
    found = []
    for ways in (None, 1, 2, 4):
        with by_kernels(config, ways) as (net, parts):
            for count in (4, 6, 4):
                micros = (
                    MicroBatch(images[part], labels[part], positions[part], part.start)
                    for part in (slice(at, at + 16) for at in range(0, 16 * count, 16))
                )
                result = train_step(parts, micros, 16 * count, lr=0.1, momentum=0.9)
            losses = [loss for _, loss in result.losses]
            if ways:
                assert parts.graph._ways == ways and not parts.graph.refused
        found.append([*net.state_dict().values(), result.numbers, *losses])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fewer_passes_lie_in_the_memory_of_more():
    """A step's last ones, captured later: what more they take is far from a pass."""
    data = Data(size=128, channels=3, classes=10)
    config = Config(
        model="resnet18",
        batch=1024,
        micro=256,
        span=256,
        precision="bf16",
        graphs="never",
        data=data,
    )
    images = torch.randn(256, 3, 128, 128, device=GPU.device).to(memory_format=torch.channels_last)
    there = MicroBatch(
        images,
        torch.zeros(256, dtype=torch.long, device=GPU.device),
        torch.arange(256, device=GPU.device),
        0,
    )
    with by_kernels(config, 4) as (_, parts):
        reserved = []
        for count in (1, 4, 3):
            train_step(parts, [there] * count, 256 * count, lr=0.1, momentum=0.9)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
        assert sorted(parts.graph._graphs) == [1, 3, 4]
    one, four, three = reserved
    assert three - four < (four - one) / 6
