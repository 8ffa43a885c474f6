"""The models against what was published: sizes, names, shapes, work and the start of training."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from megabatch import models
from megabatch.models.alexnet import FoldedConv2d, LocalResponseNorm
from megabatch.models.resnet import BasicBlock, Bottleneck
from megabatch.models.small import small

RESNETS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032,
           "resnet101": 44_549_160, "resnet152": 60_192_808}  # fmt: skip
ALEXNET_BN_PLACES = ["pool1", "pool2", "relu3", "relu4"]


def on_meta(name, num_classes=1000, channels=3):
    """The model without its numbers: shapes and structure cost no memory."""
    with torch.device("meta"):
        return models.build(name, num_classes, channels)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model, images):
    """Multiplications in the convolutions and linear layers of a forward pass, for one image."""
    total = 0

    def count(layer, _, output):
        nonlocal total
        inputs_of_one_output = layer.weight[0].numel()
        total += output[0].numel() * inputs_of_one_output

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    model(images)
    return total


# --- by name


def test_every_name_builds_for_its_classes_and_channels():
    for name in models.names():
        model = on_meta(name, num_classes=7, channels=2)
        size = 227 if name.startswith("alexnet") else 32
        assert model(torch.empty(2, 2, size, size, device="meta")).shape == (2, 7), name


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(ValueError, match=r"no model is called 'resnet5' \(did you mean 'resnet50'"):
        models.build("resnet5", 10)


def test_a_name_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(ValueError) as error:
        models.build("transformer", 10)
    assert "did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in models.names())


def test_alexnet_refuses_any_other_image_size_before_it_is_built_and_after():
    with pytest.raises(ValueError, match="takes images of 227 px, not of 224 px"):
        models.build("alexnet_bn", 1000, image_size=224)
    with pytest.raises(ValueError, match="227 x 227 px, not 224 x 227"):
        on_meta("alexnet")(torch.empty(1, 3, 224, 227, device="meta"))
    models.check("alexnet", image_size=227)
    models.check("resnet50", image_size=224)


def test_names_and_their_check_do_not_import_torch():
    code = "import sys; from megabatch import models; models.names(); models.check('small', 8); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["resnet18", "small"])
def test_the_seed_decides_the_model(name):
    def build(seed):
        torch.manual_seed(seed)
        return models.build(name, 10).state_dict()

    first, same, other = build(1), build(1), build(2)
    assert first.keys() == same.keys()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


# --- ResNet


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_parameters(name):
    assert parameters(on_meta(name)) == RESNETS[name]


def test_resnet50_has_torchvisions_names_and_shapes_in_order():
    expected = {}

    def conv(name, outputs, inputs, side):
        expected[f"{name}.weight"] = (outputs, inputs, side, side)

    def norm(name, width):
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{name}.{tensor}"] = (width,)
        expected[f"{name}.num_batches_tracked"] = ()

    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    inputs = 64
    for layer, depth in enumerate((3, 4, 6, 3), start=1):
        width = 32 * 2**layer
        for block in range(depth):
            name = f"layer{layer}.{block}"
            for index, (outputs, fan, side) in enumerate(
                [(width, inputs, 1), (width, width, 3), (4 * width, width, 1)], start=1
            ):
                conv(f"{name}.conv{index}", outputs, fan, side)
                norm(f"{name}.bn{index}", outputs)
            if block == 0:
                conv(f"{name}.downsample.0", 4 * width, inputs, 1)
                norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    expected["fc.weight"], expected["fc.bias"] = (1000, 2048), (1000,)

    model = on_meta("resnet50")
    actual = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert list(actual.items()) == list(expected.items())
    assert len(list(model.parameters())) == 161


def test_the_stride_is_on_the_3x3_convolution():
    for name, strided in (("resnet50", "conv2"), ("resnet18", "conv1")):
        model = on_meta(name)
        strides = {
            path: layer.stride
            for path, layer in model.named_modules()
            if isinstance(layer, nn.Conv2d)
        }
        halving = {path for path, stride in strides.items() if stride == (2, 2)}
        assert halving == {"conv1"} | {
            f"layer{layer}.0.{conv}" for layer in (2, 3, 4) for conv in (strided, "downsample.0")
        }


def test_resnet50_does_the_published_work():
    # 4.09 G multiply-adds at 224 px; with the stride on the 1x1 instead it would be 3.86 G.
    work = multiply_adds(on_meta("resnet50"), torch.empty(1, 3, 224, 224, device="meta"))
    assert work == 4_089_184_256


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "small"])
def test_resnet_starts_as_goyal_has_it(name):
    torch.manual_seed(0)
    model = models.build(name, 100)
    zero_gammas = {
        f"{path}.bn{2 if isinstance(block, BasicBlock) else 3}"
        for path, block in model.named_modules()
        if isinstance(block, BasicBlock | Bottleneck)
    }
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            gamma = 0.0 if path in zero_gammas else 1.0
            assert torch.equal(layer.weight, torch.full_like(layer.weight, gamma)), path
            assert not layer.bias.any()
        elif isinstance(layer, nn.Conv2d):
            outputs, _, height, width = layer.weight.shape
            assert_deviation(layer.weight, (2 / (outputs * height * width)) ** 0.5)
        elif isinstance(layer, nn.Linear):
            assert_deviation(layer.weight, 0.01)
            assert not layer.bias.any()


def assert_deviation(weight, deviation):
    # The deviation of n normal numbers is itself off by a share of 1 / sqrt(2n); five of those.
    measured = weight.double().square().mean().sqrt().item()
    assert measured == pytest.approx(deviation, rel=5 / (2 * weight.numel()) ** 0.5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "small"])
def test_every_parameter_gets_a_gradient_once_gamma_is_not_zero(name):
    torch.manual_seed(0)
    model = models.build(name, 10)
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)

    def without_gradient():
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        return {path for path, tensor in model.named_parameters() if not tensor.grad.any()}

    # At the start a block is its shortcut: what lies before its last gamma waits for that gamma.
    closing = ("bn3." if name == "resnet50" else "bn2.", "downsample.")
    assert without_gradient() == {
        path
        for path, _ in model.named_parameters()
        if "layer" in path and not path.split(".", 2)[2].startswith(closing)
    }
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    assert without_gradient() == set()


# --- the small net


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 16, 28, 32])
def test_small_takes_small_images(size, channels):
    model = models.build("small", 10, channels, image_size=size)
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()


def test_small_is_small():
    digits = multiply_adds(small(), torch.randn(1, 1, 8, 8).expand(2, 1, 8, 8))
    stem, first = 64 * 9 * 1 * 16, 64 * 2 * 9 * 16 * 16
    second = 16 * (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32)
    third = 4 * (9 * 32 * 64 + 9 * 64 * 64 + 32 * 64)
    assert digits == stem + first + second + third + 64 * 10
    assert 500_000 < digits < 1_000_000


def test_small20_is_the_resnet20_of_the_paper_plus_its_projections():
    # He 2016 counts 0.27 M parameters with shortcuts that have none.
    model = models.build("small20", 10)
    projections = [path for path, _ in model.named_parameters() if "downsample" in path]
    assert len(projections) == 2 * 3
    assert round(parameters(model) / 1e6, 2) == 0.27
    weighted = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(weighted) - 2 == 20


@pytest.mark.parametrize("depth", [2, 9, 18])
def test_small_refuses_a_depth_it_cannot_have(depth):
    with pytest.raises(ValueError, match=rf"8, 14, 20, .*not {depth}"):
        small(depth=depth)


def test_small_is_as_wide_and_deep_as_told():
    model = small(num_classes=5, depth=14, width=8)
    assert [len(model.get_submodule(f"layer{stage}")) for stage in (1, 2, 3)] == [2, 2, 2]
    assert model.fc.weight.shape == (5, 32)


# --- AlexNet


def test_alexnet_parameters():
    model = on_meta("alexnet")
    assert parameters(model) == 60_965_224
    assert model.fc6.weight.shape == (4096, 9216)
    sizes = [round(parameters(layer) / 1e6, 2) for layer in (model.fc6, model.fc7, model.fc8)]
    assert sizes == [37.75, 16.78, 4.10]


def test_batch_norm_without_gamma_adds_no_parameter_and_jias_five_do():
    assert parameters(on_meta("alexnet_bn")) == 60_965_224
    assert parameters(on_meta("alexnet_bn_pool5")) == 60_965_224 + 2 * (96 + 256 + 384 + 384 + 256)


@pytest.mark.parametrize(
    ("name", "kind", "places"),
    [
        ("alexnet", LocalResponseNorm, ["relu1", "relu2"]),
        ("alexnet_bn", nn.BatchNorm2d, ALEXNET_BN_PLACES),
        ("alexnet_bn_pool5", nn.BatchNorm2d, [*ALEXNET_BN_PLACES, "pool5"]),
    ],
)
def test_where_alexnet_normalises(name, kind, places):
    layers = list(on_meta(name).named_children())
    found = [before for (before, _), (_, layer) in pairwise(layers) if isinstance(layer, kind)]
    assert found == places
    plain = [layer for layer, module in layers if not isinstance(module, kind)]
    assert " ".join(plain) == (
        "conv1 relu1 pool1 conv2 relu2 pool2 conv3 relu3 conv4 relu4 conv5 relu5 pool5 flatten "
        "fc6 relu6 drop6 fc7 relu7 drop7 fc8"
    )
    assert all(layer.eps == 1e-4 for _, layer in layers if isinstance(layer, nn.BatchNorm2d))
    assert all(layer.p == 0.5 for _, layer in layers if isinstance(layer, nn.Dropout))
    assert [layer.groups for _, layer in layers if isinstance(layer, nn.Conv2d)] == [1, 2, 1, 2, 2]


def test_alexnet_bn_starts_with_the_published_norms():
    """The LARS paper prints the norm of each layer's weight and bias at the first iteration."""
    torch.manual_seed(0)
    model = models.build("alexnet_bn", 1000)
    published = {
        "conv1": (1.86, 0.098), "conv2": (5.546, 0.16), "conv3": (9.40, 0.196),
        "conv4": (8.15, 0.196), "conv5": (6.65, 0.16),
        "fc6": (30.7, 6.4), "fc7": (20.5, 6.4), "fc8": (20.2, 0.316),
    }  # fmt: skip
    for name, (weight, bias) in published.items():
        layer = model.get_submodule(name)
        assert layer.weight.norm().item() == pytest.approx(weight, rel=0.01), name
        assert layer.bias.norm().item() == pytest.approx(bias, rel=0.01), name


