"""megabatch launch: scripts that a shell accepts, with what a cluster needs, and mistakes named."""

import os
import subprocess
import sys

import pytest

from megabatch.cli import main

RUN = ["train", "digits", "--epochs", "2", "--out", "runs/mine"]


def script(capsys, *arguments):
    assert main(["launch", *arguments]) == 0
    text = capsys.readouterr().out
    checked = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return text


def test_a_batch_script(capsys):
    asked = ["--slurm", "--nodes", "4", "--workers", "2", "--time", "1:30:00"]
    text = script(capsys, *asked, "--partition", "gpu", "--account", "vision", *RUN)
    for line in (
        "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=1:30:00", "#SBATCH --partition=gpu", "#SBATCH --account=vision",
        "#SBATCH --requeue", "#SBATCH --signal=TERM@120", "#SBATCH --job-name=digits",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert text.startswith("#!/bin/sh\n")
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text
    words = text.replace("\\\n", " ").split()
    assert words[words.index("train") :][:7] == [*RUN, "--resume"]


def test_workers_without_gpus_and_a_run_without_a_folder(capsys):
    text = script(capsys, "--slurm", "--cpu", "--", "train", "digits", "--resume", "--out", "x")
    assert "gpus-per-node" not in text and text.count("--resume") == 1
    assert "--device cpu" in text
    assert "--out runs/digits" in script(capsys, "--slurm", "train", "digits")


def test_lines_over_ssh(capsys):
    text = script(capsys, "--hosts", "me@a,b", "--workers", "4", "--port", "1234", *RUN)
    assert "start 0 me@a\nstart 1 b\n" in text
    words = text.replace("\\\n", " ").split()
    for flag, value in (
        ("--nnodes", "2"), ("--nproc-per-node", "4"), ("--master-addr", "a"),
        ("--master-port", "1234"), ("--node-rank", '"$NODE_RANK"'),
    ):  # fmt: skip
        assert words[words.index(flag) + 1] == value


def test_words_reach_the_run_as_they_are(capsys, tmp_path, monkeypatch):
    odd_folder = tmp_path / "it's a $folder"
    odd_folder.mkdir()
    monkeypatch.chdir(odd_folder)
    odd = 'it\'s "$HOME" `pwd`'
    text = script(capsys, "--hosts", "a", "train", "digits", "--out", odd)
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nshift 2\nexec sh -c "$1"\n')
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "[$word]"; done\n')
    for file in (fake, python):
        file.chmod(0o755)
    text = text.replace(sys.executable, str(python))
    said = subprocess.run(
        ["sh"], input=text, text=True, capture_output=True, env=os.environ | {"SSH": str(fake)}
    )
    assert said.returncode == 0, said.stderr
    assert f"[{odd}]" in said.stdout.splitlines()
    assert "[--node-rank]\n[0]\n" in said.stdout
    assert [*odd_folder.iterdir()] == []  # the note of the process is gone


def test_a_file_is_written(tmp_path, capsys):
    path = tmp_path / "job.sh"
    assert main(["launch", "--slurm", "--script", str(path), *RUN]) == 0
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/bin/sh")
    assert f"sbatch {path}" in capsys.readouterr().out.replace("\n", " ")


def test_a_study_goes_on_by_itself(capsys):
    text = script(capsys, "--slurm", "--cpu", "study", "digits", "--batches", "32,64")
    words = text.replace("\\\n", " ").split()
    line = [
        "study",
        "digits",
        "--batches",
        "32,64",
        "--out",
        "runs/study-digits",
        "--device",
        "cpu",
    ]
    assert words[words.index("study") :][: len(line)] == line
    assert "--resume" not in text and "#SBATCH --job-name=study-digits" in text
    assert "study digits" in script(capsys, "--hosts", "a", "study", "digits", "--batches", "32")


def test_images_that_are_named_from_here_must_be_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["--slurm", "train", "goyal2017", "--data.path"]
    assert main(["launch", *line, "images.arrow"]) == 2
    assert "there is no images.arrow here" in capsys.readouterr().err
    assert main(["launch", "--slurm", "train", "goyal2017"]) == 2
    assert "no images were named" in capsys.readouterr().err
    assert main(["launch", *line, "/scratch/none/images.arrow"]) == 0
    assert "the nodes must have it" in capsys.readouterr().err
    (tmp_path / "images.arrow").touch()
    assert main(["launch", *line, "images.arrow"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "needs one of --slurm and --hosts"),
        (["--slurm", "--hosts", "a", *RUN], "needs one of --slurm and --hosts"),
        ([*RUN, "--slurm"], "launch's own flags, as --slurm, come before train"),
        (["--nodes", "2", *RUN, "--hosts=a,b"], "own flags, as --hosts=a,b, come before train"),
        (["--slurm"], "needs the run's line at its end"),
        (["--slurm", "evaluate", "runs/a"], "launch starts train or study, not evaluate"),
        (["--slurm", "study", "digits"], "study needs batches"),
        (["--slurm", "study", "digits", "--batches", "9", "--workers", "2"], "comes before study"),
        (["--slurm", "train"], "needs the run's line at its end"),
        (["--slurm", "train", "digit"], "did you mean digits?"),
        (["--slurm", "train", "digits", "--batch", "33"], "cannot be made of micro-batches"),
        (["--slurm", "train", "digits", "--workers", "2"], "comes before train"),
        (["--slurm", "--nodes", "0", *RUN], "--nodes is 0; give 1 to"),
        (["--slurm", "--time", "soon", *RUN], "--time is 'soon'; give H:MM:SS"),
        (["--slurm", "--account", "a b", *RUN], "no name of Slurm's"),
        (["--hosts", "a,;rm", *RUN], "';rm', which is no host"),
        (["--hosts", "a,-oProxyCommand=x", *RUN], "which is no host"),
        (["--hosts", "a,a", *RUN], "a twice: --workers says how many"),
        (["--hosts", "a,b", "--nodes", "2", *RUN], "--nodes is for --slurm"),
        (["--hosts", "a", "--port", "70000", *RUN], "--port is 70000"),
        (["--slurm", "--script", "/nowhere/x.sh", *RUN], "cannot be written"),
        (["--slurm", "--script", "x.txt", *RUN], "ends with .sh"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says, capsys):
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and said.out == ""
