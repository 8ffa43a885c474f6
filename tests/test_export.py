"""Leaving with the model: what is exported, and predicted, is what the run evaluates."""

import contextlib
import hashlib
import json
import math
import shutil
from dataclasses import replace

import numpy
import onnxruntime
import pytest
import torch
from commands import last_json, megabatch
from PIL import Image
from run_folders import real_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits, load_sample_images

import megabatch as mb
from megabatch.data.opening import digits
from megabatch.data.source import hold_out
from megabatch.errors import UserError
from megabatch.runs import checkpoint, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One on digits that keeps an average, one of a ResNet on photographs' parts."""
    top = tmp_path_factory.mktemp("export")
    real_run(top / "digits", ema=0.9)
    photographs(top / "set")
    config = mb.recipes.named("digits", epochs=1, batch=16)
    data = replace(config.data, path=str(top / "set"), size=32, channels=3)
    config = replace(config, model="resnet18", data=data)
    cluster = mb.Cluster.from_env(device="cpu")
    mb.train(config, cluster=cluster, out=top / "photographs", quiet=True)
    return top


def photographs(root):
    """Parts of scikit-learn's two photographs: real pixels, real JPEGs and PNGs."""
    names = ("temple", "flower <b>")
    for name, image in zip(names, load_sample_images().images, strict=True):
        for number in range(24):
            part = "train" if number < 16 else "val"
            (root / part / name).mkdir(parents=True, exist_ok=True)
            top, left = 14 * number, 20 * number
            tile = Image.fromarray(image[top : top + 90, left : left + 120])
            tile.save(root / part / name / f"{number:02}.{'png' if number % 5 == 0 else 'jpg'}")
    return root


def validation_digits():
    config = mb.recipes.named("digits")
    return hold_out(digits(config.data), config.data.val_share)[1]


def as_the_run_sees(run, pixels, averaged):
    """The reference, by the trainer's own parts: its logits."""
    from megabatch.data.augment import normalise
    from megabatch.parts import assemble, prepared

    config = mb.Config.read(run / "config.json")
    cluster = mb.Cluster.from_env(device="cpu")
    classes = 10 if config.data.path == "" else 2
    scale = ((0.5,), (0.25,)) if classes == 10 else ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = normalise(pixels, *scale, torch.float32)
    found = checkpoint.newest(run / "checkpoints")
    with contextlib.ExitStack() as ending:
        net = ending.enter_context(prepared(config, cluster, classes))
        parts = ending.enter_context(assemble(config, cluster, net))
        checkpoint.load_weights(found, parts.net)
        parts.load(checkpoint.load_extra(found))
        parts.net.eval()
        if averaged:
            ending.enter_context(parts.average.in_place())
        with torch.no_grad():
            return parts.net(images)


def test_digits_as_the_run_sees_them(runs):
    val = validation_digits()
    pixels, labels = val.read(torch.arange(len(val)), None)
    net = trained.load(runs / "digits")
    assert net.averaged and net.classes == list("0123456789")
    logits = net.logits(pixels)
    torch.testing.assert_close(logits, as_the_run_sees(runs / "digits", pixels, averaged=True))
    # The weights themselves give other outputs: it is the averages that were taken.
    plain = as_the_run_sees(runs / "digits", pixels, averaged=False)
    assert (logits - plain).abs().max() > 0.01
    right = (logits.argmax(1) == labels).double().mean().item()
    summary = json.loads((runs / "digits" / "summary.json").read_text())
    assert right == pytest.approx(summary["top1"], abs=0.003)


def test_predictions_of_files_are_the_runs_evaluation(runs):
    """Each validation image by its file: as many are right as evaluation says."""
    images = sorted((runs / "set" / "val").rglob("*.*"))
    told = last_json(megabatch("predict", runs / "photographs", *images, "--json"))
    right = [
        image["top"][0]["class"] == path.parent.name
        for image, path in zip(told["images"], images, strict=True)
    ]
    summary = json.loads((runs / "photographs" / "summary.json").read_text())
    assert sum(right) / len(right) == summary["top1"]
    assert [image["image"] for image in told["images"]] == [str(path) for path in images]
    for image in told["images"]:
        shares = [guess["probability"] for guess in image["top"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)


def test_a_digit_as_a_picture(runs, tmp_path):
    bunch = load_digits()
    paths = []
    for index in range(40):
        pixels = (bunch.images[index] * 16).clip(0, 255).astype(numpy.uint8)
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(pixels).save(paths[-1])
    net = trained.load(runs / "digits")
    whole = digits(mb.recipes.named("digits").data).images[:40]
    assert torch.equal(net.read(paths), whole)


@pytest.mark.parametrize("run", ["digits", "photographs"])
def test_onnx_gives_the_runs_outputs_on_real_images(runs, tmp_path, run):
    out = tmp_path / "net.onnx"
    told = last_json(megabatch("export", runs / run, "--to", "onnx", "--out", out, "--json"))
    assert told["difference"] < 1e-5 and told["averaged"] == (run == "digits")
    net = trained.load(runs / run)
    if run == "digits":
        pixels = validation_digits().read(torch.arange(50), None)[0]
    else:
        pixels = net.read(sorted((runs / "set" / "val").rglob("*.*")))
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == ["images"]
    for n in (1, 2, 7):  # any number of images
        (found,) = session.run(["logits"], {"images": pixels[:n].float().numpy() / 255})
        reference = as_the_run_sees(runs / run, pixels[:n], net.averaged).numpy()
        numpy.testing.assert_allclose(found, reference, rtol=1e-3, atol=1e-4)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == net.classes


def test_safetensors_hold_weights_and_words(runs, tmp_path):
    out = tmp_path / "net.safetensors"
    last_json(megabatch("export", runs / "photographs", "--out", out, "--json"))
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["flower <b>", "temple"]
    assert about["model"] == "resnet18" and json.loads(about["mean"]) == [0.485, 0.456, 0.406]
    saved = load_file(checkpoint.newest(runs / "photographs" / "checkpoints") / "model.safetensors")
    written = load_file(out)
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)
    # As anyone's file: what the umask gives.
    plain = tmp_path / "plain"
    plain.touch()
    assert out.stat().st_mode == plain.stat().st_mode


