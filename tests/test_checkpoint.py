"""Checkpoints: all state, bit for bit; nothing half written is ever taken for whole."""

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass, replace

import pytest
import torch
from pictures import folder
from test_train import CONFIG
from torch import nn

from megabatch import training
from megabatch.config import Config, Data
from megabatch.errors import UserError
from megabatch.launch import run_local
from megabatch.optim import LARS, parameter_groups
from megabatch.runs import checkpoint
from megabatch.training import train

DETERMINISTIC = replace(CONFIG, deterministic=True, save_every=0.25)


@dataclass
class Held:
    """What a run would have saved: nothing beyond weights and the optimizer's state."""

    net: nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self):
        return {}

    def load(self, tensors):
        assert tensors == {}


def trained(steps, net=None, optimizer=None):
    if net is None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = LARS(parameter_groups(net, 1e-4), lr=0.5, momentum_correction=True)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.param_groups[0]["lr"] = 0.5 + step / 10
        net(torch.randn(16, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def test_five_steps_saved_and_five_more_are_ten(tmp_path):
    whole, _ = trained(range(10))
    net, optimizer = trained(range(5))
    state = {"seen": 80, "steps": 5, "evaluation": {"loss": float("nan")}}
    path = checkpoint.save(tmp_path, Held(net, optimizer), state, keep=2)
    net, optimizer = trained([])
    found = checkpoint.load(path, Held(net, optimizer))
    assert (found["seen"], found["steps"]) == (80, 5)
    net, optimizer = trained(range(5, 10), net, optimizer)
    assert checkpoint.weights_sha256(net) == checkpoint.weights_sha256(whole)


def test_the_newest_good_one_is_taken(tmp_path, capsys):
    net, optimizer = trained(range(1))
    for seen in (10, 20, 30, 40):
        checkpoint.save(tmp_path, Held(net, optimizer), {"seen": seen}, keep=3)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        f"seen-{seen:012d}" for seen in (20, 30, 40)
    ]
    newest = checkpoint.newest(tmp_path)
    assert checkpoint.seen(newest) == 40
    damaged = newest / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert checkpoint.seen(checkpoint.newest(tmp_path)) == 30
    assert "optimizer.safetensors does not agree" in capsys.readouterr().err
    (tmp_path / f"seen-{30:012d}" / "state.json").write_text("{")
    assert checkpoint.seen(checkpoint.newest(tmp_path)) == 20
    shutil.rmtree(tmp_path / f"seen-{20:012d}")
    assert checkpoint.newest(tmp_path) is None


def test_a_save_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch):
    net, optimizer = trained(range(1))
    checkpoint.save(tmp_path, Held(net, optimizer), {"seen": 10}, keep=1)
    calls = []

    def full(*arguments):
        calls.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, Held(net, optimizer), {"seen": 20}, keep=1)
    monkeypatch.undo()
    assert calls
    assert checkpoint.seen(checkpoint.newest(tmp_path)) == 10
    checkpoint.save(tmp_path, Held(net, optimizer), {"seen": 20}, keep=1)
    assert checkpoint.seen(checkpoint.newest(tmp_path)) == 20
    assert len(list(tmp_path.iterdir())) == 1


def test_the_fingerprint_sees_parameters_buffers_and_names():
    net, _ = trained([])
    before = checkpoint.weights_sha256(net)
    with torch.no_grad():
        net[1].running_mean[0] += 1e-7
    assert checkpoint.weights_sha256(net) != before


