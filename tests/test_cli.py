"""The command end to end: each verb, exit statuses, one sentence for every mistake."""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pictures
import pytest
from commands import MEGABATCH, last_json, megabatch, megabatch_process
from dying import held
from PIL import Image
from studies import made_up_run
from waiting import PATIENCE_SECONDS

from megabatch import models, recipes
from megabatch.cli import VERBS, main
from megabatch.config import Config
from megabatch.verbs.parsing import parse
from megabatch.verbs.train import Launch, TrainFlags
from megabatch.verbs.train import read_flags as train_flags

QUICK = ["--epochs", "1", "--device", "cpu"]


def folder_of_images(root, classes=("cat", "dog"), parts=("train", "val"), count=16):
    """Real files: coloured JPEGs and PNGs of several sizes."""
    for part in parts:
        for label, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                colour = (200 * label + index, 100, 255 - 200 * label)
                picture = Image.new("RGB", (24 + index, 40 - index), colour)
                picture.save(root / part / name / f"{index}.{'jpg' if index % 2 else 'png'}")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    arguments = ["--workers", 2, "--out", out, "--deterministic", "--json"]
    return out, megabatch_process("train", "digits", *QUICK, *arguments)


def test_train_prints_one_json_object_last(finished):
    out, result = finished
    summary = last_json(result)
    assert {
        "top1", "top5", "loss", "steps", "seen", "epochs", "seconds", "images_per_second", "world",
        "weights_sha256", "out",
    } <= set(summary)  # fmt: skip
    assert summary["world"] == 2
    assert summary["out"] == str(out)
    line, _ = result.stdout.splitlines()
    assert line.startswith(f"finished: top-1 {summary['top1']:.2%}")


def test_progress_and_the_table_go_to_standard_error(finished):
    _, result = finished
    for words in (
        "micro-batches a worker",
        "warm-up steps",
        "peak rate",
        "reference * batch / per",
    ):
        assert words in result.stderr
    assert re.search(r"epoch +1\.\d\d +top-1", result.stderr)
    assert result.stderr.splitlines()[:3] == [
        "starting 2 workers: torch is loaded first",
        "reading the images: digits",
        "building the model: small",
    ]


def test_a_run_says_what_its_classes_and_workers_were(finished):
    out, _ = finished
    assert json.loads((out / "classes.json").read_text()) == list("0123456789")
    assert json.loads((out / "environment.json").read_text())["world"] == 2


def test_evaluate_finds_what_train_reported(finished):
    out, result = finished
    alone, on_three = (megabatch("evaluate", out, "--workers", n, "--json") for n in (1, 3))
    found, summary = last_json(alone), last_json(result)
    assert alone.stdout.splitlines()[0] == on_three.stdout.splitlines()[0]
    assert last_json(on_three) == {**found, "world": 3}
    assert alone.stdout.startswith(f"top-1 {found['top1']:.2%}, top-5 ")
    assert {k: found[k] for k in ("top1", "top5", "loss", "seen")} == {
        k: summary[k] for k in ("top1", "top5", "loss", "seen")
    }


def test_another_number_of_workers_has_the_same_weights(finished, tmp_path):
    alone = megabatch(
        "train", "digits", *QUICK, "--workers", 1, "--deterministic", "--json", cwd=tmp_path
    )
    assert last_json(alone)["weights_sha256"] == last_json(finished[1])["weights_sha256"]
    assert list((tmp_path / "runs").glob("digits-*/metrics.jsonl"))


