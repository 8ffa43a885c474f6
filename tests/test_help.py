"""Help fits a screen and comes fast; shells complete verbs, recipes and flags."""

import contextlib
import os
import re
import shutil
import subprocess
import sys

import pytest

from megabatch import recipes
from megabatch.cli import VERBS, main
from megabatch.runs.progress import say, to_people
from megabatch.verbs.brief import MOST_USED
from megabatch.verbs.parsing import flags_of
from megabatch.verbs.train import TrainFlags

LINES = 40
MORE = ["train digits", "train mikami2018", "plan digits", "bench step", "bench sync"]
SHELLS = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


def help_of(words, capsys):
    with contextlib.suppress(SystemExit):
        assert main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ["", *VERBS, *MORE])
def test_help_fits_a_screen_of_80_columns(words, capsys):
    lines = help_of(words, capsys).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("example")


def test_short_help_has_every_flag_and_the_recipes_values(capsys):
    said = help_of("train mikami2018", capsys)
    config = recipes.mikami2018()
    assert re.search(rf"--batch {config.batch}\b", said)
    assert re.search(rf"--data\.size {config.data.size}\b", said)
    flags = {flag for flag in flags_of(TrainFlags) if not re.search(r"--(\w+\.)?no-", flag)}
    names = set(re.findall(r"[\w.-]+", said))
    for flag in flags:
        section, dot, name = flag.removeprefix("--").rpartition(".")
        listed = flag in said or (name in names and f"--{section}{dot}*" in said)
        assert listed, flag
    assert {f"--{name.replace('_', '-')}" for name in MOST_USED} <= flags


def test_help_all_explains_every_flag(capsys):
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help-all"])
    said = capsys.readouterr().out
    assert all(flag in said for flag in flags_of(TrainFlags))
    assert "the images of one step" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian digits", "did you mean train?"),
        ("train digit", "did you mean digits?"),
        ("train digits --epoch 3", "did you mean --epochs?"),
        ("train digits --data.sise 3", "did you mean --data.size?"),
        ("train digits --model resnet5", "did you mean 'resnet50'?"),
        ("bench stpe", "did you mean step?"),
        ("train digits --workers 2 4", "with commas between: --workers 2,4"),
        ("plan digits --gpus 2 4", "with commas between: --gpus 2,4"),
        ("train digits --keep-best 3", "--keep-best takes no value: leave 3 away"),
        ("train digits --deterministic=true", "takes no value: leave true away"),
        ("train digits --epochs 3 4", "--epochs takes one value: leave 4 away"),
        ("train digits --patience abc", "--patience is abc: it takes a number"),
        ("train digits --micro", "--micro stands alone: it takes a whole number"),
        ("train digits --grid 2,2", "--grid is 2,2: it takes 2 whole numbers with spaces between"),
        ("train digits --stages 3", "--stages is 3: it takes EPOCH:BATCH[:MOMENTUM], as many"),
        ("train digits --lr.drop-at a", "it takes numbers, with spaces between"),
        ("train digits --precision fp8", "--precision is fp8: there are fp32"),
        ("completion bsh", "did you mean bash?"),
        ("export runs --to onx", "did you mean onnx?"),
    ],
)
def test_near_misses_are_told(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_help_has_no_python_in_it(capsys):
    for words in ("launch", "evaluate", "bench step", "export", "plan digits", "runs"):
        said = help_of(words, capsys)
        assert not re.search(r"None|True|False|''", said), words
    assert "usage: megabatch launch [-h] [OPTIONS] train|study RECIPE ..." in help_of(
        "launch", capsys
    )
    assert "the last for" in help_of("train digits", capsys)


def test_reading_only_the_beginning_is_no_error():
    line = f"{sys.executable} -m megabatch.cli train digits --help-all | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def cpu_seconds(*arguments):
    """The least of a few runs: others may have the cores."""

    def once():
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
        assert status == 0
        return used.ru_utime + used.ru_stime

    return min(once() for _ in range(2))


def test_help_takes_a_quarter_of_importing_torch():
    assert cpu_seconds("-m", "megabatch.cli", "--help") < cpu_seconds("-c", "import torch") / 4


# --- completion --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts():
    found = {}
    for shell in SHELLS:
        done = subprocess.run(
            [sys.executable, "-m", "megabatch.cli", "completion", shell],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[shell] = done.stdout
    return found


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tra"], ["train"]),
        (["train", "mik"], [name for name in recipes.RECIPES if name.startswith("mik")]),
        (["train", "digits", "--data.si"], ["--data.size"]),
        (["evaluate", "runs/a", "--be"], ["--best"]),
        (["bench", "st"], ["step"]),
        (["launch", "--slurm", "train", "digits", "--data.si"], ["--data.size"]),
        (["launch", "--part"], ["--partition"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(scripts, typed, offered):
    words = " ".join(["megabatch", *typed])
    asks = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _megabatch; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{scripts['bash']}\n{asks}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_accepts_its_script(scripts, shell, tmp_path):
    assert all(verb in scripts[shell] for verb in VERBS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell])
    done = subprocess.run([*SHELLS[shell], tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- names that would move a cursor ------------------------------------------------------------

HOSTILE = "a\x1b[2Jb\rc\u202ed"


def test_names_in_sentences_and_logs_move_no_cursor(tmp_path, capfd):
    assert main(["evaluate", str(tmp_path / HOSTILE), "--workers", "1"]) == 2
    assert main(["train", "digits", "--data.path", HOSTILE, "--workers", "1"]) == 2
    assert main(["pack", "--verify", HOSTILE]) == 2
    said = "".join(capfd.readouterr())
    assert said.count("a\\x1b[2Jb c\\u202ed") == 3
    assert not any(char in said for char in "\x1b\r\u202e")


def test_what_a_run_says_moves_no_cursor(capfd):
    say(to_people(), f"alarm: the trust ratio of {HOSTILE}")
    assert "of a\\x1b[2Jb\\rc" in capfd.readouterr().err
