"""Beginning from a file of weights, with the same head or another."""

import random
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train import CONFIG
from torch import nn

from megabatch import models
from megabatch.errors import UserError
from megabatch.finetune import load_initial
from megabatch.training import train


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(3)
    net = models.build("resnet18", 10)
    path = tmp_path / "weights.safetensors"
    save_file({name: t.contiguous() for name, t in net.state_dict().items()}, path)
    return path


def test_all_weights_come_over(weights):
    net = models.build("resnet18", 10)
    assert load_initial(net, str(weights)) == []
    found = load_file(weights)
    assert all(torch.equal(tensor, found[name]) for name, tensor in net.state_dict().items())


def test_a_head_of_other_classes_is_made_anew(weights):
    torch.manual_seed(0)
    net = models.build("resnet18", 7)
    head = net.fc.weight.detach().clone()
    assert load_initial(net, str(weights)) == ["fc.weight", "fc.bias"]
    assert torch.equal(net.fc.weight, head)
    assert torch.equal(net.conv1.weight, load_file(weights)["conv1.weight"])


def test_counters_of_batch_norm_may_be_missing(weights):
    found = {k: v for k, v in load_file(weights).items() if "num_batches" not in k}
    save_file(found, weights)
    assert load_initial(models.build("resnet18", 10), str(weights)) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.unlink(), "there is no file"),
        (lambda path: path.write_bytes(b"nothing"), "cannot be read as safetensors"),
        (lambda path: save_file({"other": torch.ones(1)}, path), "another model"),
    ],
)
def test_wrong_files_get_a_sentence(weights, make, says):
    make(weights)
    with pytest.raises(UserError, match=says):
        load_initial(models.build("resnet18", 10), str(weights))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_changed_files_of_torchs_are_read_or_get_a_sentence(tmp_path, zipped):
    """Its reader of plain weights raises whatever a changed byte leads it to."""
    chance, path = random.Random(7 + zipped), tmp_path / "weights.pth"
    net = models.build("small", 10, 1, 8)
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=zipped)
    whole, read = path.read_bytes(), []
    begins = whole.index(b"conv1.weight") - 60
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 4])):
            place = chance.randrange(begins, begins + 1500)  # of the names and shapes, mostly
            data[place : place + chance.choice([0, 1, 1, 3])] = bytes([chance.randrange(256)])
        path.write_bytes(data)
        try:
            load_initial(net, str(path))
            read.append(True)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            read.append(False)
    assert read.count(False) > 50


def test_weights_that_would_expand_are_not_read(tmp_path):
    net, path, small = models.build("small", 10, 1, 8), tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save({"x": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UserError, match="it claims to expand to more than its size"):
        load_initial(net, str(small))


def test_weights_that_are_no_plain_arrays_are_refused(tmp_path):
    net, path = models.build("small", 10, 1, 8), tmp_path / "a.pth"
    found = net.state_dict()
    name = next(iter(found))
    for odd in (found[name].to_sparse(), found[name].to(torch.complex64)):
        torch.save({**found, name: odd}, path)
        with pytest.raises(UserError, match="is no plain array of numbers"):
            load_initial(net, str(path))


def test_only_the_head_may_differ(weights):
    found = load_file(weights)
    found["layer1.0.conv1.weight"] = torch.ones(3, 3)
    save_file(found, weights)
    with pytest.raises(UserError, match="only the head may differ"):
        load_initial(models.build("resnet18", 10), str(weights))
    found = load_file(weights) | {"stray": torch.ones(1)}
    found["layer1.0.conv1.weight"] = models.build("resnet18", 10).layer1[0].conv1.weight.detach()
    save_file(found, weights)
    with pytest.raises(UserError, match="stray"):
        load_initial(models.build("resnet18", 10), str(weights))


def test_a_run_begins_from_the_file(tmp_path):
    config = replace(CONFIG, deterministic=True, epochs=0.2, stages=())
    config = replace(config, lr=replace(config.lr, warmup=0, reference=0.0, decay="constant"))
    net = models.build("small", 10, 1)
    with torch.no_grad():
        for p in net.parameters():
            nn.init.constant_(p, 0.125)
    path = tmp_path / "constant.safetensors"
    save_file({name: t.clone() for name, t in net.state_dict().items()}, path)
    out = tmp_path / "run"
    train(replace(config, init=str(path)), out=out, quiet=True)
    saved = load_file(next((out / "checkpoints").iterdir()) / "model.safetensors")
    assert all((saved[name] == 0.125).all() for name, _ in net.named_parameters())
