"""The training pass by kernels against the plain net: logits, statistics, every gradient; and the
trainer's step with it. Without a GPU, in Triton's interpreter, where Triton is installed."""

from dataclasses import replace

import pytest
import torch
from on_gpu import GPU, IF_THERE_IS_ONE
from torch import nn

from megabatch.batch import Step
from megabatch.batchnorm import SpanBatchNorm, use_spans
from megabatch.bench.step import one_worker
from megabatch.cluster import Cluster
from megabatch.config import Config, Data, OptimizerConfig
from megabatch.data.loader import MicroBatch
from megabatch.errors import UserError
from megabatch.models.resnet import BasicBlock, Bottleneck, ResNet
from megabatch.parts import assemble, prepared
from megabatch.passes import kinds as passes
from megabatch.step import train_step
from megabatch.sync.control import StepNumbers

pytest.importorskip("triton", reason="Triton is not installed: the fused pass was not checked")

DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = IF_THERE_IS_ONE


@pytest.fixture(autouse=True)
def exact_convolutions():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True  # in fp32 cuDNN's sums are by atomics
    yield
    cudnn.allow_tf32, cudnn.deterministic = before


def small(block, strides=(2, 2, 2)):
    """A ResNet of one block a stage (two in the first), all 64 wide: the interpreter is slow."""
    torch.manual_seed(0)
    net = ResNet(block, (2, 1, 1, 1), 10)
    inputs = 64 * block.expansion
    for stage, stride in zip((2, 3, 4), strides, strict=True):
        setattr(net, f"layer{stage}", nn.Sequential(block(inputs, 64, stride)))
    net.fc = nn.Linear(inputs, 10)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net.to(DEVICE).to(memory_format=torch.channels_last)


LONG = pytest.mark.systems  # in the interpreter


