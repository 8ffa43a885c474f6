"""Loggers watch a run and cannot change it; ours are TensorBoard's, JSON lines and MLPerf's."""

import importlib
import json
import math
import re
import sys
import threading
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_train import CONFIG

from megabatch.cli import main
from megabatch.errors import RunFailed, UserError
from megabatch.models.small import SmallResNet, small
from megabatch.runs.loggers import Logger, TensorBoard
from megabatch.runs.mlperf import MLPerf
from megabatch.training import train

CONFIG = replace(CONFIG, epochs=2, eval_every=1, stages=(), deterministic=True)
DIGITS = CONFIG.data
CONFIG = replace(
    CONFIG,
    lr=replace(CONFIG.lr, warmup=0.5),
    data=replace(CONFIG.data, source="synthetic", images=300),
)


class Notes:
    def __init__(self):
        self.about, self.records, self.summary, self.ends = None, [], None, 0

    def begin(self, about):
        self.about = about

    def write(self, kind, record):
        self.records.append((kind, record))

    def end(self, summary):
        self.summary, self.ends = summary, self.ends + 1


class Meddler(Notes):
    """Changes what it can reach, and everything a run might draw from."""

    def begin(self, about):
        about["config"]["seed"] = 7
        torch.manual_seed(7)

    def write(self, kind, record):
        super().write(kind, record)
        torch.manual_seed(7)
        with pytest.raises(TypeError):
            record["loss"] = 0.0


class Broken(Notes):
    def write(self, kind, record):
        super().write(kind, record)
        raise ValueError("no\nnetwork")


@pytest.fixture(scope="module")
def plain():
    return train(CONFIG, quiet=True)


def test_a_logger_hears_all_of_a_run(tmp_path, plain):
    notes: Logger = Notes()
    summary = train(CONFIG, out=tmp_path / "run", quiet=True, loggers=[notes])
    assert notes.about["config"] == asdict(CONFIG)
    assert notes.about["out"] == str(tmp_path / "run")
    assert (notes.about["images"], notes.about["seen"], notes.about["world"]) == (240, 0, 1)
    assert notes.about["held_out"] == 60
    assert dict(notes.summary) == asdict(summary)
    kinds = [kind for kind, _ in notes.records]
    assert kinds.count("train") == summary.steps
    assert kinds.count("evaluating") == kinds.count("evaluation") == 2
    assert kinds.index("evaluating") < kinds.index("evaluation")
    assert all({"step", "seen"} <= record.keys() for _, record in notes.records)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    heard = [{"kind": kind, **r} for kind, r in notes.records if kind != "evaluating"]
    assert lines == json.loads(json.dumps(heard).replace("NaN", "null"))
    assert summary.weights_sha256 == plain.weights_sha256


def test_a_logger_changes_nothing(plain):
    one, two = Meddler(), Notes()
    assert train(CONFIG, quiet=True, loggers=[one, two]).weights_sha256 == plain.weights_sha256
    assert two.about["config"]["seed"] == CONFIG.seed
    assert len(one.records) == len(two.records)


def test_loggers_that_can_be_asked_for_once_hear_of_it_all():
    notes = Notes()
    train(CONFIG, quiet=True, loggers=(one for one in [notes]))
    assert notes.records and notes.ends == 1


def test_a_logger_that_fails_is_one_warning_and_the_run_goes_on(plain, capfd):
    broken, well = Broken(), Notes()
    summary = train(CONFIG, quiet=True, loggers=[broken, well])
    assert summary.weights_sha256 == plain.weights_sha256
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("the logger Broken failed in write (ValueError: no network): it hears") == 1
    assert (len(broken.records), broken.ends) == (1, 0)
    kinds = [kind for kind, _ in well.records]
    assert (kinds.count("train"), well.ends) == (summary.steps, 1)


def test_a_run_that_fails_ends_its_loggers(tmp_path):
    notes = Notes()
    net = small()
    # Where a rate that is too high loses its loss, if it does, depends on the chip.
    torch.nn.init.constant_(list(net.parameters())[-1], math.nan)
    with pytest.raises(RunFailed, match="loss"):
        train(CONFIG, net, quiet=True, loggers=[notes])
    assert (notes.summary, notes.ends) == (None, 1)


class Overflowing(SmallResNet):
    """Outside of training it puts out what is no number."""

    def forward(self, images):
        return super().forward(images) * (1.0 if self.training else math.nan)