def test_alexnet_starts_with_caffes_fillers_and_sees_caffes_pixels():
    torch.manual_seed(0)
    model = models.build("alexnet", 10)
    fillers = {
        "conv1": (0.01, 0.0), "conv2": (0.01, 0.1), "conv3": (0.01, 0.0), "conv4": (0.01, 0.1),
        "conv5": (0.01, 0.1), "fc6": (0.005, 0.1), "fc7": (0.005, 0.1), "fc8": (0.01, 0.0),
    }  # fmt: skip
    for name, (deviation, bias) in fillers.items():
        layer = model.get_submodule(name)
        assert_deviation(layer.weight, deviation)
        assert torch.equal(layer.bias, torch.full_like(layer.bias, bias)), name
    # Standardised images in, pixels of 0 to 255 less their mean at the first layer.
    seen = []
    model.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(1, 3, 227, 227)
    assert model(images).isfinite().all()
    assert torch.equal(seen[0], 57.6 * images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_local_response_norm_is_torchs(dtype):
    torch.manual_seed(0)
    x = (100 * torch.randn(2, 9, 3, 4, dtype=dtype)).requires_grad_()
    ours = LocalResponseNorm()(x)
    theirs = nn.LocalResponseNorm(size=5, alpha=1e-4, beta=0.75, k=1.0)(x)
    torch.testing.assert_close(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    (reference,) = torch.autograd.grad(theirs.square().sum(), x)
    torch.testing.assert_close(gradient, reference)


def test_local_response_norm_squares_what_fp16_cannot():
    x = torch.full((1, 5, 1, 1), 1000.0)
    half = LocalResponseNorm()(x.half())
    assert half.dtype == torch.float16
    assert torch.equal(half, LocalResponseNorm()(x).half())


@pytest.mark.parametrize(
    ("channels", "width", "stride", "sides"),
    [(3, 11, 4, (227, 227)), (1, 11, 4, (27, 30)), (3, 7, 2, (32, 37)), (2, 4, 4, (11, 8))],
)
def test_a_folded_convolution_is_the_convolution(channels, width, stride, sides):
    """To the rounding of float64, its gradients too; where sides are no multiple of the stride, or
    windows do not reach the edge."""
    torch.manual_seed(0)
    layer = FoldedConv2d(channels, 5, width, stride=stride, dtype=torch.float64)
    images = torch.randn(2, channels, *sides, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (nn.Conv2d.forward.__get__(layer), layer.folded):
        result = run(images)
        gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
        inputs = (images, layer.weight, layer.bias)
        found.append([result, *torch.autograd.grad(result, inputs, gradient)])
    for plain, folded in zip(*found, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-10, atol=1e-10)
    assert torch.equal(layer(images), found[0][0])  # a CPU keeps its bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_alexnets_first_convolution_is_folded():
    torch.manual_seed(0)
    layer = models.build("alexnet_bn", 10).conv1.cuda()
    images = torch.randn(4, 3, 227, 227, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        folded = layer(images)
        layer.fold = False
        torch.testing.assert_close(folded, layer(images), rtol=1e-4, atol=1e-4)
    assert folded.is_contiguous(memory_format=torch.channels_last)