def torchvision_resnet18(classes):
    """Names and shapes of torchvision.models.resnet18(num_classes=classes).state_dict(), by the
    rules of its source."""
    found = {}

    def norm(name, n):
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = (n,)
        found[f"{name}.num_batches_tracked"] = ()

    found["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            at = f"layer{stage}.{block}"
            found[f"{at}.conv1.weight"] = (width, inputs, 3, 3)
            norm(f"{at}.bn1", width)
            found[f"{at}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{at}.bn2", width)
            if block == 0 and stage > 1:
                found[f"{at}.downsample.0.weight"] = (width, inputs, 1, 1)
                norm(f"{at}.downsample.1", width)
            inputs = width
    return found | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def test_torchvisions_names_and_shapes(runs, tmp_path):
    out = tmp_path / "net.pth"
    last_json(
        megabatch("export", runs / "photographs", "--to", "torchvision", "--out", out, "--json")
    )
    weights = torch.load(out, weights_only=True)
    assert {n: tuple(t.shape) for n, t in weights.items()} == torchvision_resnet18(2)


def test_names_of_classes(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "photographs", run)
    assert trained.load(run).classes == ["flower <b>", "temple"]  # from the data
    (run / "classes.json").write_text('["rose", "shrine"]')
    assert trained.load(run).classes == ["rose", "shrine"]
    (run / "classes.json").write_text('["rose"]')  # of another number: not these
    assert trained.load(run).classes == ["0", "1"]
    (run / "classes.json").write_text('{"rose": 1}')
    with pytest.raises(UserError, match="is not a list of names"):
        trained.load(run)
    (run / "classes.json").unlink()
    config = json.loads((run / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "moved")
    (run / "config.json").write_text(json.dumps(config))
    found = trained.load(run)
    assert found.classes == ["0", "1"] and not found.named


def test_bad_images_are_named_and_the_others_told(runs, tmp_path):
    good = sorted((runs / "set" / "val").rglob("*.jpg"))[0]
    torn, text = tmp_path / "torn.jpg", tmp_path / "text.png"
    torn.write_bytes(good.read_bytes()[:200])
    text.write_text("no picture")
    told = last_json(
        megabatch("predict", runs / "photographs", torn, good, text, "--json"), status=1
    )
    assert ["error" in image for image in told["images"]] == [True, False, True]


def test_a_net_that_says_no_numbers_predicts_nothing(runs, tmp_path):
    run, image = tmp_path / "run", sorted((runs / "set" / "val").rglob("*.jpg"))[0]
    shutil.copytree(runs / "photographs", run)
    (saved,) = (run / "checkpoints").iterdir()
    weights = load_file(saved / checkpoint.WEIGHTS)
    next(weight for name, weight in weights.items() if name.endswith("bias")).fill_(math.nan)
    save_file(weights, saved / checkpoint.WEIGHTS)
    written = (saved / checkpoint.WEIGHTS).read_bytes()
    entries = json.loads((saved / "manifest.json").read_bytes())["files"]
    digest = hashlib.sha256(written).hexdigest()
    entries[checkpoint.WEIGHTS] = {"nbytes": len(written), "sha256": digest}
    (saved / "manifest.json").write_bytes(checkpoint._manifest(entries))
    (told,) = last_json(megabatch("predict", run, image, "--json"), status=1)["images"]
    assert told == {"image": str(image), "error": f"what the net says of {image} is no number"}


def test_mistakes_are_one_sentence(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((runs / "digits" / "config.json").read_text())
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"model": "small", "nonsense": 1}')
    for arguments, sentence in (
        (["export", tmp_path / "none"], "is not the folder of a run"),
        (["export", empty], "has no good checkpoint: let it train on, by --resume"),
        (["export", odd], "is not the config of a run"),
        (["export", runs / "digits", "--to", "torchvision"], "torchvision has no net like small"),
        (["export", runs / "digits", "--to", "onnx", "--out", "net.bin"], "ends with .onnx"),
        (["export", runs / "digits", "--to", "coreml"], "there are safetensors, torchvision, onnx"),
        (["predict", runs / "digits"], "predict needs an image"),
        (["predict", runs / "digits", "none.png"], "there is no image file none.png"),
        (["predict", runs / "digits", empty], "is a folder: name image files"),
    ):
        result = megabatch(*arguments, cwd=tmp_path)
        assert result.returncode == 2 and sentence in result.stderr, (arguments, result.stderr)
        assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "odd"]
