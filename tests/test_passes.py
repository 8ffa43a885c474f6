"""Which pass a run takes, and what a compiled one leaves behind."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from megabatch import kernels
from megabatch.batch import Stage
from megabatch.batchnorm import MovingAverages, use_spans
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, LearningRate
from megabatch.errors import UserError
from megabatch.models.resnet import resnet18, resnet34, resnet50
from megabatch.models.small import small
from megabatch.passes.compiling import compile_net
from megabatch.passes.kinds import PlainPass, choose_pass, fusable
from megabatch.training import train

# What torch imports for its compiler warns.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CPU = torch.device("cpu")
ALONE = Cluster(0, 1, 0, 1, CPU, (1, 1))


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
        run = choose_pass(config, cluster, net, moving)
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
    undo = compile_net(net, as_one=False)
    assert net._compiled_call_impl is not None
    undo()
    assert net._compiled_call_impl is None
    assert torch._dynamo.config.recompile_limit == limit


def subclassed(module):
    class Mine(type(module)):
        pass

    module.__class__ = Mine


def test_kernels_run_a_resnet_as_it_is_bundled_and_no_other(monkeypatch):
    """Layers that a caller changed they would not know of, and what hangs on one nobody would
    call."""
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(kernels, "roomy", lambda device: True)
    config = Config(model="own", precision="bf16", span=4)
    gpu = torch.device("cuda")

    def runs(change=None, build=resnet18):
        net = build(10, 1)
        if change:
            change(net)
        use_spans(net, config.span)
        return fusable(config, gpu, net, own=True)

    assert runs() and runs(build=resnet50)
    for change in (
        subclassed,
        lambda net: subclassed(net.layer1[0]),
        lambda net: subclassed(net.layer4[1]),
        lambda net: setattr(net, "maxpool", nn.Identity()),
        lambda net: setattr(net, "fc", nn.Sequential(nn.Dropout(), net.fc)),
        lambda net: setattr(net, "conv1", nn.Conv2d(1, 64, 3, padding=1, bias=False)),
        lambda net: setattr(net, "conv1", nn.Sequential(net.conv1)),
        lambda net: setattr(net, "layer4", nn.Identity()),
        lambda net: setattr(net, "layer1", nn.Sequential()),
        lambda net: setattr(net.layer2, "0", nn.Identity()),
        lambda net: net.layer3[0].register_forward_hook(print),
        lambda net: net.fc.register_forward_pre_hook(print),
        lambda net: net.fc.register_full_backward_hook(print),
        lambda net: net.layer1.register_full_backward_pre_hook(print),
        lambda net: net.conv1.weight.register_hook(print),
        lambda net: net.conv1.weight.register_post_accumulate_grad_hook(print),
        lambda net: setattr(net.layer1[0], "forward", net.layer1[0].forward),
        lambda net: setattr(net.layer1[1].conv1, "weight", net.layer1[0].conv1.weight),
        lambda net: setattr(net.layer1, "1", net.layer1[0]),
        lambda net: nn.utils.parametrizations.weight_norm(net.layer2[0].conv1),
        lambda net: net.fc.requires_grad_(False),
    ):
        assert not runs(change)


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(world, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no kernel for that\nand much more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    cluster = Cluster(0, world, 0, world, CPU, (1, world))
    run = choose_pass(Config(compile="always"), cluster, net, MovingAverages(net))
    images, labels = torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long)
    for _ in range(2):
        found = run(images, labels)
        assert found.loss.item() == pytest.approx(
            nn.functional.cross_entropy(net(images), labels, reduction="sum").item()
        )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no kernel for that" in said and "--compile never" in said


class Counting(nn.Module):
    """Counts its passes and draws."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.inner(x) * torch.rand(2)


