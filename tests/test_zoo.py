"""Models of timm and torchvision, where those import; names, groups, files of weights anywhere."""

import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ports import free_ports
from safetensors.torch import load_file, save_file
from test_train import CONFIG
from torch import nn

from megabatch import models
from megabatch.batchnorm import MovingAverages, SpanBatchNorm, use_spans
from megabatch.config import Config, Data
from megabatch.errors import UserError
from megabatch.evaluation import evaluate
from megabatch.finetune import load_initial
from megabatch.models import zoo
from megabatch.optim import parameter_groups
from megabatch.runs import trained
from megabatch.training import train

PICTURES = CONFIG.data.__class__(
    source="synthetic", size=32, channels=3, images=96, classes=4, val_share=0.34
)
SHORT = replace(
    CONFIG, epochs=1, batch=32, micro=16, span=16, stages=(), data=PICTURES, deterministic=True
)
SHORT = replace(SHORT, lr=replace(SHORT.lr, warmup=0))


def imported(library):
    """The library, or a skip: on some machines it is installed and does not import."""
    try:
        return __import__(library)
    except Exception as error:
        pytest.skip(f"{library} does not import here: {type(error).__name__}")


# --- without either ------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Libraries of one model each, as theirs are laid out; importing them fails, as it may."""
    for library, decorator in (("timm", "@register_model"), ("torchvision", "@register_model()")):
        folder = tmp_path / library / "models"
        folder.mkdir(parents=True)
        (tmp_path / library / "__init__.py").write_text("raise ImportError('made for others')")
        (folder / "nets.py").write_text(
            f"{decorator}\n@also(\n    1,\n)\ndef resnet50():\n    ...\n\ndef hidden():\n    ...\n"
        )
        (folder / "detection").mkdir()
        (folder / "detection" / "boxes.py").write_text(f"{decorator}\ndef boxes(x):\n    pass\n")
        monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    zoo.names_in.cache_clear()
    yield tmp_path
    zoo.names_in.cache_clear()
    for library in zoo.LIBRARIES:  # a test may have made it import; the real one comes back
        sys.modules.pop(library, None)


def test_names_are_read_without_importing(shelf):
    for library in zoo.LIBRARIES:
        assert zoo.names_in(library) == ("resnet50",)
        models.check(f"{library}:resnet50", 32)
        assert library not in sys.modules
    models.check("timm:resnet50.a1_in1k")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("timm:resnet5", r"timm has no model 'resnet5': did you mean timm:resnet50\?"),
        ("torchvision:resnet50.a1", "did you mean torchvision:resnet50"),
        ("timm:boxes", r"timm has no model 'boxes': timm.list_models\(\) lists its 1"),
        ("tim:resnet50", "no model is called 'tim:resnet50'"),
    ],
)
def test_a_wrong_name_gets_the_nearest(shelf, name, says):
    with pytest.raises(UserError, match=says):
        Config(model=name, data=Data(size=32, channels=3)).check()


def test_a_library_that_does_not_import_says_so(shelf):
    with pytest.raises(UserError, match=r"timm is installed but does not import \(made for others"):
        models.build("timm:resnet50", 10)


def test_a_library_that_is_not_there_says_so(monkeypatch):
    monkeypatch.setattr(zoo, "find_spec", lambda name: None)
    zoo.names_in.cache_clear()
    with pytest.raises(UserError, match="timm is not installed here: pip install timm"):
        models.check("timm:resnet50")


def test_bundled_models_come_without_weights():
    with pytest.raises(UserError, match="'small' comes without weights: give --init FILE"):
        replace(CONFIG, init="pretrained").check()


