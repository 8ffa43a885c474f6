"""megabatch plan and megabatch bench step, as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.planner import published, today

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def recipe(tmp_path):
    """A recipe of ImageNet's as the config.json of a run."""
    file = tmp_path / "config.json"
    file.write_text(published.imagenet("resnet50", 8192).to_json())
    return str(file)


def ask(capsys, *words):
    status = main(["plan", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_table_for_people_and_json_for_programs(recipe, capsys):
    status, out, err = ask(capsys, recipe, "--machine", "abci", "--gpus", "4,64", "--json")
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert {row["gpus"] for row in result["rows"]} == {4, 64}
    for row in result["rows"]:
        assert {"gpus", "plan", "grid", "bucket_mb", "step_seconds", "exposed_seconds",
                "efficiency", "images_per_second", "seconds_to_target"} <= set(row)  # fmt: skip
        assert 0 < row["efficiency"] <= 1
        assert row["images_per_second"] == pytest.approx(8192 / row["step_seconds"])
    assert [row["gpus"] for row in result["best"]] == [4, 64]
    fastest = min(r["seconds_to_target"] for r in result["rows"] if r["gpus"] == 64)
    assert result["best"][1]["seconds_to_target"] == fastest
    assert "halving_doubling" in err and "torus" in err


@pytest.mark.parametrize(
    ("what", "key", "count"),
    [("grids", "grid", 5), ("buckets", "bucket_mb", 8), ("wire", "wire", 2)],
)
def test_compare(recipe, capsys, what, key, count):
    _, out, _ = ask(
        capsys, recipe, "--machine", "abci", "--gpus", "64", "--compare", what, "--json"
    )
    rows = json.loads(out)["rows"]
    assert len({json.dumps(row[key]) for row in rows}) == len(rows) == count


def test_a_target_time_finds_a_cluster(recipe, capsys):
    _, out, _ = ask(capsys, recipe, "--machine", "hgx-h200", "--target-seconds", "600", "--json")
    (row,) = json.loads(out)["rows"]
    assert row["seconds_to_target"] <= 600
    assert row["gpus"] % 8 == 0


def test_what_is_given_is_not_searched(recipe, capsys):
    given = ["--plan", "torus", "--grid", "16", "4", "--bucket-mb", "10", "--wire", "fp16"]
    _, out, _ = ask(capsys, recipe, "--machine", "abci", "--gpus", "64", *given, "--json")
    (row,) = json.loads(out)["rows"]
    assert [row[k] for k in ("plan", "grid", "bucket_mb", "wire")] == ["torus", [16, 4], 10, "fp16"]


def test_the_pass_is_as_large_as_asked_for(recipe, capsys):
    ask_for = ["--machine", "hgx-h200", "--gpus", "8", "--plan", "ring", "--json"]
    whole, parts = (
        json.loads(ask(capsys, recipe, *ask_for, *more)[1])["rows"][0]
        for more in ((), ("--micro", "256"))
    )
    assert (whole["micro"], parts["micro"]) == (1024, 256)
    assert parts["images_per_second"] < whole["images_per_second"]


def test_another_batch_and_length(recipe, capsys):
    _, out, _ = ask(capsys, recipe, "--gpus", "8", "--batch", "4096", "--epochs", "9", "--json")
    row = json.loads(out)["rows"][0]
    assert row["epochs"] == 9
    assert row["images_per_second"] == pytest.approx(4096 / row["step_seconds"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--machine", "nope"), "there is no machine 'nope'"),
        (("--machine", "dgx-h100", "--gpus", "7"), "7 GPUs do not fill dgx-h100's nodes of 8"),
        (("--machine", "abci", "--gpus", "10000"), "a batch of 8192 leaves some of 10000 GPUs"),
        (("--micro", "0"), "a pass has at least 1 image"),
        (("--gpus", "many"), "--gpus is 'many': give numbers with commas"),
        (("--plan", "toros"), "did you mean torus?"),
        (("--wire", "fp8"), "there is no wire 'fp8'"),
        (("--gpus", "64", "--grid", "3", "4"), "a grid of 3 x 4 holds 12 GPUs, not 64"),
        (("--workload", "none.json"), "the model none.json cannot be read"),
        (("--target-seconds", "0.01"), "no number of dgx-h100's nodes does it in 0.01 s"),
        (("--machines", "abci"), "did you mean --machine?"),
    ],
)
def test_a_mistake_gets_one_sentence(recipe, capsys, words, sentence):
    status, out, err = ask(capsys, recipe, *words)
    assert status == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_an_unknown_recipe_or_none(capsys):
    for words, sentence in (
        (("nope",), "there is no recipe 'nope'"),
        ((), "plan needs a recipe"),
        (("none.json",), "the config none.json cannot be read"),
    ):
        status, _, err = ask(capsys, *words)
        assert status == 2
        assert sentence in err


def test_the_page_is_one_file_that_works_offline(recipe, capsys, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    ask(capsys, recipe, "--machine", "abci", "--gpus", "64,256", "--html", str(page))
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert len(text) > 3_000_000  # plotly's script is inside
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", text)
    assert text.count("One step on") == 2


def test_published_prints_the_table_of_the_docs(capsys):
    status, out, err = ask(capsys, "published", "--json")
    assert status == 0
    assert err.strip() in (DOCS / "planner.md").read_text()
    rows = json.loads(out)["rows"]
    assert all({"paper", "published", "predicted", "error"} <= set(row) for row in rows)


def test_today_prints_the_table_of_the_docs(capsys):
    status, out, _ = ask(capsys, "today")
    assert status == 0
    assert out.strip() == today.table()
    assert out.strip() in (DOCS / "todays-gpus.md").read_text()


def test_the_verb_answers_without_torch(recipe):
    code = (
        "import sys; from megabatch.cli import main; "
        f"main(['plan', {recipe!r}, '--gpus', '8,64']); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_bench_step_measures_and_the_planner_reads_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "bench",
        "step",
        "--micro",
        "8",
        "16",
        "--seconds",
        "0.05",
        "--device",
        "cpu",
        "--json",
    ]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["micro"] for row in rows] == [8, 16]
    assert all(row["images_per_second"] > 0 for row in rows)
    status, out, _ = ask(capsys, "digits", "--machine", "machine.json", "--gpus", "1", "--json")
    assert status == 0
    assert json.loads(out)["rows"][0]["images_per_second"] > 0
    status, _, err = ask(capsys, "digits", "--machine", "machine.json", "--gpus", "2")
    assert (status, "has no network" in err) == (2, True)


def test_a_model_of_ones_own_comes_as_json(capsys, tmp_path, recipe):
    own = tmp_path / "model.json"
    assert main(["bench", "step", "--model", "resnet18", "--export", str(own)]) == 0
    _, out, err = ask(capsys, recipe, "--gpus", "64", "--workload", str(own), "--json")
    assert "resnet18 was not measured on dgx-h100" in err
    assert json.loads(out)["rows"]