TWO_EPOCHS = ["--epochs", "2", "--device", "cpu", "--deterministic", "--json"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    return last_json(megabatch("train", "digits", *TWO_EPOCHS, "--workers", 1, "--out", out))


STOPS = [
    (signal.SIGTERM, "command"),
    (signal.SIGINT, "worker"),
    *(
        pytest.param(number, target, marks=pytest.mark.systems)
        for number, target in (
            (signal.SIGTERM, "worker"),
            (signal.SIGINT, "command"),
            (signal.SIGUSR1, "command"),
            (signal.SIGUSR1, "worker"),
        )
    ),
]


@pytest.mark.parametrize(("number", "target"), STOPS)
def test_a_signal_leaves_a_checkpoint_and_the_rest_is_as_if_nothing_happened(
    uninterrupted, tmp_path, target, number
):
    line = ["train", "digits", *TWO_EPOCHS, "--out", str(tmp_path / "run")]
    on_three = [*MEGABATCH, *line, "--workers", "3"]
    with held(on_three, tmp_path / "run", 5, uninterrupted["steps"] - 5) as (command, workers):
        assert len(workers) == 3
        os.kill(command.pid if target == "command" else random.choice(workers), number)
    stdout, stderr = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 3, stderr
    stopped = json.loads(stdout.splitlines()[-1])
    assert stopped["ended"] == "stopped"
    assert "--resume" in stdout
    again = megabatch(*line, "--workers", 1, "--resume")
    resumed = last_json(again)
    assert "resumed at step" in again.stderr
    assert stopped["seen"] < resumed["seen"]
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]


@pytest.mark.parametrize("verb", ["", *VERBS, "train digits", "plan digits", "bench step"])
def test_help_begins_with_an_example_that_the_verb_understands(verb, capsys):
    with contextlib.suppress(SystemExit):
        main([*verb.split(), "--help"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first in ("example:", "examples:")
    for line in itertools.takewhile(str.strip, lines):
        assert line.startswith(f"  megabatch {verb.partition(' ')[0]}")
        words = line.split()[1:]
        unknown = set(re.findall(r"--[a-z.-]+", line)) - set(_flags(words, capsys))
        assert not unknown, (line, unknown)


def _flags(words, capsys):
    """The flags that the help of an example's verb lists."""
    depth = 2 if words[0] in ("train", "plan", "bench") and len(words) > 1 else 1
    with contextlib.suppress(SystemExit):
        main([*words[:depth], "--help"])
    return re.findall(r"--[a-z.-]+", capsys.readouterr().out)


def test_help_of_train_lists_recipes_and_models(capsys):
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*recipes.RECIPES, *models.names()))
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_while_workers_start_leaves_a_checkpoint(tmp_path, workers):
    command = subprocess.Popen(
        [*MEGABATCH, "train", "digits", "--workers", str(workers), "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stderr.readline().startswith(f"starting {workers} worker")
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does it: to everyone
    stdout, stderr = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 3, stderr
    assert stdout.startswith("stopped on request (--resume goes on)")
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert "Traceback" not in stderr


def test_a_folder_of_images(tmp_path):
    root = folder_of_images(tmp_path / "images")
    flags = ["--data.source", "folder", "--data.path", root, "--data.channels", 3]
    flags += ["--batch", 32, "--epochs", 4, "--data.size", 16, "--data.crop-area", 0.5, 1]
    summaries = [
        last_json(
            megabatch(
                "train", "digits", *flags, "--workers", world, "--deterministic", "--json",
                "--out", tmp_path / f"run-{world}",
            )
        )
        for world in (1, 2)
    ]  # fmt: skip
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


def broken(kind):
    def make(root):
        if kind == "missing":
            return root / "nowhere"
        folder_of_images(root)
        if kind == "classes differ":
            (root / "val" / "dog").rename(root / "val" / "wolf")
        if kind == "unreadable":
            (root / "train" / "dog" / "3.jpg").write_bytes(b"not a picture")
        if kind == "truncated":
            path = root / "train" / "dog" / "3.jpg"
            path.write_bytes(path.read_bytes()[:200])
        if kind == "empty":
            import shutil

            shutil.rmtree(root)
            (root / "train").mkdir(parents=True)
            (root / "val").mkdir()
        return root

    return make


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "nowhere: name a folder"),
        ("classes differ", "has a class wolf that"),
        ("unreadable", "has 1 unreadable image: train/dog/3.jpg"),
        ("truncated", "has 1 unreadable image: train/dog/3.jpg"),
        ("empty", "holds no images"),
    ],
)
def test_bad_images_get_one_sentence(tmp_path, kind, says):
    root = broken(kind)(tmp_path / "images")
    flags = ["--data.source", "folder", "--data.path", root, "--data.channels", 3]
    flags += ["--batch", 32, "--epochs", 2, "--workers", 2, "--out", tmp_path / "run"]
    mistaken(megabatch("train", "digits", *flags), says)