def test_a_last_evaluation_without_a_finite_loss_is_told(capsys):
    net = Overflowing(num_classes=10, channels=1, depth=8, width=16)
    assert math.isnan(train(CONFIG, net).loss)
    lines = capsys.readouterr().err.split("\n")
    told = [at for at, line in enumerate(lines) if "no finite loss (nan)" in line]
    assert len(told) == 1 and "lower --lr.reference" in " ".join(lines[told[0] : told[0] + 4])


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_what_is_no_number_is_null_on_standard_output(
    verb, finished, tmp_path, monkeypatch, capsys
):
    """As in summary.json: JSON has no word for it."""
    found = {**json.loads((finished / "summary.json").read_text()), "loss": math.nan}
    module = importlib.import_module(f"megabatch.verbs.{verb}")
    monkeypatch.setattr(module, "on_workers", lambda *given, **more: (True, found))
    given = [str(finished)] if verb == "evaluate" else ["digits", "--out", str(tmp_path / "run")]
    assert main([verb, *given, "--json"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "NaN" not in last and json.loads(last)["loss"] is None


@pytest.mark.parametrize(
    ("logger", "says"),
    [(Notes, r"give Notes\(\)"), (object(), "the logger object has no method begin")],
)
def test_what_is_no_logger_is_refused(logger, says):
    with pytest.raises(UserError, match=says):
        train(CONFIG, quiet=True, loggers=[logger])


def test_one_logger_without_a_list_is_refused():
    with pytest.raises(UserError, match=r"^loggers is a Notes: give a list, loggers=\[...\]$"):
        train(CONFIG, quiet=True, loggers=Notes())


def test_tensorboard_has_sensible_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Of images that have something to learn in them: those of noise have no noise scale.
    summary = train(replace(CONFIG, data=DIGITS, epochs=1), out=tmp_path / "run", quiet=True)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {
        "train/loss", "train/top1", "val/loss", "val/top1", "val/top5", "schedule/rate",
        "schedule/batch", "schedule/momentum", "speed/images_per_second", "gradient/norm",
        "gradient/noise_scale",
    } <= tags  # fmt: skip
    assert any(tag.startswith("trust_ratio/") for tag in tags)
    assert {tag.partition("/")[0] for tag in tags} == {
        "train", "val", "schedule", "speed", "gradient", "precision", "waits", "trust_ratio",
        "weight_norm", "gradient_norm",
    }  # fmt: skip
    last = board.Scalars("val/top1")[-1]
    assert (last.step, last.value) == (summary.seen, pytest.approx(summary.top1))


class Wandb(types.ModuleType):
    """What the docs' logger calls, noted."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.code = [], None

    def init(self, **how):
        self.how = how
        return self

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self, exit_code):
        self.code = exit_code


def test_a_disk_that_fails_tensorboards_thread_is_raised_and_not_printed_as_well(tmp_path, capfd):
    hook = threading.excepthook
    board = TensorBoard(tmp_path / "board")
    board.write("evaluation", {"seen": 1, "top1": 0.5})
    (tmp_path / "board").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        try:
            board.write("evaluation", {"seen": 2, "top1": 0.6})
        finally:
            board.end(None)
    assert capfd.readouterr().err == ""
    assert threading.excepthook is hook


def test_the_logger_of_the_docs_is_ten_lines_and_works(monkeypatch, capfd):
    page = (Path(__file__).parents[1] / "docs" / "drop-in.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "wandb" in b)
    body = block[block.index("class ") : block.index("mb.train")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("megabatch.recipes.digits", lambda: CONFIG)
    exec(compile(block, "drop-in.md", "exec"), {})
    assert wandb.how["config"]["seed"] == CONFIG.seed
    assert wandb.code == 0
    assert {name for _, numbers in wandb.logged for name in numbers} >= {
        "train/loss", "evaluation/top1",
    }  # fmt: skip
    assert "failed" not in capfd.readouterr().err


# --- MLPerf ------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("target", "ended", "status"),
    [(None, "finished", "success"), (0.05, "target", "success"), (0.999, "finished", "aborted")],
)
def test_mlperfs_lines(tmp_path, target, ended, status):
    """The keys and pairs that the rules of the open division ask for, in their order."""
    path = tmp_path / "mlperf.log"
    summary = train(
        replace(CONFIG, target_accuracy=target), quiet=True, loggers=[MLPerf(path, "us")]
    )
    assert summary.ended == ended
    lines = lines_of(path)
    keys = [line["key"] for line in lines]
    for once in (
        "submission_benchmark", "submission_org", "submission_division", "submission_status",
        "submission_platform", "init_stop", "run_start", "run_stop", "train_samples",
        "eval_samples", "global_batch_size", "seed",
    ):  # fmt: skip
        assert keys.count(once) == 1, once
    order = [keys.index(key) for key in ("init_start", "init_stop", "run_start", "run_stop")]
    assert order == sorted(order) and keys[-1] == "run_stop"
    assert lines[-1]["metadata"]["status"] == status
    for pair in ("block", "eval"):
        assert keys.count(f"{pair}_start") == keys.count(f"{pair}_stop") > 0
    accuracies = [line for line in lines if line["key"] == "eval_accuracy"]
    assert accuracies[-1]["value"] == summary.top1
    assert accuracies[-1]["metadata"]["epoch_num"] == summary.epochs
    assert [line["time_ms"] for line in lines[1:]] == sorted(line["time_ms"] for line in lines[1:])
