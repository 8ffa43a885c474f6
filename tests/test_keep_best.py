"""--keep-best: the checkpoint of the best top-1 stays beside the last ones, and can be named."""

import json
from dataclasses import replace

import pytest
import torch
from test_train import CONFIG
from torch.utils.data import TensorDataset

from megabatch.cli import main
from megabatch.config import Data
from megabatch.errors import UserError
from megabatch.evaluation import evaluate
from megabatch.runs import checkpoint, trained
from megabatch.runs.folder import State
from megabatch.training import train

CONFIG = replace(
    CONFIG, epochs=4, eval_every=0.5, save_every=0.5, stages=(), deterministic=True, keep=1
)
# A rate that first learns and then ruins what it has learned.
CONFIG = replace(
    CONFIG,
    keep_best=True,
    lr=replace(
        CONFIG.lr, reference=2, per=None, warmup=3, start=0.1, ramp="constant", decay="constant"
    ),
    optimizer=replace(CONFIG.optimizer, trust=None, momentum=0.9),
)


@pytest.fixture(scope="module")
def ruined(tmp_path_factory):
    out = tmp_path_factory.mktemp("best") / "run"
    return out, train(CONFIG, out=out, quiet=True)


def test_the_best_stays_beside_the_last(ruined):
    out, summary = ruined
    assert summary.best_top1 > summary.top1  # or nothing is tested here
    assert evaluate(out)["top1"] == summary.top1
    assert evaluate(out, best=True)["top1"] == summary.best_top1
    assert len([*(out / "best").iterdir()]) == len([*(out / "checkpoints").iterdir()]) == 1
    assert trained.load(out, best=True).checkpoint.parent == out / "best"


def test_the_verbs_can_name_it(ruined, tmp_path, capfd):
    out, summary = ruined
    assert main(["evaluate", str(out), "--best", "--workers", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["top1"] == summary.best_top1
    for name, flags in (("last", []), ("best", ["--best"])):
        to = tmp_path / f"{name}.safetensors"
        assert main(["export", str(out), "--out", str(to), *flags]) == 0
    last, best = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("last", "best"))
    assert last != best


def test_a_run_that_kept_none_says_how_to(tmp_path):
    train(replace(CONFIG, epochs=0.5, keep_best=False, lr=FLAT), out=tmp_path, quiet=True)
    assert not (tmp_path / "best").exists()
    with pytest.raises(UserError, match="has no best checkpoint: --keep-best keeps one"):
        evaluate(tmp_path, best=True)


FLAT = replace(CONFIG.lr, warmup=0)


def test_the_first_evaluation_is_the_best_so_far_also_with_nothing_right():
    """A small held-out part may have no image right: --best is then still there to be named."""
    state, nothing = State(), {"top1": 0.0, "top5": 0.0, "loss": 2.3}
    assert state.beaten_by(nothing)
    state.evaluated(nothing)
    assert not state.beaten_by(nothing)
    assert state.beaten_by({**nothing, "top1": 0.1})


def test_a_run_with_nothing_right_keeps_a_best_one(tmp_path):
    """Pixels of one value and labels that no image of training has."""
    black = torch.zeros(64, 1, 8, 8)
    learnt, held_out = (TensorDataset(black, torch.full((64,), label)) for label in (0, 1))
    config = replace(CONFIG, epochs=2, eval_every=1, lr=FLAT)
    config = replace(config, lr=replace(FLAT, reference=0.1), data=Data(classes=2, size=8))
    summary = train(config, data=(learnt, held_out), out=tmp_path, quiet=True)
    assert summary.best_top1 == 0
    assert checkpoint.of_run(tmp_path, best=True).parent == tmp_path / "best"


def test_a_new_best_replaces_a_newer_one_of_another_branch(tmp_path):
    """A run that was killed and resumed from before its best has a file with more images seen."""

    class Nothing:
        def __init__(self):
            from torch import nn, optim

            self.net = nn.Linear(2, 2)
            self.optimizer = optim.SGD(self.net.parameters(), 0.1)

        def tensors(self):
            return {}

        def load(self, tensors):
            pass

    saved = Nothing()
    later = checkpoint.write_alone(tmp_path, checkpoint.Snapshot(saved), {"seen": 500})
    sooner = checkpoint.write_alone(tmp_path, checkpoint.Snapshot(saved), {"seen": 300})
    assert checkpoint.newest(tmp_path) == sooner and not later.exists()