def mistaken(result, says):
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("megabatch: ")
    assert says in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "did you mean train?"),
        (["TRAIN"], "did you mean train?"),
        (["digits"], "digits is a recipe, megabatch train digits trains it"),
        (["help"], "did you mean --help?"),
        (["train"], "train needs a recipe"),
        (["train", "--epochs", "3", "digits"], "digits comes first, flags follow: megabatch train"),
        (["train", "digit"], "did you mean digits?"),
        (["train", "digits", "--batc", "32"], "did you mean --batch?"),
        (["train", "digits", "--nonsense"], "--nonsense"),
        (["train", "digits", "--epochs", "many"], "--epochs"),
        (["train", "digits", "--lr.decay", "fast"], "--lr.decay is fast: there are poly"),
        (["train", "digits", "--batch", "100"], "use 96 or 112"),
        (["train", "digits", "--micro", "24"], "not a multiple of span"),
        (["train", "digits", "--stages", "3"], "--stages"),
        (["train", "digits", "--workers", "0"], "--workers is 0; give 1 to"),
        (["train", "digits", "--workers", "100000000"], "--workers is 100000000; give 1 to"),
        (["train", "digits", "--epochs", "1e99"], "epochs is 1e+99; it must be above 0"),
        (["train", "digits", "--epochs", "nan"], "epochs is nan: give a finite number"),
        (["train", "digits", "--epochs", "inf"], "epochs is inf: give a finite number"),
        (["train", "digits", "--epochs"], "--epochs stands alone: it takes a number"),
        (["train", "digits", "--batch", "9" * 400], "batch is 999"),
        (["train", "mlperf", "--batch", "9" * 400], "batch is 999"),
        (["train", "digits", "--batch", "9" * 5000], "it takes a whole number"),
        (
            ["train", "digits", "--stages", "3:64:0.9:1"],
            "--stages is 3:64:0.9:1: it takes",
        ),
        (["train", "digits", "--grid", "1"], "--grid is 1: it takes 2 whole numbers"),
        (["train", "digits", "--name", "../x"], "cannot be a folder's"),
        (["train", "digits", "--model", "own Net"], "a model of your own comes from Python"),
        (["train", "digits", "--data.source", "own"], "a data set of your own comes from Python"),
        (
            ["study", "digits", "--batches", "64", "--data.source", "own"],
            "a data set of your own comes from Python",
        ),
        (["chaos", "digits", "--model", "own Net"], "a model of your own comes from Python"),
        (["train", "digits", "--plan", "nonesuch"], "there is no plan 'nonesuch'"),
        (["train", "digits", "--plan", "tours"], "did you mean torus?"),
        (["train", "digits", "--optimizer.name", "lamb"], "--optimizer.no-momentum-correction"),
        (["train", "digits", "hello"], "megabatch train digits has no place for hello"),
        (["train", "nowhere.json"], "the config nowhere.json cannot be read: No such file"),
        (["plan", "nowhere.json"], "the config nowhere.json cannot be read: No such file"),
        (["plan", "digits", "--epochs", "1e99"], "epochs is 1e+99"),
        (["train", "digits", "--resume"], "--resume needs --out"),
        (["train", "digits", "--model", "resnet5"], "did you mean 'resnet50'"),
        (["train", "digits", "--data.source", "folder"], "--data.path"),
        (["train", "digits", "--out", "/proc/nowhere", "--workers", "1"], "cannot be written"),
        (["train", "digits", "--out", "/proc/nowhere", "--workers", "2"], "cannot be written"),
        (["evaluate"], "evaluate needs RUN"),
        (["evaluate", "nowhere"], "nowhere is not the folder of a run: megabatch runs lists what"),
        (["bench", "nothing"], "there is no bench"),
        (["bench", "loader"], "bench loader needs --images: "),
        (["bench", "loader", "--images", "nowhere"], "there is no folder nowhere"),
        (["bench", "loader", "--images", ".", "--micro", "0"], "--micro is 0; give 1 or more"),
        (["bench", "loader", "--images", ".", "--threads", "-1"], "--threads is -1; give 1"),
        (["bench", "loader", "--images", ".", "--seconds", "nan"], "--seconds is nan"),
        (["bench", "sync", "--workers", "0"], "--workers is 0; give 1 to"),
        (["bench", "sync", "--repeats", "0"], "--repeats is 0; give 1 or more"),
        (["bench", "sync", "--sizes", "0"], "--sizes are bytes, 4 and more"),
        (["bench", "sync", "--seconds", "nan"], "--seconds is nan; give more than 0"),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(arguments, says, tmp_path):
    mistaken(megabatch(*arguments, cwd=tmp_path), says)


