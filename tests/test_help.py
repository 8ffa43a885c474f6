"""Help fits a screen and comes fast; shells complete verbs, recipes and flags."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from megabatch import recipes
from megabatch.cli import VERBS, main
from megabatch.runs.progress import say, to_people
from megabatch.study.arms import ARMS
from megabatch.verbs.bench import BENCHES
from megabatch.verbs.brief import MOST_USED, OTHERS, SECTIONS
from megabatch.verbs.chaos import ChaosFlags
from megabatch.verbs.pack import PackFlags
from megabatch.verbs.parsing import flags_of
from megabatch.verbs.study import StudyFlags
from megabatch.verbs.train import TrainFlags

LINES = 23  # of a terminal of 24, with the prompt below
MORE = ["train digits", "train mikami2018_119k", "study digits", "chaos digits", "plan digits"]
MORE += ["plan published", *(f"bench {name}" for name in BENCHES)]
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
    # No sentence is cut off, and no line ends in blanks.
    assert not [line for line in lines if re.search(r" \.\.\.$| $", line) and "usage:" not in line]


def test_a_recipes_help_has_its_values_and_every_section(capsys):
    said = help_of("train mikami2018", capsys)
    config = recipes.mikami2018()
    assert re.search(rf"--batch {config.batch}\b", said)
    assert re.search(rf"--data\.size {config.data.size}\b", said)
    flags = {*flags_of(TrainFlags)}
    named = {f"--{name.replace('_', '-')}" for name in (*MOST_USED, *OTHERS)}
    assert {name for name in named if "*" not in name} <= flags
    sections = {flag[2:].partition(".")[0] for flag in flags if "." in flag}
    assert {*SECTIONS} <= sections
    assert all(f"--{section}.*" in said for section in sections)


@pytest.mark.parametrize("words", ["", "--batch", "--batch many", "--batch 0"])
def test_a_recipes_help_has_the_values_of_the_batch_beside_it(words, capsys):
    asked = recipes.named("mlperf", batch=32768)
    said = help_of("train mlperf --batch 32768 --lr.warmup 3", capsys)
    for name, value in (("epochs", asked.epochs), ("batch", 32768), ("micro", asked.micro)):
        assert re.search(rf"--{name} {value:g}  ", said), name
    assert re.search(rf"--lr.reference {asked.lr.reference:g}  ", said)
    # Who asks for help may not know what to write yet.
    assert help_of(f"train mlperf {words}", capsys) == help_of("train mlperf", capsys)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("train digits", TrainFlags),
        ("study digits", StudyFlags),
        ("chaos digits", ChaosFlags),
        ("pack", PackFlags),
    ],
)
def test_help_all_explains_every_flag(words, kind, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help-all"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    switches_off = {flag for flag in flags_of(kind) if re.search(r"--(\w+\.)?no-", flag)}
    explained = {*re.findall(r"^  (--[\w.-]+)", said, re.M)}
    assert explained == {flag for flag in flags_of(kind) if flag not in switches_off}
    # A switch that is on is told by what puts it off.
    assert ("--no-zero-gamma" in said) == (kind is not PackFlags)
    assert max(map(len, said.splitlines())) <= 80
    assert not re.search(r"True|False|''|\(default: *\)", said)


def test_help_without_a_recipe_names_recipes_and_arms_and_in_full_explains_them(capsys):
    for words, names in (("train", recipes.RECIPES), ("study", ARMS)):
        assert all(re.search(rf"\b{name}\b", help_of(words, capsys)) for name in names)
        assert main([words, "--help-all"]) == 0
        said = capsys.readouterr().out
        assert all(re.search(rf"^  {name} +\w", said, re.M) for name in names)
        assert len(said.splitlines()) > LINES


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
        ("--verison", "did you mean --version?"),
        ("doctor twice", "megabatch doctor has no place for twice: megabatch doctor --help"),
        ("evaluate", "megabatch: evaluate needs RUN: megabatch evaluate --help lists"),
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
    assert "usage: megabatch launch [OPTIONS] train|study RECIPE ..." in help_of("launch", capsys)


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


def test_at_a_terminal_a_mistake_is_broken_between_words():
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "megabatch.cli", "train", "digits", "--data.path", "none such"]
    environ = os.environ | {"COLUMNS": "40"}
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs) as end:
        process = subprocess.Popen(line, stderr=end, stdout=subprocess.DEVNULL, env=environ)
        end.close()
        said = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while some := terminal.read(1 << 16):
                said += some
    assert process.wait() == 2
    lines = said.decode().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40
    unbroken = subprocess.run(line, capture_output=True, text=True).stderr
    assert unbroken.count("\n") == 1 and " ".join(said.decode().split()) == unbroken.strip()
