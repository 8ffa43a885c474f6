"""megabatch runs and megabatch watch, on runs that are made up and on one that really goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from commands import MEGABATCH, at_terminal
from commands import megabatch_process as megabatch
from run_folders import evaluation_line, made_up, step_line
from waiting import PATIENCE_SECONDS

from megabatch.verbs.runs import run_folders


def last_json(result):
    return json.loads(result.stdout.splitlines()[-1])


# --- runs ---


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    top = tmp_path_factory.mktemp("several")
    lines = [step_line(0), evaluation_line(1.0, top1=0.25), step_line(10)]
    made_up(top / "old", lines, environment={"began": "2026-01-01T00:00:00+0000"},
            summary={"ended": "finished", "top1": 0.25, "epochs": 4.0, "seconds": 61.0,
                     "images_per_second": 1234.0})  # fmt: skip
    made_up(top / "study" / "new", lines, environment={"began": "2026-02-01T00:00:00+0000"},
            summary={"ended": "stopped"})  # fmt: skip
    made_up(top / "[red]odd[/red]", ["torn"], environment={"began": "2025-01-01T00:00:00+0000"})
    (top / "no run").mkdir()
    (top / "no run" / "notes.txt").write_text("hello")
    return top


def test_runs_newest_first(several):
    result = megabatch("runs", several, "--json")
    assert result.returncode == 0, result.stderr
    told = last_json(result)["runs"]
    assert [os.path.relpath(run["run"], several) for run in told] == [
        "study/new", "old", "[red]odd[/red]",
    ]  # fmt: skip
    assert [run["state"] for run in told] == ["stopped", "finished", "running"]
    assert told[1] == {
        "run": str(several / "old"), "recipe": "made-up", "began": "2026-01-01T00:00:00+0000",
        "state": "finished", "top1": 0.25, "epoch": 4.0, "epochs": 4.0, "steps": 11.0,
        "batch": 100.0,
        "seconds": 61.0, "images_per_second": 1234.0, "faults": [],
    }  # fmt: skip
    # In a pipe each run is one line, whatever its name holds.
    table = result.stdout.splitlines()[:-1]
    assert [line.split()[0].removeprefix(str(several)) for line in table[1:]] == [
        "/study/new", "/old", "/[red]odd[/red]",
    ]  # fmt: skip
    assert "25.00 %" in table[2] and "1 min 1 s" in table[2]


def test_a_name_is_never_broken_and_a_terminal_of_80_columns_is_enough(tmp_path):
    name = "runs/study-digits/512-no_warmup-s0"
    made_up(tmp_path / name, [step_line(0)], summary={"ended": "stopped", "seconds": 3600.0})
    lines = at_terminal("runs", cwd=tmp_path)
    assert len(lines) == 2 and max(map(len, lines)) <= 80, lines
    assert lines[1].split()[0] == name and "1 h 0 min" in lines[1]
    assert "images/s" not in lines[0] and "top-1" in lines[0]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_long_name_stands_above_its_line_and_leaves_the_others_theirs(tmp_path, columns):
    long = f"runs/{'long ' * 30}end"
    for name in ("runs/digits-20261116-035601", long):
        made_up(tmp_path / name, [step_line(0)], summary={"ended": "stopped", "seconds": 3600.0})
    heads, *lines = at_terminal("runs", cwd=tmp_path, columns=columns)
    assert lines.count(long) == 1
    others = [heads, *(line for line in lines if line != long)]
    assert len(others) == 3 and max(map(len, others)) <= columns
    assert sum("stopped" in line for line in others) == 2
    assert "stopped" in lines[lines.index(long) + 1]


def test_a_run_that_was_never_evaluated_has_no_accuracy(tmp_path):
    ended = {"ended": "stopped", "top1": 0.0, "top5": 0.0, "loss": None}
    made_up(tmp_path / "run", [step_line(0)], summary=ended)
    assert last_json(megabatch("runs", tmp_path, "--json"))["runs"][0]["top1"] is None
    assert last_json(megabatch("watch", tmp_path / "run", "--json"))["top1"] is None


def test_runs_and_watch_count_alike(tmp_path):
    lines = [step_line(0), evaluation_line(0.5), step_line(9)]
    made_up(tmp_path / "run", lines, summary={"ended": "stopped"})
    row = last_json(megabatch("runs", tmp_path, "--json"))["runs"][0]
    watched = megabatch("watch", tmp_path / "run", "--json")
    told = last_json(watched)
    assert (row["steps"], row["epoch"]) == (told["steps"], told["epoch"]) == (10, 1.0)
    assert "step 10  epoch 1.00/4.00" in watched.stderr


BROKEN = {
    "": "config.json cannot be read: Expecting value",
    "[]": "config.json cannot be read: not a JSON object",
    '{"epochs": 4, "batch": "many"}': "config.json is not the config of a run: batch is 'many'",
    '{"epochs": 4, "nonsense": 1}': "config of a run: there is no setting 'nonsense'",
    '{"epochs": -1}': "config of a run: epochs is -1; it must be above 0",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_config_is_a_sentence_and_the_rest_is_shown(tmp_path, text):
    lines = [step_line(0), evaluation_line(1.0, top1=0.5)]
    for name in ("run", "whole"):
        made_up(tmp_path / name, lines, summary={"ended": "finished", "top1": 0.5})
    broken, words = tmp_path / "run", BROKEN[text]
    (broken / "config.json").write_text(text)

    listed = megabatch("runs", tmp_path, "--json")
    assert listed.returncode == 0, listed.stderr
    (row,) = (line for line in listed.stdout.splitlines()[:-1] if words in line)
    assert "finished" in row and "50.00 %" in row and str(broken) in row
    faults = {run["run"]: run["faults"] for run in last_json(listed)["runs"]}
    assert words in faults[str(broken)][0] and faults[str(tmp_path / "whole")] == []

    watched = megabatch("watch", broken)
    assert watched.returncode == 0 and "top-1 50.00 %" in watched.stdout
    assert (
        [line for line in watched.stderr.splitlines() if words in line]
        == [
            line
            for line in watched.stderr.splitlines()
            if line.startswith(f"megabatch: {broken}: ")
        ]
        != []
    )

    page = megabatch("report", broken, tmp_path / "whole", "--out", tmp_path / "report.html")
    assert page.returncode == 0 and page.stderr.count(words) == 1
    assert "whole: " not in page.stderr


def test_at_a_terminal_what_is_wrong_stands_below_its_run(tmp_path):
    made_up(tmp_path / "runs/one", [step_line(0)], summary={"ended": "stopped"})
    (tmp_path / "runs/one/config.json").write_text("{")
    lines = at_terminal("runs", cwd=tmp_path)
    assert len(lines) >= 3 and max(map(len, lines)) <= 80, lines
    assert lines[2].startswith("    config.json cannot be read: Expecting property name")


def test_names_do_nothing_to_a_terminal(tmp_path):
    name = os.fsdecode(b"odd\xff\x1b[2J\nname")
    made_up(tmp_path / name, [step_line(0)], config={"name": "\ud800\x07", "epochs": 4})
    result = megabatch("runs", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert "\x1b" not in result.stdout and "odd\\udcff\\x1b[2J\\nname" in result.stdout
    result = megabatch("report", tmp_path / name, "--out", tmp_path / "r.html")
    assert result.returncode == 0, result.stderr
    result = megabatch("watch", tmp_path / name, "--patience", "0.1")
    assert "\x1b" not in result.stdout + result.stderr and "Traceback" not in result.stderr


def test_a_link_in_a_circle_is_not_followed(tmp_path):
    made_up(tmp_path / "run")
    (tmp_path / "again").symlink_to(tmp_path)
    assert list(run_folders(tmp_path)) == [tmp_path / "run"]


def test_a_folder_that_is_removed_while_others_are_looked_through_holds_no_runs(tmp_path):
    for name in ("a", "c"):
        made_up(tmp_path / name, [])
    (tmp_path / "b").mkdir()
    found = run_folders(tmp_path)
    assert next(found) == tmp_path / "a"
    (tmp_path / "b").rmdir()
    assert list(found) == [tmp_path / "c"]


def test_a_link_to_itself_is_no_run(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for verb in ("report", "watch", "export"):
        result = megabatch(verb, tmp_path / "loop")
        assert result.returncode == 2 and "is not the folder of a run" in result.stderr


def test_no_runs_is_said(tmp_path):
    result = megabatch("runs", tmp_path, "--json")
    assert result.returncode == 0 and last_json(result)["runs"] == []
    assert "holds no runs" in result.stdout
    result = megabatch("runs", cwd=tmp_path)
    assert result.returncode == 2 and "there is no folder runs" in result.stderr


# --- watch ---


@pytest.mark.parametrize(("ended", "status"), [("finished", 0), ("target", 0), ("stopped", 3)])
def test_watching_a_run_that_has_ended(tmp_path, ended, status):
    lines = [step_line(0), evaluation_line(1.0, top1=0.5)]
    folder = made_up(tmp_path / "run", lines, summary={"ended": ended, "top1": 0.5})
    result = megabatch("watch", folder, "--json")
    assert result.returncode == status, result.stderr
    told = last_json(result)
    assert told["state"] == ended and told["top1"] == 0.5 and told["steps"] == 1
    assert "epoch 1  top-1 50.00 %" in result.stderr
    assert result.stdout.startswith(f"{folder}: ")


def test_watching_a_run_that_failed_or_never_came(tmp_path):
    failed = made_up(tmp_path / "run", [step_line(0)], diagnosis={"step": 0})
    assert megabatch("watch", failed).returncode == 1
    result = megabatch("watch", tmp_path / "none", "--wait", "--patience", "0.2", "--json")
    assert result.returncode == 1 and last_json(result)["state"] == "missing"
    silent = made_up(tmp_path / "silent", [step_line(0)])
    past = time.time() - 5000
    for path in silent.iterdir():
        os.utime(path, (past, past))
    result = megabatch("watch", silent, "--json")
    assert result.returncode == 1 and last_json(result)["state"] == "silent"
    assert "was it killed?" in result.stdout


def test_a_name_that_is_nearly_right_is_answered_at_once(tmp_path):
    made_up(tmp_path / "digits-1")
    result = megabatch("watch", "digts-1", cwd=tmp_path)
    assert result.returncode == 2
    assert "digts-1 is not the folder of a run: did you mean digits-1?" in result.stderr


def test_nothing_known_is_no_progress(tmp_path):
    from megabatch.verbs.watch import Watched

    assert Watched(tmp_path, 1.0).progress == 0.0
    odd = Watched(made_up(tmp_path / "run", [step_line(5)], config={"epochs": 0}), 1.0)
    assert odd.look() and odd.progress == 0.0


def test_a_run_that_has_only_written_its_config_is_not_given_up(tmp_path):
    from megabatch.verbs.watch import Watched

    (tmp_path / "config.json").write_text("{}")
    begun = Watched(tmp_path, PATIENCE_SECONDS)
    assert begun.look() and begun.state == "running"


def test_mistakes_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (["watch"], ["watch", "file"], ["watch", "run", "--every", "0"]):
        result = megabatch(*arguments, cwd=tmp_path)
        assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr


def test_a_run_is_followed_as_it_writes(tmp_path):
    """Lines come after the watcher has begun to look, one of them in two pieces."""
    folder = tmp_path / "run"
    watcher = subprocess.Popen(
        [*MEGABATCH, "watch", str(folder), "--wait", "--every", "0.05", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    heard = threading.Condition()

    def listen():
        for line in watcher.stderr:
            with heard:
                said.append(line)
                heard.notify_all()

    def wait_for(words):
        with heard:
            found = heard.wait_for(
                lambda: any(words in line for line in said), timeout=PATIENCE_SECONDS
            )
        assert found, said

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        wait_for("waiting for")
        made_up(folder, [step_line(0)])
        wait_for("step 1  epoch 0.00/4.00  500 images/s  loss 2")
        with (folder / "metrics.jsonl").open("a") as file:
            whole = step_line(20, loss=0.125) + "\n"
            file.write(whole[:50])
            file.flush()
            file.write(whole[50:] + evaluation_line(2.1, top1=0.75) + "\n")
        wait_for("top-1 75.00 %")
        # 4 - 2.1 epochs of 1,000 images at 500 images/s.
        wait_for(
            "step 21  epoch 2.10/4.00  500 images/s  loss 0.125  rate 0.1  batch 100  3.8 s left"
        )
        (folder / "summary.json").write_text(json.dumps({"ended": "finished", "top1": 0.75}))
        out = watcher.stdout.read()
        assert watcher.wait(PATIENCE_SECONDS) == 0
    finally:
        watcher.kill()
        watcher.wait()
        listener.join()
        watcher.stdout.close()
        watcher.stderr.close()
    assert json.loads(out.splitlines()[-1])["state"] == "finished"


def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0)])
    watcher = subprocess.Popen(
        [*MEGABATCH, "watch", str(folder), "--every", "0.05"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "step 1" in watcher.stderr.readline()
    watcher.send_signal(signal.SIGINT)
    out, words = watcher.communicate(timeout=PATIENCE_SECONDS)
    assert watcher.returncode == 0 and "no longer watching" in words and "running" in out


def test_a_real_run_is_watched_to_its_end(tmp_path):
    train = subprocess.Popen(
        [*MEGABATCH, "train", "digits", "--epochs", "2", "--workers", "1", "--device", "cpu",
         "--out", str(tmp_path / "run")],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        result = megabatch("watch", tmp_path / "run", "--wait", "--every", "0.2", "--json")
        assert train.wait(PATIENCE_SECONDS) == 0
    finally:
        train.kill()
        train.wait()
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    told = last_json(result)
    assert (told["state"], told["top1"], told["seen"]) == (
        "finished", summary["top1"], summary["seen"],
    )  # fmt: skip


def test_listing_and_watching_need_no_torch():
    check = "import sys, megabatch.verbs.runs, megabatch.verbs.watch, megabatch.verbs.report, "
    check += "megabatch.report.run; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