BEFORE = [
    (["train", "digits", "--plan", "nonesuch"], "there is no plan"),
    (["train", "digits", "--plan", "auto"], "plan auto needs machine.json"),
    (["train", "digits", "--data.path", "nowhere"], "there is no nowhere"),
    (["train", "digits", "--data.path", "no.arrow"], "there is no file no.arrow"),
    (["train", "digits", "--data.path", "file"], "file cannot be read as a pack"),
    (["train", "goyal2017"], "no images were named"),
    (["train", "digits", "--data.skip-bad", "3"], "data.skip_bad leaves"),
    (["train", "digits", "--init", "weights.pth"], "there is no file weights.pth"),
    (["train", "digits", "--device", "cuda"], "there is no GPU: use --device cpu"),
    (["train", "digits", "--grid", "3", "3"], "does not hold the 4 workers"),
    (["train", "digits", "--workers", "3,2", "--grid", "2", "2"], "does not hold the 3 work"),
    (["train", "digits", "--workers", "2,4", "--grid", "-2", "-2"], "does not hold the 2 work"),
    (["train", "goyal2017", "--hybrid.small", "ring"], "this run sums by plan three_phase: add"),
    (["train", "jia2018", "--plan", "ring", "--hybrid.threshold-mb", "1"], "by plan ring: add"),
    (["train", "digits", "--out", "study/64-s0"], "holds a run already"),
    (["train", "digits", "--out", "study/64-s0", "--resume"], "was begun with"),
    (["train", "digits", "--out", "study"], "is the folder of a study"),
    (["train", "digits", "--out", "file/run"], "file is not a folder"),
    (["study", "digits", "--batches", "64", "--data.path", "nowhere"], "there is no nowhere"),
    (["study", "digits", "--batches", "64", "--out", "study/64-s0"], "the folder of a run"),
    (["study", "digits", "--batches", "64", "--out", "file"], "file is not a folder"),
    (["study", "digits", "--batches", "64", "--out", "study"], "study/64-s0 was begun with"),
    (["train", "study"], "study is a folder, not a recipe: name the config.json of a run"),
    (["plan", "study"], "study is a folder, not a recipe"),
    (["evaluate", "study"], "study is a study of 1 run, not a run itself: name one of them"),
    (["evaluate", "study/64-s0/config.json"], "name the run's folder, study/64-s0"),
    (["export", "study"], "study/64-s0 say"),
    (["predict", "study", "file"], "study/64-s0 say"),
    (["watch", "study"], "study/64-s0 say"),
    (["watch", "study", "--wait"], "study/64-s0 say"),
    (["report", "study/64-s0", "study"], "study/64-s0 say"),
    # A variable of the shell that is not set.
    (["train", "digits", "--out", ""], "--out is empty: give it a value, or leave the flag away"),
    (["train", "digits", "--data.path="], "--data.path is empty: give it a value"),
    (["study", "digits", "--batches", "64", "--init", ""], "--init is empty"),
    (["evaluate", ""], "megabatch: evaluate was given an empty word: is a variable not set?"),
    (["evaluate", "torn"], "torn/config.json is not the config of a run: it is not JSON: Unter"),
    (["evaluate", "own model"], "own model was trained with model of its caller's: evaluate it fr"),
    (["evaluate", "own data"], "own data was trained with data of its caller's: evaluate it from"),
    (["report", "study/64-s0", "--out", ""], "--out is empty"),
    (["report", "study/64-s0", "--out", "/"], "/ cannot be written: name a file"),
    (["pack", "", "x.arrow"], "pack was given an empty word"),
    (["pack", "some.arrow", "x.arrow"], "some.arrow is a pack already: train on it"),
    (["completion", "bash", "zsh"], "completion writes one script: leave zsh away"),
    (["runs", "--sort", "x"], "--sort is no flag of megabatch runs: megabatch runs --help"),
    (["runs", "--jsn"], "did you mean --json?"),
    (["launch", "--slurm", "digits"], "the run's whole line: megabatch launch ... train digits"),
    (["launch", "digits", "--hosts", "a,b"], "megabatch launch ... train digits"),
]
# All of them in one process, which must end without torch.
REFUSING = """
import contextlib, io, json, sys
from megabatch.cli import main
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(arguments)
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""


def test_mistakes_are_told_before_a_worker_is_started(tmp_path):
    made_up_run(tmp_path / "study", 64, 0, 0.9)
    for name in ("file", "some.arrow"):
        (tmp_path / name).touch()
    own = {"own model": {"model": "own Net"}, "own data": {"data": {"source": "own"}}}
    for name, text in {"torn": '{"a', **{n: json.dumps(c) for n, c in own.items()}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", REFUSING], input=json.dumps([words for words, _ in BEFORE]),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(BEFORE), done.stderr
    for (arguments, says), (status, said, with_torch) in zip(BEFORE, found, strict=True):
        assert (status, with_torch) == (2, False), (arguments, said)
        assert says in said and said.count("\n") == 1, (arguments, said)
        assert ("--data.path says" in said) is ("--data.path says" in says), (arguments, said)
    assert {path.name for path in tmp_path.iterdir()} == {
        "study", "torn", "file", "some.arrow", *own,
    }  # fmt: skip


def test_an_empty_word_may_take_back_what_a_config_says():
    begun = TrainFlags(Launch(), Config(init="weights.pth"))
    assert parse(TrainFlags, "train x", ["--init", ""], begun).config.init == ""


def test_a_share_of_any_images_but_the_recipes_own_is_a_tenth():
    assert train_flags("digits", [])[0].data.val_share == 0.2
    assert train_flags("digits", ["--data.path", "pictures"])[0].data.val_share == 0.1
    given = ["--data.path", "pictures", "--data.val-share", "0.3"]
    assert train_flags("digits", given)[0].data.val_share == 0.3


def test_train_from_the_config_of_a_run(finished, tmp_path):
    out, result = finished
    flags = ["--workers", 1, "--json", "--out", tmp_path / "again"]
    again = last_json(megabatch("train", out / "config.json", *flags))
    assert again["weights_sha256"] == last_json(result)["weights_sha256"]
    written = [json.loads((run / "config.json").read_text()) for run in (out, tmp_path / "again")]
    assert written[0] == written[1]
    # Flags and another length work as with a recipe.
    flags = ["--workers", 1, "--json", "--out", tmp_path / "half", "--epochs", 0.5, "--seed", 7]
    half = last_json(megabatch("train", out / "config.json", *flags))
    assert half["seen"] < again["seen"]
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["lr"]["warmup"] == written[0]["lr"]["warmup"] / 2
    assert config["seed"] == 7
    mistaken(megabatch("train", out), "is the folder of a run: name its config")


HOSTILE = {
    "misspelt": (lambda config: {**config, "epoch": 3}, "there is no setting 'epoch'"),
    "wrong type": (lambda config: {**config, "batch": "64"}, "batch is '64': give a whole number"),
    "no number": (lambda config: {**config, "epochs": float("nan")}, "NaN is no number"),
    "endless": (lambda config: {**config, "epochs": 1e99}, "epochs is 1e+99"),
    "contradiction": (lambda config: {**config, "micro": 48}, "cannot be made of micro-batches"),
    "plan": (lambda config: {**config, "plan": "tours"}, "did you mean torus?"),
    "no object": (lambda config: [config], "give an object of settings"),
}


@pytest.mark.parametrize("kind", [*HOSTILE, "bomb", "cut"])
@pytest.mark.parametrize("verb", ["train", "plan", "evaluate", "resume"])
def test_a_broken_config_is_one_sentence_for_every_verb(verb, kind, finished, tmp_path, capsys):
    run = shutil.copytree(finished[0], tmp_path / "run")
    path = run / "config.json"
    text = path.read_text()
    if kind in HOSTILE:
        change, says = HOSTILE[kind]
        path.write_text(json.dumps(change(json.loads(text))))
    else:
        path.write_text("[" * 500_000 if kind == "bomb" else text[: len(text) // 2])
        says = "nested too deeply" if kind == "bomb" else "it is not JSON"
    before = contents(run)
    arguments = {
        "train": ["train", path, "--workers", 1, "--out", tmp_path / "new"],
        "plan": ["plan", path],
        "evaluate": ["evaluate", run],
        "resume": ["train", "digits", *QUICK, "--workers", 1, "--out", run, "--resume"],
    }[verb]
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith("megabatch: ") and says in last and str(path) in last
    assert out == "" and "Traceback" not in err
    assert contents(run) == before
    assert not (tmp_path / "new").exists()


def contents(run):
    """All that a run holds; who has it open now is no part of it."""
    files = (file for file in run.rglob("*") if file.is_file() and file.name != "lock")
    return {file: file.read_bytes() for file in files}


def test_evaluating_a_run_of_someone_elses_writes_nowhere(finished, tmp_path):
    """A config may ask for a copy of its pack in any folder; an evaluation makes none."""
    run = shutil.copytree(finished[0], tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["data"]["local_copy"] = str(tmp_path / "theirs")
    (run / "config.json").write_text(json.dumps(config))
    found = last_json(megabatch("evaluate", run, "--json"))
    assert found["top1"] == last_json(finished[1])["top1"]
    assert not (tmp_path / "theirs").exists()


def test_images_that_were_moved_are_named_anew(tmp_path):
    pictures.folder(tmp_path / "set", classes=("ant", "bee"), each=8, val=4, size=(16, 16))
    pictures.folder(tmp_path / "other", classes=("ant", "cat"), each=2, val=2, size=(16, 16))
    flags = ["--data.path", "set", "--data.size", 8, "--data.channels", 3, "--workers", 1]
    flags += ["--epochs", 1, "--batch", 16, "--data.skip-bad", 1, "--out", "run"]
    assert megabatch("train", "digits", *flags, cwd=tmp_path).returncode == 0
    there = megabatch("evaluate", "run", cwd=tmp_path).stdout
    (tmp_path / "set").rename(tmp_path / "moved")
    says = "there is no set: name a folder or an archive of images; --data.path says where"
    mistaken(megabatch("evaluate", "run", cwd=tmp_path), says)
    assert megabatch("evaluate", "run", "--data.path", "moved", cwd=tmp_path).stdout == there
    result = megabatch("evaluate", "run", "--data.path", "other", cwd=tmp_path)
    assert result.returncode == 2
    assert (
        "other has 2 classes (ant, cat), but run knows 2 classes (ant, bee): give images of the "
        "same classes" in result.stderr
    )


def test_a_second_run_does_not_overwrite_the_first(finished):
    out, _ = finished
    before = (out / "summary.json").read_bytes()
    mistaken(megabatch("train", "digits", *QUICK, "--out", out, "--workers", 1), "--resume")
    assert (out / "summary.json").read_bytes() == before


def test_a_run_that_is_not_there_to_go_on_with_is_told_to_begin(tmp_path):
    line = ["train", "digits", *QUICK, "--workers", 1, "--out", tmp_path / "slip", "--resume"]
    told = f"there is no run in {tmp_path / 'slip'} to go on with: it begins there"
    assert told in megabatch(*line).stderr
    assert told not in megabatch(*line).stderr


def test_help_answers_without_torch():
    check = (
        "import sys; from megabatch.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["train", "--help"], ["train", "digits", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", check, *arguments], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "train" in result.stdout
