"""Each kernel of the training pass against its plain twin in float64: forward, every gradient, odd
shapes. Without a GPU they run in Triton's interpreter, where Triton is installed."""

import contextlib
from importlib import import_module

import pytest
import torch
from on_gpu import GPU, IF_THERE_IS_ONE, ON_A_GPU
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import max_pool2d

from megabatch import kernels
from megabatch.batchnorm import normalise as normalise_plain
from megabatch.data.source import InMemory, InWords
from megabatch.optim import layerwise
from megabatch.optim.lars_step import Settings
from megabatch.optim.lars_step import update as update_plain
from megabatch.optim.muon_step import MuonSettings
from megabatch.optim.muon_step import update as muon_plain
from megabatch.sync.control import counts as counted

pytest.importorskip("triton", reason="Triton is not installed: no kernel was checked")

pytestmark = IF_THERE_IS_ONE


@pytest.fixture(autouse=True)
def exact_convolutions():
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def device():
    return "cuda" if GPU else "cpu"


CASES = [(4, 64, 5, 5, 2, torch.float32), (6, 40, 7, 3, 2, torch.float32),
         (4, 96, 6, 6, 4, torch.float16), (3, 64, 9, 9, 1, torch.float32)]  # fmt: skip


def close(found, wanted, tolerance):
    distance = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert distance < tolerance, float(distance)


def drawn(shape, dtype, device, shift=0.0):
    x = torch.randn(shape, dtype=torch.float64) + shift
    return x.to(dtype).to(device).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("n,c,h,w,span,dtype", CASES)