class Sloped(Counting):
    """Looks where its images lead before it says what they are."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
        return super().forward(x + slope)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind,told", [(Counting, ""), (Sloped, "double backward")])
def test_a_backward_that_cannot_be_compiled_runs_as_it_is(kind, told, world, monkeypatch, capsys):
    """It is compiled when it first runs. What was tried before shows in nothing else."""
    made = torch.compile
    # Its second half alone costs seconds, and refuses what it refuses before.
    monkeypatch.setattr(torch, "compile", lambda *a, **k: made(*a, backend="aot_eager", **k))
    torch._dynamo.reset()
    found = {}
    for wish in ("never", "always"):
        torch.manual_seed(0)
        net = kind()
        cluster = Cluster(0, world, 0, world, CPU, (1, world))
        run = choose_pass(Config(compile=wish), cluster, net, MovingAverages(net))
        for _ in range(2):
            passed = run(torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long))
            passed.loss.backward()
        found[wish] = [passed.loss.detach(), net.passes, *(p.grad for p in net.parameters())]
        run.close()
    for one, other in zip(found["never"], found["always"], strict=True):
        torch.testing.assert_close(one, other)
    said = capsys.readouterr().err
    assert told in said and said.count("cannot compile") == bool(told)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_user_got_wrong_is_not_blamed_on_the_compiler(capsys):
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    run = choose_pass(Config(compile="always"), ALONE, net, MovingAverages(net), classes=3)
    for _ in range(2):
        with pytest.raises(UserError, match="tells 2 classes apart"):
            run(torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long))
    assert "cannot compile" not in capsys.readouterr().err


def test_compiled_on_one_worker_a_pass_finds_what_the_net_as_it_is_does():
    """Loss, counts and statistics are one graph with the net, and stay one from pass to pass; an
    evaluation between them runs the net on its own."""
    torch._dynamo.reset()  # what it has learnt of this pass in other tests
    found = {}
    for wish in ("never", "always"):
        torch.manual_seed(0)
        net = small(10)
        use_spans(net, 4)
        run = choose_pass(Config(compile=wish, span=4), ALONE, net, MovingAverages(net))
        before = dict(torch._dynamo.utils.counters["stats"])
        for seed in range(3):
            torch.manual_seed(seed)
            images, labels = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
            found[wish, seed] = run(images, labels)
            found[wish, seed].loss.backward()
            with torch.no_grad():
                net.eval()(images)
                net.train()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs - before.get("unique_graphs", 0) == (2 if wish == "always" else 0)
        found[wish, "gradients"] = [p.grad for p in net.parameters()]
        run.close()
    for what in (0, 1, 2, "gradients"):
        for one, other in zip(found["never", what], found["always", what], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def compiled(monkeypatch):
    """Counts the graphs that are compiled, and makes nothing of them, which would take minutes."""
    counter, made = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: made(*a, backend=counter, **k))
    torch._dynamo.reset()
    return counter


def test_a_run_compiles_each_kind_of_pass_once(compiled):
    """Of training and of evaluation, whose last, shorter pass runs as it is; not once more after a
    switch of the batch or an evaluation."""
    config = Config(
        model="small", batch=16, micro=8, span=4, epochs=3, eval_every=1, compile="always", ema=0.9,
        stages=(Stage(1.0, 32), Stage(2.0, 8)), lr=LearningRate(warmup=0),
        data=Data("synthetic", size=8, channels=1, classes=10, images=100),
    ).check()  # fmt: skip
    summary = train(config, quiet=True)
    assert summary.steps > 10 and (100 - summary.seen // 3) % config.micro
    assert compiled.frame_count == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_equal_blocks_share_a_graph(compiled):
    """ResNet-34 has 16 blocks of 7 kinds: the first one of a stage, and the others."""
    net = resnet34(10, 1)
    use_spans(net, 2)
    two = Cluster(0, 2, 0, 2, CPU, (1, 2))
    run = choose_pass(Config(compile="always", span=2), two, net, MovingAverages(net))
    images, labels = torch.randn(4, 1, 32, 32), torch.randint(10, (4,))
    found = []
    for _ in range(2):  # the second time round nothing is new
        run(images, labels).loss.backward()
        found.append(compiled.frame_count)
        with torch.no_grad():
            net.eval()
            for some in (images, images[:3]):
                net(some)
                found.append(compiled.frame_count)
            net.train()
    run.close()
    assert found == [7, 14, 21, 21, 21, 21]


def test_a_capture_that_fails_is_not_blamed_on_the_compiler(monkeypatch, capsys):
    """The same pass ran before: compiled it stays, and whoever captures it hears of it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    undone = []
    gpu = torch.device("cuda")
    run = PlainPass(Config(), gpu, net, MovingAverages(net), lambda: undone.append(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def fails(*_):
        raise RuntimeError("not while a stream is captured")

    net._compiled_call_impl = fails
    with pytest.raises(RuntimeError, match="not while a stream is captured"):
        run(torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.long))
    assert not undone and not capsys.readouterr().err