class NormAct(nn.BatchNorm2d):
    """A batch norm that has its activation inside, as timm's do."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.PReLU(channels)

    def forward(self, x):
        return self.act(super().forward(x))


def test_a_norm_with_an_activation_inside_keeps_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4))
    names = list(net.state_dict())
    images = torch.randn(8, 3, 6, 6)
    expected = net(images)
    undo = use_spans(net, 8)
    assert isinstance(net[1], SpanBatchNorm)
    assert list(net.state_dict()) == names
    torch.testing.assert_close(net(images), expected)
    assert MovingAverages(net).length == 8
    net.eval()
    inside = net(images)
    undo()
    assert type(net[1]) is NormAct
    torch.testing.assert_close(net.eval()(images), inside)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.words = nn.Embedding(7, 8)
        self.one = nn.Conv2d(8, 1, 3)
        self.norm = nn.LayerNorm([4, 8])
        self.attention = nn.MultiheadAttention(8, 2)

    def no_weight_decay(self):
        return {"table", "a name that is none"}


def test_groups_go_by_type_and_declaration():
    net = Tokens()
    adapted, plain = parameter_groups(net, 0.1)
    names = {p: name for name, p in net.named_parameters()}
    assert {names[p] for p in adapted["params"]} == {
        "weight", "one.weight", "attention.in_proj_weight", "attention.out_proj.weight",
    }  # fmt: skip
    assert len(adapted["params"]) + len(plain["params"]) == len(names)
    assert (plain["weight_decay"], plain["adapt"]) == (0.0, False)


@pytest.mark.parametrize("inside", [None, "state_dict", "model"])
def test_a_file_of_torchs_own_is_read(tmp_path, inside):
    torch.manual_seed(1)
    net, other = models.build("resnet18", 10), models.build("resnet18", 10)
    path = tmp_path / "weights.pth"
    weights = {f"module.{name}" if inside else name: t for name, t in net.state_dict().items()}
    torch.save({inside: weights, "epoch": 3} if inside else weights, path)
    assert load_initial(other, str(path)) == []
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in net.state_dict().items())


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


@pytest.mark.parametrize(
    ("value", "says"),
    [(Evil(), "cannot be read as weights of torch's"), ([1, 2], "holds no weights by name")],
)
def test_a_file_of_torchs_runs_no_code(tmp_path, monkeypatch, value, says):
    monkeypatch.chdir(tmp_path)
    torch.save(value, "weights.pth")
    with pytest.raises(UserError, match=says):
        load_initial(models.build("resnet18", 10), "weights.pth")
    assert not Path("evil").exists()


# --- with them -----------------------------------------------------------------------------------


def families(library):
    """One model of every family: the smallest name of every file that has some."""
    module = imported(library)
    if library == "timm":
        return sorted(
            min(found, key=lambda name: (len(name), name))
            for family in module.models.list_modules()
            if (found := module.list_models(module=family))
        )
    found = module.models.list_models(module.models)
    homes = {name: module.models.get_model_builder(name).__module__ for name in found}
    return [
        min((name for name in found if homes[name] == home), key=lambda name: (len(name), name))
        for home in sorted(set(homes.values()))
    ]


def built(name):
    """On the meta device where the library can, else really: some of its nets read numbers off
    tensors while they are made (RegNets their widths, Gemma's ViTs their drop rates). It must be
    the library that does, not we."""
    try:
        with torch.device("meta"):
            return zoo.build(name, 10)
    except RuntimeError as error:
        if "meta" not in str(error).lower() or asked_by(error) != name.partition(":")[0]:
            raise
    return zoo.build(name, 10)


def asked_by(error):
    """The package whose line led into torch, where the error was raised."""
    frames = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in frames]
    return next((package for package in reversed(packages) if package != "torch"), None)


@pytest.mark.parametrize(
    "asked", ["int(torch.linspace(0, 3, 3)[-1].item())", "len(torch.unique(torch.arange(3)))"]
)
def test_only_a_net_whose_library_asks_a_meta_tensor_for_a_number_is_built_really(
    asked, shelf, monkeypatch
):
    (shelf / "timm" / "__init__.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace\n"
        "models = SimpleNamespace(get_pretrained_cfg=lambda name: None)\n"
        "def create_model(name, **how):\n"
        f"    return torch.nn.Linear({asked}, 10)\n"
    )
    net = built("timm:resnet50")
    assert (net.in_features, net.weight.device.type) == (3, "cpu")
    monkeypatch.setattr(zoo, "build", lambda name, classes: torch.zeros(1).item())
    with pytest.raises(RuntimeError, match="meta"):
        built("timm:resnet50")


def test_a_connection_that_fails_is_one_sentence_with_the_way_out(shelf, tmp_path):
    (shelf / "timm" / "__init__.py").write_text(
        "import urllib.request\n"
        "from types import SimpleNamespace\n"
        "models = SimpleNamespace(get_pretrained_cfg=lambda name: None)\n"
        "def create_model(name, pretrained, **how):\n"
        "    import torch\n"
        "    if pretrained:\n"
        "        try:\n"
        "            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(\n"
        f"                'http://127.0.0.1:{free_ports(1)[0]}/weights')\n"
        "        except OSError as error:\n"
        "            raise ValueError('a paragraph about the hub and its cache') from error\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4))\n"
    )
    config = replace(SHORT, model="timm:resnet50", init="pretrained")
    with pytest.raises(UserError) as caught:
        train(config, out=tmp_path / "run", quiet=True)
    said = str(caught.value)
    assert said.startswith(
        "the weights of timm:resnet50 cannot be had (<urlopen error [Errno 111] "
    )
    assert said.endswith("or give a file, --init FILE") and len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", zoo.LIBRARIES)
def test_groups_cover_one_model_of_every_family(library):
    names = families(library)
    assert len(names) >= 15
    for name in names:
        net = built(f"{library}:{name}")
        groups = parameter_groups(net, 0.1)
        grouped = [p for group in groups for p in group["params"]]
        assert len(grouped) == len(set(grouped)) == len([*net.parameters()]), name
        assert set(grouped) == set(net.parameters()), name
        decaying = {p for group in groups if group["weight_decay"] for p in group["params"]}
        for layer in net.modules():
            for one, p in layer.named_parameters(recurse=False):
                if one == "bias" or isinstance(layer, nn.LayerNorm | nn.Embedding):
                    assert p not in decaying or p.ndim > 1, (name, type(layer))
                if isinstance(layer, nn.Linear | nn.Conv2d) and one == "weight":
                    declared = getattr(net, "no_weight_decay", set)
                    assert p in decaying or declared(), (name, type(layer))


@pytest.mark.parametrize("library", zoo.LIBRARIES)
def test_names_are_all_that_the_library_lists(library):
    module = imported(library)
    whole = module if library == "timm" else module.models
    listed = whole.list_models(*([] if library == "timm" else [whole]))
    assert set(zoo.names_in(library)) == set(listed)


@pytest.mark.parametrize(
    "name",
    ["timm:efficientnet_b0", "timm:test_vit", "torchvision:resnet18", "torchvision:regnet_y_400mf"],
)
def test_a_run_of_another_librarys_model(tmp_path, name):
    imported(name.partition(":")[0])
    summary = train(replace(SHORT, model=name), out=tmp_path / "run", quiet=True)
    assert summary.steps == 2
    found = evaluate(tmp_path / "run")
    assert (found["top1"], found["loss"]) == (summary.top1, summary.loss)
    loaded = trained.load(tmp_path / "run")
    assert loaded.logits(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 4)
    again = train(replace(SHORT, model=name), quiet=True)
    assert again.weights_sha256 == summary.weights_sha256


@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:test_vit2", "torchvision:squeezenet1_1"])
def test_a_file_of_the_librarys_weights_begins_a_run_with_another_head(tmp_path, name):
    imported(name.partition(":")[0])
    torch.manual_seed(5)
    whole = zoo.build(name, 1000, 3, 32)
    path = tmp_path / "weights.pth"
    torch.save(whole.state_dict(), path)
    still = replace(SHORT, model=name, init=str(path), epochs=0.2)
    still = replace(still, lr=replace(still.lr, reference=0.0, decay="constant"))
    net = zoo.build(name, 4, 3, 32)
    fresh = load_initial(net, str(path))
    assert fresh
    assert all(name.endswith(("weight", "bias")) for name in fresh)
    train(still, out=tmp_path / "run", quiet=True)
    saved = next((tmp_path / "run" / "checkpoints").iterdir()) / "model.safetensors"
    found = load_file(saved)
    for key, p in whole.named_parameters():
        assert key in fresh or torch.equal(found[key], p), key


def test_a_size_that_a_timm_model_does_not_take_is_refused_or_taken():
    imported("timm")
    net = zoo.build("timm:test_vit", 4, 3, 64)
    assert net(torch.zeros(2, 3, 64, 64)).shape == (2, 4)
    grey = zoo.build("timm:resnet10t", 4, 1, 32)
    assert grey(torch.zeros(2, 1, 32, 32)).shape == (2, 4)


def test_torchvision_takes_colour_only():
    imported("torchvision")
    with pytest.raises(UserError, match="takes images in colour: give --data"):
        zoo.build("torchvision:resnet18", 10, 1)


def begun_from(name, whole, out):
    """Train without moving, from the library's weights: what it began from is all there."""
    still = replace(SHORT, model=name, init="pretrained", epochs=0.2)
    still = replace(still, lr=replace(still.lr, reference=0.0, decay="constant"))
    train(still, out=out, quiet=True)
    found = load_file(next((out / "checkpoints").iterdir()) / "model.safetensors")
    same = [torch.equal(found[key], p) for key, p in whole.named_parameters()]
    assert sum(same) == len(same) - 2  # the head, made anew


def test_timms_weights_come_from_its_cache(tmp_path, monkeypatch):
    timm = imported("timm")
    whole = zoo.build("timm:resnet10t", None)
    home = timm.models.get_pretrained_cfg("resnet10t").hf_hub_id
    kept = tmp_path / f"models--{home.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(whole.state_dict(), kept / "snapshots" / ("0" * 40) / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    begun_from("timm:resnet10t", whole, tmp_path / "run")


def test_torchvisions_weights_come_from_its_cache_or_a_connection_that_fails(tmp_path, monkeypatch):
    torchvision = imported("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    config = replace(SHORT, model="torchvision:squeezenet1_1", init="pretrained")
    with pytest.raises(UserError, match=r"cannot be had .*refused.* --init FILE"):
        train(config, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    whole = zoo.build("torchvision:squeezenet1_1", None)
    url = torchvision.models.get_model_weights("squeezenet1_1").DEFAULT.url
    kept = tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2]
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole.state_dict(), kept)
    begun_from("torchvision:squeezenet1_1", whole, tmp_path / "run")


def test_weights_that_cannot_be_had_are_one_sentence(monkeypatch, tmp_path):
    """No network here: neither cache nor server has them."""
    imported("timm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = replace(SHORT, model="timm:resnet10t", init="pretrained")
    with pytest.raises(UserError, match="the weights of timm:resnet10t cannot be had"):
        train(config, quiet=True)