@pytest.mark.parametrize("relu,add", [(True, False), (False, False), (True, True)])
def test_batchnorm(n, c, h, w, span, dtype, relu, add, device):
    from megabatch.kernels.span_norm import normalise

    torch.manual_seed(0)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    x = drawn((n, c, h, w), dtype, device, shift=3).requires_grad_()
    residual = drawn((n, c, h, w), dtype, device).requires_grad_() if add else None
    weight = torch.randn(c, device=device).requires_grad_()
    bias = torch.randn(c, device=device).requires_grad_()
    out, statistics = normalise(x, weight, bias, span, relu=relu, residual=residual)
    inputs = [t for t in (x, weight, bias, residual) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    other = exact[3] if add else None
    wanted, wanted_statistics = normalise_plain(*exact[:3], span, relu=relu, residual=other)
    close(out, wanted, tolerance)
    close(statistics, wanted_statistics, 1e-5)
    gradient = drawn((n, c, h, w), dtype, device)
    gradients = torch.autograd.grad(out, inputs, gradient)
    wanted_gradients = torch.autograd.grad(wanted, exact, gradient.double())
    for found, right in zip(gradients, wanted_gradients, strict=True):
        close(found, right, 5 * tolerance)


@pytest.fixture
def few_programs(monkeypatch):
    """So few that each has several tiles of each of several parts, as with a real batch: there are
    hundreds, and small tensors give each of them one."""
    from megabatch.kernels import batchnorm, batchnorm_backward, fold, rows, stem

    few = rows.ByWidth(rows.Programs(16, 64, 4, 4), rows.Programs(16, 64, 4, 8))
    for module in (batchnorm, batchnorm_backward, stem):
        for name, value in list(vars(module).items()):
            if isinstance(value, rows.ByWidth):
                monkeypatch.setattr(module, name, few)
    monkeypatch.setattr(fold, "_ROWS", 16)
    monkeypatch.setattr(fold, "_PROGRAMS", 4)
    x = torch.empty(4, 64, 5, 5).contiguous(memory_format=torch.channels_last)
    cut, programs, _ = rows.rows_of(x, 2, batchnorm.MOMENTS)
    assert cut.parts == 2 and cut.each == 2 * programs.rows


@pytest.mark.parametrize("n,c,h,w,span,dtype", CASES)
@pytest.mark.parametrize("relu,add", [(True, False), (True, True)])
@pytest.mark.usefixtures("few_programs")
def test_batchnorm_in_several_tiles(n, c, h, w, span, dtype, relu, add, device):
    test_batchnorm(n, c, h, w, span, dtype, relu, add, device)


def test_joined_gradients_and_both_residuals(device):
    """A sum of two gradients, and a residual with an affine map of its own."""
    from megabatch.kernels.batchnorm import Affine, apply
    from megabatch.kernels.batchnorm_backward import join

    torch.manual_seed(0)
    x, residual, result = (drawn((4, 40, 5, 3), torch.float32, device) for _ in range(3))
    joined, slots = join(x, residual, result, 2)
    wanted = (x.double() + residual.double()) * (result > 0)
    close(joined, wanted, 1e-6)
    close(slots.sum(1), wanted.view(2, 2, 40, -1).sum((1, 3)), 1e-6)
    maps = [Affine(*torch.randn(4, 2, 40, device=device)) for _ in range(2)]
    out, slots = apply(x, maps[0], 2, True, residual, maps[1], sums=True)
    (a, b), (c, d) = (
        (t.double().repeat_interleave(2, 0)[:, :, None, None] for t in (m.scale, m.shift))
        for m in maps
    )
    wanted = (x * a + b + residual * c + d).relu()
    close(out, wanted, 1e-6)
    close(slots.sum(1), wanted.view(2, 2, 40, -1).sum((1, 3)), 1e-6)


@pytest.mark.usefixtures("few_programs")
def test_joined_gradients_and_both_residuals_in_several_tiles(device):
    test_joined_gradients_and_both_residuals(device)


@pytest.mark.parametrize("n", [8, 128])
def test_variance_survives_a_large_mean(n, device):
    from megabatch.kernels.span_norm import normalise

    torch.manual_seed(0)
    x = drawn((n, 64, 6, 6), torch.float32, device, shift=300)
    one, zero = torch.ones(64, device=device), torch.zeros(64, device=device)
    _, found = normalise(x, one, zero, 4)
    _, wanted = normalise_plain(x.double(), one.double(), zero.double(), 4)
    close(found[:, 64:], wanted[:, 64:], 1e-5)


def expand_plain(z, weight, gamma, beta, span, eps, identity=None):
    """Convolution, batch norm by spans, add, ReLU."""
    y = torch.nn.functional.conv2d(z, weight[:, :, None, None])
    images, outputs, height, width = y.shape
    t = y.permute(0, 2, 3, 1).reshape(images // span, span * height * width, outputs)
    var, mean = torch.var_mean(t, 1, correction=0, keepdim=True)
    t = (t - mean) * torch.rsqrt(var + eps) * gamma + beta
    y = t.view(images, height, width, outputs).permute(0, 3, 1, 2)
    return (y if identity is None else y + identity).relu()


@pytest.mark.parametrize("n,w,k,h,span,dtype,kind", [
    (4, 64, 256, 5, 2, torch.float32, "identity"),
    (2, 128, 128, 6, 1, torch.float16, "identity"),
    (3, 64, 128, 9, 3, torch.float32, "none"),
    (4, 64, 192, 5, 2, torch.float32, "shortcut"),
    # Triton's interpreter has no products of bf16.
    pytest.param(4, 128, 256, 5, 2, torch.bfloat16, "identity", marks=ON_A_GPU),
    pytest.param(64, 256, 1024, 14, 2, torch.bfloat16, "identity", marks=ON_A_GPU),
    (19, 64, 64, 3, 1, torch.float32, "none"),  # more spans than a program takes
])  # fmt: skip
def test_gram(n, w, k, h, span, dtype, kind, device):
    from megabatch.kernels import gram
    from megabatch.kernels.batchnorm_backward import join
    from megabatch.kernels.gram_backward import expand_backward

    torch.manual_seed(0)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    z = drawn((n, w, h, h), dtype, device).relu_()
    weight = (torch.randn(k, w, device=device) / w**0.5).to(dtype)
    gamma, beta = torch.randn(k, device=device), torch.randn(k, device=device)
    spans, rows = n // span, span * h * h

    def expansion(x, weights, statistics):
        sums = x.float().sum((2, 3)).view(spans, span, -1).sum(1)
        return gram.expansion(
            gram.gram(x, span), sums, weights, gamma, beta, rows, 1e-5, statistics
        )

    statistics = torch.empty(spans, 2 * k, device=device)
    found = expansion(z, weight, statistics)
    identity = drawn((n, k, h, h), dtype, device) if kind == "identity" else None
    shortcut = None
    if kind == "shortcut":
        x = drawn((n, 128, h, h), dtype, device)
        other = (torch.randn(k, 128, device=device) / 12).to(dtype)
        shortcut = (x, other, expansion(x, other, torch.empty_like(statistics)))
    out = gram.expand(z, weight, found, span, identity, shortcut)

    exact = [t.detach().double().requires_grad_() for t in (z, weight, gamma, beta)]
    added = None if identity is None else identity.double()
    if shortcut:
        y = torch.nn.functional.conv2d(x.double(), other.double()[:, :, None, None])
        t = y.permute(0, 2, 3, 1).reshape(spans, rows, k)
        var, mean = torch.var_mean(t, 1, correction=0, keepdim=True)
        t = (t - mean) * torch.rsqrt(var + 1e-5) * gamma.double() + beta.double()
        added = t.view(n, h, h, k).permute(0, 3, 1, 2)
    wanted = expand_plain(*exact, span, 1e-5, added)
    close(out, wanted, tolerance)
    y = torch.nn.functional.conv2d(z.double(), weight.double()[:, :, None, None])
    y = y.permute(0, 2, 3, 1).reshape(spans, rows, k)
    close(statistics, torch.cat([y.mean(1), y.var(1)], 1), 1e-5)

    gradient = drawn((n, k, h, h), dtype, device)
    masked, slots = join(gradient, None, out, span)
    sums = slots.sum(1)
    gradients = expand_backward(masked, sums, z, weight, found, span)
    # The mask of the rounded result, as the kernels have it.
    plain = expand_plain(*exact, span, 1e-5, added)
    mask = (out > 0).double()
    right = torch.autograd.grad(plain, exact, gradient.double() * mask)
    for one, other in zip(gradients, right, strict=True):
        close(one, other.view_as(one), 5 * tolerance)


@pytest.fixture
def one_program_a_column(monkeypatch):
    """Which goes from tile to tile, as on a chip whose multiprocessors are all at work."""
    from megabatch.kernels import gram, pointwise

    def grid(tile, tiles, columns, device):
        assert tile.programs and tiles > 1
        return (-(-columns // tile.columns),)

    for module in (gram, pointwise):
        monkeypatch.setattr(module, "launch_grid", grid)


@pytest.mark.parametrize("kind", ["identity", "shortcut"])
@pytest.mark.usefixtures("one_program_a_column")
def test_gram_from_tile_to_tile(kind, device):
    inputs, outputs = (128, 128) if kind == "identity" else (64, 192)
    test_gram(4, inputs, outputs, 9, 2, torch.float16, kind, device)


@pytest.mark.parametrize("stride", [0, 1, 2])
@pytest.mark.usefixtures("one_program_a_column")
def test_descend_from_tile_to_tile(stride, device):
    test_descend(stride, 9, 7, torch.float16, device)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("n,h,w,span", [(4, 7, 5, 2), (8, 33, 9, 8)])
def test_pick(stride, n, h, w, span, device):
    """Of rows in several tiles and parts, too."""
    from megabatch.kernels import pointwise

    torch.manual_seed(0)
    x = drawn((n, 40, h, w), torch.float32, device)
    few, slots = pointwise.pick(x, span, stride)
    wanted = x[:, :, ::stride, ::stride]
    assert torch.equal(few, wanted) and few.is_contiguous(memory_format=torch.channels_last)
    sums = wanted.double().sum((2, 3)).view(n // span, span, -1).sum(1)
    close(slots.sum(1), sums, 1e-5)


@pytest.mark.parametrize("stride", [0, 1, 2])
@pytest.mark.parametrize("h,w,dtype", [
    (6, 6, torch.float32), (7, 5, torch.float32), (6, 6, torch.float16),
])  # fmt: skip
def test_descend(stride, h, w, dtype, device):
    from megabatch.kernels import pointwise

    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    n, span, inputs, outputs = 4, 2, 64, 192
    d_y = drawn((n, inputs, h, w), dtype, device)
    weight = torch.randn(inputs, outputs, device=device).to(dtype)
    mask = drawn((n, outputs, h, w), dtype, device).relu_()
    wanted = torch.nn.functional.conv2d(d_y.double(), weight.double().T[:, :, None, None])
    added = None
    if stride:
        few = ((h - 1) // stride + 1, (w - 1) // stride + 1)
        added = drawn((n, outputs, *few), dtype, device)
        wanted[:, :, ::stride, ::stride] += added.double()
    wanted = wanted * (mask > 0)
    found, slots = pointwise.descend(d_y, weight, mask, span, added, max(stride, 1))
    close(found, wanted, tolerance)
    close(slots.sum(1), wanted.sum((2, 3)).view(2, 2, -1).sum(1), tolerance)


@pytest.mark.parametrize("n,c,h,w,span", [(4, 64, 8, 8, 2), (2, 40, 7, 9, 1), (2, 64, 5, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stem(n, c, h, w, span, dtype, device):
    from megabatch.kernels import stem
    from megabatch.kernels.batchnorm import affine

    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    x = drawn((n, c, h, w), dtype, device)
    weight, bias = torch.randn(c, device=device), torch.randn(c, device=device)
    statistics = torch.empty(n // span, 2 * c, device=device)
    found = affine(x, weight, bias, span, 1e-5, statistics)
    out, picked, places = stem.pool(x, found, span)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    z, _ = normalise_plain(*exact, span)
    wanted = max_pool2d(z, 3, 2, 1)
    close(out, wanted, tolerance)
    gradient = drawn(out.shape, dtype, device) * (out > 0)
    gradients = stem.pool_backward(gradient, x, picked, places, found, span)
    right = torch.autograd.grad(wanted, exact, gradient.double())
    # In half precision two values of a window may round to one: then another place is as right.
    for one, other in zip(gradients, right, strict=True):
        close(one, other, 5 * tolerance if dtype == torch.float32 else 0.1)


@pytest.mark.usefixtures("few_programs")
def test_stem_in_several_tiles(device):
    test_stem(2, 64, 17, 18, 1, torch.float32, device)


def test_of_equal_pixels_the_first_is_the_greatest(device):
    """As torch has it: its gradient goes to one of them."""
    from megabatch.kernels import stem
    from megabatch.kernels.batchnorm import Affine

    torch.manual_seed(0)
    x = drawn((2, 64, 9, 8), torch.float32, device).round()
    one, zero = torch.ones(2, 64, device=device), torch.zeros(2, 64, device=device)
    out, _, places = stem.pool(x, Affine(one, zero, zero, one), 1)
    wanted, where = max_pool2d(x.relu(), 3, 2, 1, return_indices=True)
    assert torch.equal(out, wanted)
    down, right = (torch.arange(side, device=device) * 2 - 1 for side in out.shape[2:])
    found = (down[:, None] + places // 3) * 8 + right + places % 3
    assert torch.equal(found[out > 0], where[out > 0])


def test_of_equal_logits_the_first_counts_as_the_better_one(device):
    from megabatch.kernels.loss import cross_entropy

    _, found = cross_entropy(
        torch.zeros(4, 7, device=device), torch.tensor([0, 1, 4, 5], device=device)
    )
    assert found[1:].tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.999])
@pytest.mark.parametrize("classes", [1, 2, 37, 3000])
def test_loss(dtype, smoothing, classes, device):
    from megabatch.kernels.loss import cross_entropy

    torch.manual_seed(0)
    logits = torch.randn(9, classes, device=device).mul_(3).to(dtype).requires_grad_()
    labels = torch.randint(classes, (9,), device=device)
    loss, counts = cross_entropy(logits, labels, smoothing)
    exact = logits.detach().double().requires_grad_()
    wanted = torch_cross_entropy(exact, labels, reduction="sum", label_smoothing=smoothing)
    wanted_counts = counted(exact.detach(), labels, wanted.detach())
    close(counts[1:], wanted_counts[1:], 1e-6)
    (found,) = torch.autograd.grad(loss / 9, logits)
    (right,) = torch.autograd.grad(wanted / 9, exact)
    if classes == 1:  # nothing to learn, and next to it any rounding is far away
        assert max(loss.abs(), counts[0].abs(), found.abs().max()) < 1e-5
        return
    close(loss, wanted, 1e-6)
    close(counts[0], wanted, 1e-6)
    close(found, right, 1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("in_words", [False, True])
def test_bytes_become_the_numbers_of_the_plain_twin(channels, flip, in_words, device):
    """Of images in several blocks each, the last one not full; `in_words`: bytes lie between
    them."""
    from megabatch.kernels.numbers import numbers_of

    torch.manual_seed(0)
    images = torch.randint(256, (5, channels, 31, 73), dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    if in_words:
        source = InMemory(images, torch.arange(5), classes=5)
        images, _ = InWords(source, images.device).read(torch.arange(5), None)
        assert images.stride(0) % 8 == 0 and images.stride(0) > images[0].numel()
    mirrored = torch.tensor([True, False, True, True, False], device=device) if flip else None
    offset, scale = (torch.rand(channels, device=device) * 100 + 1 for _ in range(2))
    wanted = images
    if mirrored is not None:
        wanted = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    wanted = (wanted.float() - offset[:, None, None]) / scale[:, None, None]
    assert torch.equal(numbers_of(images, mirrored, offset, scale), wanted)


RULES = [
    {}, {"form": "pytorch"}, {"nesterov": True}, {"policy": "clip"}, {"policy": "scale"},
    {"trust": None}, {"trust": None, "form": "pytorch"}, {"correction": 0.5, "eps": 1e-3},
    {"momentum": 0.0}, {"weight_decay": 0.0}, {"maximize": True},
]  # fmt: skip
SETTINGS = Settings(
    rate=0.3, momentum=0.9, weight_decay=1e-2, trust=0.001, eps=0.0, nesterov=False, form="paper",
    policy="lars", maximize=False, correction=1.0,
)  # fmt: skip


def lars_case(device):
    shapes = [(64, 3, 7, 7), (5000,), (17, 31), (4096,), (1,)]
    weights = [torch.randn(s, device=device) for s in shapes]
    weights[0] = weights[0].contiguous(memory_format=torch.channels_last)
    weights[2].zero_()
    return weights


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # a copy may be infinite
@pytest.mark.parametrize("changed", RULES)
@pytest.mark.parametrize("good", [None, True, False])
def test_lars(changed, good, device):
    from megabatch.kernels.lars import update

    torch.manual_seed(0)
    weights, settings = lars_case(device), SETTINGS._replace(**changed)
    buffers = [torch.randn_like(w) for w in weights] if settings.momentum else []
    # Of a weight in the midst there is no copy.
    copies = [(i, weights[i].to(torch.float16)) for i in (0, 1, 3, 4)]
    gate = None if good is None else torch.tensor(good, device=device)
    twins, twin_buffers = [w.clone() for w in weights], [b.clone() for b in buffers]
    for _ in range(2):
        gradients = [torch.randn_like(w) for w in weights]
        gradients[3].mul_(1e-25)
        found = update(weights, gradients, buffers, settings, gate, copies)
        wanted = update_plain(twins, gradients, twin_buffers, settings, gate, [])
    for weight, twin in zip(weights + buffers, twins + twin_buffers, strict=True):
        torch.testing.assert_close(weight, twin, rtol=1e-6, atol=5e-7)
    for i, copy in copies:
        assert torch.equal(copy, weights[i].half())
    assert (found is None) == (wanted is None)
    for one, other in zip(found or [], wanted or [], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_lars_takes_other_layouts_and_dtypes(device):
    """A checkpoint's buffers and another's gradients may lie as they like."""
    from megabatch.kernels.lars import update

    torch.manual_seed(0)
    weights = [torch.randn(8, 3, 5, 5, device=device).contiguous(memory_format=torch.channels_last)]
    buffers = [torch.randn(8, 3, 5, 5, device=device)]
    twins, twin_buffers = [weights[0].clone()], [buffers[0].clone()]
    gradients = [torch.randn(8, 3, 5, 5, device=device).half()]
    update(weights, gradients, buffers, SETTINGS, None, [])
    update_plain(twins, [gradients[0].float()], twin_buffers, SETTINGS, None, [])
    torch.testing.assert_close(weights[0], twins[0], rtol=1e-6, atol=5e-7)
    torch.testing.assert_close(buffers[0], twin_buffers[0], rtol=1e-6, atol=5e-7)
    assert buffers[0].stride() == weights[0].stride()


def test_lars_sees_a_gradient_that_torch_negates_when_it_is_read(device):
    from megabatch.kernels.lars import update

    weights = [torch.ones(6, 4, device=device)]
    twins = [weights[0].clone()]
    gradient = torch._neg_view(torch.ones(6, 4, device=device))  # as imag of a conjugate is
    update(weights, [gradient], [torch.zeros(6, 4, device=device)], SETTINGS, None, [])
    update_plain(twins, [gradient], [torch.zeros(6, 4, device=device)], SETTINGS, None, [])
    torch.testing.assert_close(weights[0], twins[0], rtol=1e-6, atol=5e-7)


MUON_RULES = [
    {}, {"nesterov": True}, {"maximize": True}, {"momentum": 0.0, "rate": 0.0},
    {"trust": None}, {"trust": None, "weight_decay": 0.1, "nesterov": True, "maximize": True},
]  # fmt: skip
MUON = MuonSettings(
    rate=72.0, momentum=0.9, weight_decay=0.0, trust=0.001, nesterov=False, maximize=False
)


def muon_case(device):
    """Wide, tall, of three widths, larger than a tile and not; nothing, and what began with it."""
    shapes = [
        (64, 3, 7, 7),
        (70, 130),
        (130, 70),
        (64, 64),
        (17, 31),
        (3, 64),
        (70, 9, 1, 1),
        (5, 6),
    ]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    weights[0] = weights[0].contiguous(memory_format=torch.channels_last)
    weights[4].zero_()
    return weights


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # a copy may be infinite
@pytest.mark.parametrize("changed", MUON_RULES)
@pytest.mark.parametrize("good", [None, True, False])
def test_muon(changed, good, device):
    from megabatch.kernels.muon import update

    torch.manual_seed(0)
    weights, settings = muon_case(device), MUON._replace(**changed)
    if settings.trust is None:
        weights, settings = lars_case(device), settings._replace(rate=0.3)
    buffers = [torch.randn_like(w) for w in weights]
    lengths = [w.norm() for w in weights] if settings.trust else []
    if lengths:
        lengths[1].fill_(torch.inf)
        buffers[3].zero_()
    copies = [(i, weights[i].to(torch.float16)) for i in (0, 1, 3, 4)]
    gate = None if good is None else torch.tensor(good, device=device)
    twins, twin_buffers = [w.clone() for w in weights], [b.clone() for b in buffers]
    for _ in range(2):
        gradients = [torch.randn_like(w) * (good is not False) for w in weights]
        gradients[3].zero_()
        gradients[2].mul_(1e-3)
        found = update(weights, gradients, buffers, lengths, settings, gate, copies)
        wanted = muon_plain(twins, gradients, twin_buffers, lengths, settings, gate, [])
    # On a GPU both compute in bf16, from numbers that may be rounded to it otherwise.
    near = 1e-5 if device == "cpu" or settings.trust is None else 2e-2
    for one, twin in zip(buffers, twin_buffers, strict=True):
        torch.testing.assert_close(one, twin, rtol=1e-6, atol=5e-7)
    for one, twin in zip(weights, twins, strict=True):
        close(one, twin, near)
    if good is False:
        assert all(torch.equal(one, twin) for one, twin in zip(weights, twins, strict=True))
    for i, copy in copies:
        assert torch.equal(copy, weights[i].half())
    for weight, length in zip(weights, lengths, strict=False):
        if good is not False and 0 < length < torch.inf and settings.rate:
            assert weight.norm().item() == pytest.approx(length.item(), rel=1e-6)
    assert (found is None) == (wanted is None)
    for one, other in zip(found or [], wanted or [], strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=0)


def test_muon_sees_small_gradients_and_takes_other_layouts(device):
    """Squares of the small ones are 0; a checkpoint's buffers may lie as they like."""
    from megabatch.kernels.muon import update

    torch.manual_seed(0)
    weights = [torch.randn(8, 3, 5, 5, device=device).contiguous(memory_format=torch.channels_last)]
    twins, lengths = [weights[0].clone()], [weights[0].norm()]
    gradients = [torch.randn(8, 3, 5, 5, device=device) * 1e-30]
    buffers = [torch.zeros(8, 3, 5, 5, device=device)]
    update(weights, gradients, buffers, lengths, MUON, None, [])
    scaled = [gradients[0].double() * 1e30]
    doubles, nothing = [twins[0].double()], [torch.zeros_like(scaled[0])]
    muon_plain(doubles, scaled, nothing, [lengths[0].double()], MUON, None, [])
    close(weights[0], doubles[0], 1e-5 if device == "cpu" else 1e-2)
    assert buffers[0].stride() == weights[0].stride()


@pytest.mark.parametrize("name", ["lars", "muon"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_of_a_net_that_was_half_goes_on_beside_full_weights(name, dtype, device):
    """Read as fp32 it would be other numbers, and end too soon."""
    plain, settings = {"lars": (update_plain, SETTINGS), "muon": (muon_plain, MUON)}[name]
    torch.manual_seed(0)
    weights, gradients = ([torch.randn(40, 40, device=device)] for _ in range(2))
    before = [torch.randn(40, 40, device=device).to(dtype)]
    lengths = [[w.norm().to(dtype) for w in weights]] if name == "muon" else []
    kernel = import_module(f"megabatch.kernels.{name}").update
    found = []
    for step in (kernel, plain):
        own, buffers = ([t.clone() for t in tensors] for tensors in (weights, before))
        if step is plain:
            buffers = [b.float() for b in buffers]
        step(own, gradients, buffers, *lengths, settings, None, [])
        found.append([*own, *buffers])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        close(one, other, 1e-5 if device == "cpu" or name == "lars" else 2e-2)


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_tables_are_made_on_the_host_whatever_device_a_caller_has_made_the_default(name, device):
    """From there they are sent through pinned memory."""
    kernel = import_module(f"megabatch.kernels.{name}").update
    settings = SETTINGS if name == "lars" else MUON
    weights = [torch.randn(43, 5, device=device)]  # of which no table is kept
    buffers, gradients = ([torch.randn_like(w) for w in weights] for _ in range(2))
    lengths = [[w.norm() for w in weights]] if name == "muon" else []
    before = weights[0].clone()
    torch.set_default_device("meta")
    try:
        kernel(weights, gradients, buffers, *lengths, settings, None, [])
    finally:
        torch.set_default_device(None)
    assert not torch.equal(weights[0], before)


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_a_graph_takes_the_plain_twin(name, device, monkeypatch):
    """It would be launched again with tables that are gone by then."""
    from megabatch.kernels import tables

    monkeypatch.setattr(tables, "_captured", lambda device: True)
    plain, settings = {"lars": (update_plain, SETTINGS), "muon": (muon_plain, MUON)}[name]
    kernel = import_module(f"megabatch.kernels.{name}").update
    monkeypatch.setattr(import_module(kernel.__module__), "table_of", None)
    weights, gradients, buffers = ([torch.randn(6, 4, device=device)] for _ in range(3))
    lengths = [[w.norm() for w in weights]] if name == "muon" else []
    found = []
    for step in (kernel, plain):
        own, held = ([t.clone() for t in tensors] for tensors in (weights, buffers))
        step(own, gradients, held, *lengths, settings, None, [])
        found.append([*own, *held])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("odd", ["vector", "half", "tensor rate", "nothing"])
def test_muon_leaves_to_its_twin_what_it_does_not_take(odd, device):
    from megabatch.kernels.muon import update

    torch.manual_seed(0)
    dtype = torch.float16 if odd == "half" else torch.float32
    shape = {"vector": (6,), "nothing": (0, 4)}.get(odd, (6, 4))
    weights = [
        torch.randn(6, 4, device=device).to(dtype),
        torch.randn(shape, device=device).to(dtype),
    ]
    rate = torch.tensor(72.0, device=device) if odd == "tensor rate" else 72.0
    settings = MUON._replace(rate=rate)
    lengths = [w.norm() for w in weights]
    twins = [w.clone() for w in weights]
    gradients = [torch.randn_like(w) for w in weights]
    for of in (weights, twins):
        step = update if of is weights else muon_plain
        step(of, gradients, [torch.zeros_like(w) for w in of], lengths, settings, None, [])
    assert all(torch.equal(one, twin) for one, twin in zip(weights, twins, strict=True))


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_a_step_runs_on_the_device_of_its_weights(name, device, monkeypatch):
    """Triton launches on the current one."""
    there = []

    @contextlib.contextmanager
    def device_of(tensor):
        there.append(tensor)
        yield
        there.pop()

    home = import_module(f"megabatch.kernels.{name}")
    monkeypatch.setattr(home, "update", lambda weights, *others: (there == weights, *others))
    monkeypatch.setattr(kernels, "lacking", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    weights = [torch.ones(2, device=device)]
    step = layerwise.kernel.__wrapped__(name)
    assert step(weights, "gradients") == (True, "gradients") and not there


@pytest.mark.parametrize("n,h,w,span,dtype", [
    (4, 16, 16, 2, torch.float32), (2, 15, 18, 2, torch.float32), (2, 12, 12, 1, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_fold(n, h, w, span, dtype, channels, device):
    from megabatch.kernels import fold
    from megabatch.kernels.batchnorm import affine_of_slots

    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    images = torch.randn(n, channels, h, w, device=device)
    weight = (torch.randn(64, channels, 7, 7, device=device) / 12).to(dtype)
    exact = [images.to(dtype).double(), weight.double().requires_grad_()]
    wanted = torch.nn.functional.conv2d(*exact, None, 2, 3)
    folded = fold.fold(images, dtype)
    out, slots, cut = fold.convolve(folded, fold.fold_weight(weight), span)
    close(out, wanted, tolerance)
    statistics = torch.empty(n // span, 128, device=device)
    one = torch.ones(64, device=device)
    affine_of_slots(slots, cut, one, one, 1e-5, statistics)
    t = wanted.detach().permute(0, 2, 3, 1).reshape(n // span, -1, 64)
    close(statistics, torch.cat([t.mean(1), t.var(1)], 1), 10 * tolerance)
    d_y = drawn(wanted.shape, dtype, device)
    (right,) = torch.autograd.grad(wanted, exact[1], d_y.double())
    found = fold.unfold_weight(fold.weight_gradient(folded, d_y), channels)
    close(found, right, 1e-4 if dtype == torch.float32 else 3e-3)


@pytest.mark.usefixtures("few_programs")
def test_fold_in_several_tiles(device):
    test_fold(4, 15, 18, 2, torch.float32, 3, device)