@pytest.mark.parametrize("span", [4, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize(
    "block,wide",
    [  # that of a Bottleneck is in the trainer's steps below, too
        pytest.param(Bottleneck, True, marks=LONG),
        pytest.param(Bottleneck, False, marks=LONG),
        (BasicBlock, True),
    ],
)
def test_the_pass_is_the_plain_net(block, wide, span):
    from megabatch.models.fused import ResNetPass

    def farthest(seed):
        """Of a parameter's gradient from the plain net's, for images drawn so."""
        net = small(block)
        torch.manual_seed(seed)
        images = torch.randn(4, 3, 33, 33, device=DEVICE)
        labels = torch.randint(10, (4,), device=DEVICE)
        run = ResNetPass(net, torch.float32, span, lambda _: wide)
        logits, statistics = run(images)
        nn.functional.cross_entropy(logits, labels).backward()

        exact = small(block).double()
        use_spans(exact, span)
        # A view form would be exact too; this is the one that runs on CPUs.
        nn.functional.cross_entropy(exact(images.double()), labels).backward()
        norms = [m for m in exact.modules() if isinstance(m, SpanBatchNorm)]
        wanted = torch.cat([m.statistics.flatten() for m in norms])
        assert (statistics.mean(0) - wanted).norm() / wanted.norm() < 1e-4
        both = list(zip(net.parameters(), exact.parameters(), strict=True))
        assert all(p.grad.stride() == p.stride() for p, _ in both)
        return max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in both)

    # On a GPU, whose sums have another order, a value at 0 may fall on ReLU's other side: in the
    # last stage one is some per cent of the gradient. That is by chance, a wrong kernel is not.
    limit = 1e-3 if GPU else 1e-4
    assert min(farthest(seed) for seed in range(1, 5 if GPU else 2)) < limit


@pytest.mark.parametrize("images,span,error,says", [
    (2, 1, UserError, "one value a channel"), (3, 2, ValueError, "not a multiple of the span"),
])  # fmt: skip
def test_kernels_refuse_what_the_plain_net_refuses(images, span, error, says):
    """Of one value there is no variance: kernels would make it 0, and train on."""
    from megabatch.models.fused import ResNetPass

    net = small(BasicBlock)
    inputs = torch.randn(images, 3, 32, 32, device=DEVICE)
    with pytest.raises(error, match=says):
        ResNetPass(net, torch.float32, span)(inputs)
    use_spans(net, span)
    with pytest.raises(error, match=says):
        net(inputs)


def test_more_classes_than_a_program_holds_are_left_to_torch(monkeypatch):
    from megabatch.kernels import loss

    torch.manual_seed(1)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    labels = torch.randint(10, (2,), device=DEVICE)
    found = []
    for most in (10, 9):
        monkeypatch.setattr(loss, "MOST_CLASSES", most)
        net = small(BasicBlock)
        run = passes.FusedPass(CONFIG, net)
        assert (run._loss_and_counts is loss.cross_entropy) is (most == 10)
        passed = run(images, labels)
        passed.loss.backward()
        found.append([*passed, net.fc.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@LONG
@pytest.mark.parametrize("block", [Bottleneck, BasicBlock])
def test_passes_that_are_under_way_together_do_not_meet(block):
    """Nothing of a pass lies anywhere but in what it returns: graphs run several side by side."""
    from megabatch.models.fused import ResNetPass

    net = small(block)
    run = ResNetPass(net, torch.float32, 2)
    parameters = list(net.parameters())
    torch.manual_seed(1)
    batches = torch.randn(2, 2, 3, 32, 32, device=DEVICE).unbind()

    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), parameters)

    alone = [gradients(run(images)[0]) for images in batches]
    begun = [run(images)[0] for images in batches]
    for one, other in zip(alone, map(gradients, begun), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


CONFIG = Config(
    model="resnet18",
    batch=4,
    micro=2,
    span=2,
    # Triton's interpreter cannot multiply in bf16.
    precision="bf16" if DEVICE.type == "cuda" else "fp16",
    loss_scale=128.0,
    label_smoothing=0.1,
    data=Data("synthetic", size=32, channels=3, classes=10),
)


def well_posed():
    """Where 32 rows make a statistic: of two, one rounding decides the gradients."""
    return small(Bottleneck, (2, 1, 1))


def steps_of(config, count=2):
    """Weights and numbers after some steps of the trainer."""
    cluster = Cluster(0, 1, 0, 1, DEVICE, (1, 1))
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 32, 32, generator=draw).to(DEVICE)
    labels = torch.randint(10, (4,), generator=draw).to(DEVICE)
    numbers = []
    with (
        prepared(config, cluster, 10, well_posed()) as net,
        assemble(config, cluster, net) as parts,
    ):
        for step in range(count):
            micros = [
                MicroBatch(images[at : at + 2], labels[at : at + 2], torch.arange(at, at + 2), at)
                for at in (0, 2)
            ]
            result = train_step(parts, micros, 4, lr=0.1, momentum=0.9)
            read = StepNumbers.unpack(Step(step, 4 * step, 4, 0.0, 0), result.numbers.tolist())
            numbers.append(read)
        for weight, copy in parts.copies.items():
            assert torch.equal(copy, weight.to(copy.dtype))
        kind = type(parts.run)
    return kind, {name: t.clone() for name, t in net.state_dict().items()}, numbers


@pytest.mark.parametrize("half_weights", [pytest.param(False, marks=LONG), True])
def test_the_trainer_is_as_near_to_fp32_as_with_the_plain_net(half_weights, monkeypatch):
    half = replace(CONFIG, half_weights=half_weights)
    full = replace(CONFIG, precision="fp32", compile="never")
    _, exact, exact_numbers = steps_of(full, 1)
    _, plain, _ = steps_of(replace(half, compile="never"), 1)
    monkeypatch.setattr(passes, "fusable", lambda *_: True)
    kind, fused, numbers = steps_of(half, 1)
    assert kind is passes.FusedPass and not numbers[0].skipped
    assert numbers[0].loss == pytest.approx(exact_numbers[0].loss, rel=0.02)
    first = well_posed().state_dict()
    names = [name for name, p in first.items() if p.is_floating_point()]
    for some in ([n for n in names if "running" in n], [n for n in names if "running" not in n]):
        moved = [
            torch.cat([(found[n] - first[n]).flatten() for n in some])
            for found in (exact, plain, fused)
        ]
        near, ours = (float((other - moved[0]).norm() / moved[0].norm()) for other in moved[1:])
        assert ours <= 1.5 * near + 1e-3
    assert all(torch.equal(fused[name], plain[name]) for name in first.keys() - set(names))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_captured_pass_gives_the_same_bits():
    _, eager, _ = steps_of(replace(CONFIG, graphs="never", deterministic=True), 4)
    _, graphs, _ = steps_of(replace(CONFIG, graphs="always", deterministic=True), 4)
    assert all(torch.equal(eager[name], graphs[name]) for name in eager)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize(
    "changes",
    [
        {"compile": "never"},
        {"graphs": "never"},
        {"graphs": "always"},
        {"optimizer": OptimizerConfig("muon")},
        {"optimizer": OptimizerConfig("lamb")},
        {"precision": "fp16", "loss_scale": None, "half_weights": True},
        {"precision": "fp16", "loss_scale": None, "compile": "never"},
        {"ema": 0.9},
        {"deterministic": True},
    ],
)
def test_no_step_waits_for_the_device(changes):
    config = replace(
        CONFIG, model="resnet18", data=Data("synthetic", size=64, channels=3), **changes
    )
    with one_worker(config, DEVICE) as step:
        for _ in range(3):  # kernels are compiled, tables are made
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