@pytest.fixture(scope="module")
def whole():
    return train(DETERMINISTIC, quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that kept all its checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(replace(DETERMINISTIC, keep=100, save_every=0.05), out=out, quiet=True)
    return out


def train_quietly(config, out):
    return train(config, out=out, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("world", "shares"), [(1, [0, 0.5]), (3, [0.3, 0.9]), (4, [0.1, 0.6])], ids=str
)
def test_resuming_anywhere_on_any_number_of_workers_is_the_uninterrupted_run(
    whole, finished, tmp_path, world, shares
):
    saved = sorted((finished / "checkpoints").iterdir())
    assert len(saved) > 15  # every step: inside epochs, on both sides of the batch's switches
    for place in (int(share * len(saved)) for share in shares):
        out = tmp_path / str(place)
        shutil.copytree(finished, out)
        for later in saved[place + 1 :]:
            shutil.rmtree(out / "checkpoints" / later.name)
        arguments = (replace(DETERMINISTIC, keep=100, save_every=0), out)
        summary = (
            train_quietly(*arguments) if world == 1 else run_local(world, train_quietly, *arguments)
        )
        assert summary.weights_sha256 == whole.weights_sha256
        assert (summary.steps, summary.seen) == (whole.steps, whole.seen)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        assert steps == list(range(whole.steps))  # none twice, none missing


def test_resuming_a_finished_run_changes_nothing(whole, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    summary = train_quietly(DETERMINISTIC, out)
    assert summary.weights_sha256 == whole.weights_sha256
    assert summary.top1 == whole.top1


def test_a_run_is_not_overwritten_nor_resumed_as_another(finished):
    with pytest.raises(UserError, match="holds a run already"):
        train(DETERMINISTIC, out=finished, quiet=True)
    with pytest.raises(UserError, match=r"was begun with batch 80 but 96 is asked for"):
        train(replace(DETERMINISTIC, batch=96), out=finished, resume=True, quiet=True)


def test_resuming_where_nothing_is_yet_begins(tmp_path):
    config = replace(DETERMINISTIC, epochs=0.1, lr=replace(CONFIG.lr, warmup=0), stages=())
    assert train(config, out=tmp_path / "new", resume=True, quiet=True).steps == 2


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_with_the_images_it_began_with(world, tmp_path):
    """Their number makes their order and the run's length; the names of the classes, their
    labels."""
    images, out = folder(tmp_path / "images", each=6), tmp_path / "run"
    data = Data(path=str(images), channels=3, size=16, threads=1)
    config = Config(model="small", epochs=1, batch=6, micro=3, span=3, data=data)
    config = replace(config, lr=replace(config.lr, warmup=0))

    def resumed():
        return (
            train_quietly(config, out) if world == 1 else run_local(2, train_quietly, config, out)
        )

    def kept():
        return {path: path.read_bytes() for path in out.rglob("*") if path.suffix == ".json"}

    whole = resumed()
    before = kept()
    shutil.copy(images / "train/ant/0.JPEG", images / "train/ant/new.JPEG")
    with pytest.raises(UserError, match="begun with 18 images to train on, and there are 19 now"):
        resumed()
    (images / "train/ant/new.JPEG").unlink()
    for part in ("train", "val"):
        (images / part / "ant").rename(images / part / "wasp")
    words = rf"3 classes \(bee, cat, wasp\), but {out} knows 3 classes \(ant, bee, cat\)"
    with pytest.raises(UserError, match=words):
        resumed()
    assert {path for path, text in kept().items() if text != before[path]} <= {
        out / "environment.json"
    }
    shutil.rmtree(out / "checkpoints")  # nothing of what it learnt is left: they may be others
    assert resumed().steps == whole.steps
    assert json.loads((out / "classes.json").read_text()) == ["bee", "cat", "wasp"]


def test_a_stop_in_the_last_steps_leaves_the_evaluation_to_the_resumed_run(
    tmp_path, monkeypatch, capfd
):
    config = replace(DETERMINISTIC, eval_every=0, save_every=0)
    whole = train(config, out=tmp_path / "whole", quiet=True)
    steps, real = [], training.train_step

    def told_to_stop(*arguments, **how):
        steps.append(len(steps))
        if len(steps) == whole.steps - 1:  # heard of a step later: after the last
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **how)

    monkeypatch.setattr(training, "train_step", told_to_stop)
    stopped = train(config, out=tmp_path / "run", quiet=True)
    assert (stopped.ended, stopped.steps) == ("stopped", whole.steps)
    resumed = train(config, out=tmp_path / "run", resume=True)
    assert (resumed.ended, len(steps)) == ("finished", whole.steps)
    (after,) = re.findall(r"loss [\d.]+  after ([\d.]+) s", capfd.readouterr().err)
    # To a tenth, what the whole run has taken, and not since it was resumed.
    assert stopped.seconds <= float(after) + 0.05 <= resumed.seconds + 0.1
    assert (resumed.top1, resumed.loss) == (whole.top1, whole.loss)
    assert resumed.weights_sha256 == whole.weights_sha256


def test_damaged_newer_ones_do_not_push_out_what_is_written(tmp_path):
    net, optimizer = trained(range(1))
    held = Held(net, optimizer)
    for seen in (100, 200, 300):
        checkpoint.save(tmp_path, held, {"seen": seen, "steps": 1}, keep=3)
    for seen in (200, 300):
        (tmp_path / f"seen-{seen:012d}" / checkpoint.WEIGHTS).write_bytes(b"")
    path = checkpoint.save(tmp_path, held, {"seen": 150, "steps": 1}, keep=1)
    assert checkpoint.newest(tmp_path) == path
    assert not (tmp_path / f"seen-{100:012d}").exists()


@pytest.mark.parametrize("name", ["none", "another"])
def test_a_restart_of_torchruns_does_not_go_on_with_somebody_elses_run(tmp_path, monkeypatch, name):
    train(DETERMINISTIC, out=tmp_path, quiet=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="holds a run already"):
        train(DETERMINISTIC, out=tmp_path, quiet=True)
