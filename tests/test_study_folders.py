"""Studies whose folders were torn, mixed or filled by others: nothing is lost, nothing is mixed."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from studies import changed, made_up_run

import megabatch as mb
from megabatch.cli import main
from megabatch.errors import DONE, FAILED, MISTAKE, UserError
from megabatch.study import sweep
from megabatch.study.results import read
from megabatch.study.trials import RECIPE, StudyPlan, Trial, at_rate, state, write_label
from megabatch.verbs.before import check_study
from megabatch.verbs.study import read_flags

HERE = ["--workers", "1", "--device", "cpu"]
ONE = ["digits", "--batches", "64", "--epochs", "0.1", *HERE]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "study"
    assert main(["study", *ONE, "--out", str(out)]) == DONE
    return out


@pytest.fixture
def again(finished, monkeypatch):
    """The same study once more: the folder, and what was run."""
    ran, real = [], sweep.train
    monkeypatch.setattr(sweep, "train", lambda *a, **k: ran.append(k["out"].name) or real(*a, **k))
    return finished, ran


@pytest.mark.parametrize("label", ["", "{", "[]", '{"batch": 64}', None])
def test_a_finished_run_counts_whatever_became_of_its_label(again, label):
    out, ran = again
    written = out / "64-s0/trial.json"
    before = written.read_text()
    written.write_text(label) if label is not None else changed(written, arm="other", seed=7)
    assert [(cell.arm, cell.batch) for cell in read(out).cells] != [(RECIPE, 64)]
    assert main(["study", *ONE, "--out", str(out)]) == DONE
    assert ran == [] and written.read_text() == before
    rows = json.loads((out / "study.json").read_text())["rows"]
    assert [(row["arm"], row["batch"], row["seeds"]) for row in rows] == [(RECIPE, 64, [0])]


def test_a_run_whose_accuracy_was_torn_is_made_anew(tmp_path, capfd):
    """Its folder said that it is finished, and the page that no run is."""
    out = tmp_path / "study"
    assert main(["study", *ONE, "--out", str(out)]) == DONE
    changed(out / "64-s0/summary.json", top1="high")
    assert not read(out).cells[0].finished
    capfd.readouterr()
    assert main(["study", *ONE, "--out", str(out)]) == DONE
    assert "the runs: 1\n" in capfd.readouterr().err
    assert len(read(out).cells[0].finished) == 1


def test_where_a_page_cannot_be_written_the_result_is_told_all_the_same(again, capfd):
    out, _ = again
    page = out / "report.html"
    page.unlink()
    page.mkdir()
    assert main(["study", *ONE, "--out", str(out), "--json"]) == FAILED
    page.rmdir()
    told = capfd.readouterr()
    assert json.loads(told.out.splitlines()[-1])["rows"][0]["batch"] == 64
    assert f"{page} cannot be written: Is a directory" in told.err


def test_what_is_in_the_locks_place_is_named(tmp_path, capfd):
    (tmp_path / "lock").mkdir()
    assert main(["study", *ONE, "--out", str(tmp_path)]) == MISTAKE
    assert f"{tmp_path}/lock cannot be written: Is a directory; make" in capfd.readouterr().err


def test_a_finished_run_counts_whatever_the_ages_of_its_files(again):
    """A copy may have them in any order."""
    out, ran = again
    later = (out / "64-s0/summary.json").stat().st_mtime + 60
    os.utime(out / "64-s0/environment.json", (later, later))
    assert main(["study", *ONE, "--out", str(out)]) == DONE
    assert ran == [] and len(read(out).cells[0].finished) == 1


def test_a_retry_keeps_what_has_finished(again):
    """A worker may fail in the moment after the first one has written the summary."""
    out, ran = again
    label = out / "64-s0/trial.json"
    before = label.read_text()
    for retry in ([], ["--retry"]):
        changed(label, failure="another worker was lost in the last moment")
        assert main(["study", *ONE, *retry, "--out", str(out)]) == DONE
        assert ran == [] and label.read_text() == before


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["digits", "--label-smoothing", "0"], "label_smoothing 0.1 but 0"),
        (["digits", "--epochs", "0.2"], "epochs 0.1 but 0.2"),
        (["digits", "--model", "small20"], "model small but small20"),
    ],
)
def test_another_recipe_is_refused_at_other_batches_too(finished, flags, setting, capfd):
    name, *rest = flags
    line = ["study", name, "--batches", "128", "--epochs", "0.1", *rest, *HERE]
    assert main([*line, "--out", str(finished)]) == 2
    said = capfd.readouterr().err
    assert f"64-s0 was begun with {setting}" in said.replace("'", "")
    assert "a study compares runs of one recipe" in said and not (finished / "128-s0").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epochs", "0.2"], "64-s0 was begun with epochs 0.1 but 0.2"),
        (["--epochs", "0.1", "--lr.reference", "3"], "64-s0 was begun with lr.reference 64 but 3"),
    ],
)
def test_another_recipe_is_refused_from_other_seeds_too(finished, flags, says, capfd):
    """They would be one mean."""
    line = ["study", "digits", "--batches", "64", "--seed", "1", *flags, *HERE]
    assert main([*line, "--out", str(finished)]) == 2
    assert says in capfd.readouterr().err.replace("'", "")
    assert not (finished / "64-s1").exists()


def test_an_arm_of_other_flags_wants_another_name(tmp_path, capfd):
    out, cell = tmp_path / "study", ["--out", str(tmp_path / "study")]
    line = ["study", *ONE, *cell, "--arms"]
    assert main([*line, "x=--optimizer.momentum 0.5"]) == DONE
    page = (out / "report.html").read_text()
    assert "--optimizer.momentum 0.5" in page
    for other in ([], ["--seed", "1"], ["--batches", "128"]):
        assert main([*line, "x=--optimizer.momentum 0.1", *other]) == 2
        said = capfd.readouterr().err
        assert "64-x-s0" in said and "momentum" in said
    assert sorted(path.name for path in out.glob("*-x-*")) == ["64-x-s0"]
    label = out / "64-x-s0/trial.json"
    written = json.loads(label.read_text())
    assert written.pop("flags") == "--optimizer.momentum 0.5"
    label.write_text(json.dumps(written))  # as it was before labels had them
    assert main([*line, "x=--optimizer.momentum 0.5"]) == DONE
    assert json.loads(label.read_text()) == {**written, "flags": "--optimizer.momentum 0.5"}


def test_a_search_that_chooses_otherwise_makes_no_mean_of_two_rates(tmp_path):
    """Nor where only seeds are asked for that were not there."""
    folder = made_up_run(tmp_path, 64, 0, 0.9, factor=0.5)
    config = mb.recipes.named("digits", epochs=4, batch=64)
    made_up_run(tmp_path, 64, 0, 0.8, kind="rate", factor=2.0, config=config)
    plan = StudyPlan({(RECIPE, 64): config}, range(1, 2))
    words = f"{folder} was run at 0.5 times its rate, and the search now chooses 2 times"
    with pytest.raises(UserError, match=words):
        check_study(plan, tmp_path)


def test_rate_and_optimizer_may_go_with_the_batch(tmp_path):
    out = str(tmp_path / "study")
    assert main(["study", *ONE, "--lr.reference", "8", "--out", out]) == DONE
    other = ["digits", "--batches", "128", "--epochs", "0.1", "--seeds", "2", *HERE]
    assert main(["study", *other, "--out", out]) == DONE
    assert [cell.batch for cell in read(tmp_path / "study").cells] == [64, 128]


def test_what_is_in_a_runs_place_is_named_with_the_way_out(tmp_path):
    folder = made_up_run(tmp_path, 64, 0, 0.9)
    trial = Trial("run", RECIPE, 64, read(tmp_path).cells[0].runs[0].config)
    assert state(folder, trial) == "finished"
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not the config .* remove .*64-s0 to run"):
        state(folder, trial)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="file is no folder: remove it"):
        state(tmp_path / "file", trial)
    with pytest.raises(UserError, match=r"64-s0 cannot be written .*make room there"):
        write_label(tmp_path / "file/64-s0", trial)


def test_a_search_that_chooses_otherwise_says_what_to_do_with_the_runs(tmp_path):
    made_up_run(tmp_path, 64, 0, 0.9, factor=0.5)
    begun = read(tmp_path).cells[0].runs[0].config
    chosen = Trial("run", RECIPE, 64, at_rate(begun, 4), 2.0)
    with pytest.raises(UserError) as refused:
        state(tmp_path / chosen.name, chosen)
    assert "64-s0 was run at 0.5 times its rate, and the search now chooses 2 times" in str(
        refused.value
    )


def test_a_search_that_was_stopped_chooses_nothing(tmp_path, capfd):
    """The first of three rates is the best of those that were tried, whatever it is worth."""
    study = tmp_path / "study"
    config = read_flags("digits", ["--epochs", "4", "--batches", "64"])[0].configs[RECIPE, 64]
    plan = StudyPlan({(RECIPE, 64): config}, range(1), rates=(0.5, 1.0))
    first, begun = plan.search()
    made_up_run(study, 64, 0, 0.4, kind="rate", factor=0.5, config=at_rate(first.config, 2))
    made_up_run(study, 256, 0, 0.4, kind="rate", factor=0.5)
    write_label(study / begun.name, begun)
    command = ["study", "digits", "--epochs", "4", *HERE, "--out", str(study), "--batches"]
    assert main([*command, "64"]) == 2
    assert "64 was stopped before its end: give the same --rates" in capfd.readouterr().err
    found = read(study)
    assert next(found.search_in_words()).startswith(
        "rates at 64, by held-out training images: 8: 40.00%, 1 times its own: not finished;"
    )
    found.check_searched([(RECIPE, 256)])  # that one came to its end
    check_study(plan, study)  # what is missing will be run
    with pytest.raises(UserError, match="give the same --rates to go on with it, or remove "):
        check_study(replace(plan, rates=(0.5, 2.0)), study)
    write_label(study / begun.name, begun, "it diverged")  # as rates do that are too high
    read(study).check_searched([(RECIPE, 64)])
    assert "1 times its own: failed; 8 is chosen" in next(read(study).search_in_words())


def test_what_is_kept_of_a_study_tells_of_the_runs_that_failed_too(tmp_path):
    study, kept = tmp_path / "study", tmp_path / "kept"
    made_up_run(study, 64, 0, 0.9)
    failed = made_up_run(study, 64, 0, 0.1, arm="sgd")
    for name in ("summary.json", "environment.json"):
        (failed / name).unlink()
    (failed / "metrics.jsonl").write_text("")
    changed(failed / "trial.json", failure="it diverged in /home/me/runs")
    (study / "study.json").write_text('{"command": ["/home/me/megabatch/cli.py", "study"]}')
    script = Path(__file__).parent.parent / "scripts/keep_study.py"
    subprocess.run([sys.executable, script, study, kept], check=True)
    found = {(cell.arm, run.failure) for cell in read(kept).cells for run in cell.runs}
    assert found == {(RECIPE, None), ("sgd", "it diverged in /home/me/runs")}
    assert "it diverged" in (kept / "report.html").read_text()
    assert json.loads((kept / "study.json").read_text())["command"] == ["megabatch", "study"]
