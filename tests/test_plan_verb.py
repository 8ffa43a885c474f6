"""megabatch plan and megabatch bench step, as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.planner import published
from megabatch.report import tables
from megabatch.report.numbers import duration

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
    assert "halving_doubling" in out and err == ""


@pytest.mark.parametrize(
    ("what", "key", "count"),
    [("grids", "grid", 6), ("buckets", "bucket_mb", 8), ("wire", "wire", 2)],
)
def test_compare(recipe, capsys, what, key, count):
    _, out, _ = ask(
        capsys, recipe, "--machine", "abci", "--gpus", "64", "--compare", what, "--json"
    )
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert len({json.dumps(row[key]) for row in rows}) == len(rows) == count


def test_a_target_time_finds_the_fewest_and_the_cheapest(recipe, capsys):
    _, out, _ = ask(capsys, recipe, "--machine", "hgx-h200", "--target-seconds", "600", "--json")
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert all(row["seconds_to_target"] <= 600 and row["gpus"] % 8 == 0 for row in rows)
    assert "the fewest and the cheapest" in out


def test_a_target_is_met_with_the_plan_and_the_buckets_that_are_given(recipe, capsys):
    words = ("--machine", "abci", "--target-seconds", "1250", "--json")
    best, given = (
        json.loads(ask(capsys, recipe, *words, *more)[1].splitlines()[-1])["rows"][0]
        for more in ((), ("--plan", "ring", "--bucket-mb", "2"))
    )
    assert (given["plan"], given["bucket_mb"]) == ("ring", 2)
    assert given["gpus"] > best["gpus"]


def test_the_table_fits_80_columns_and_marks_the_best_in_a_pipe(recipe):
    words = ["--machine", "p4d.24xlarge", "--gpus", "8,512,4096"]
    call = f"main(['plan', {recipe!r}, *{words}])"
    code = f"import sys; from megabatch.cli import main; sys.exit({call})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    begins = lines.index("") + 1  # the recipe and its settings stand above
    table = lines[begins : lines.index("", begins)]
    assert [line.split()[1] for line in table if line.startswith("*")] == ["8", "512", "4,096"]
    assert "$" in table[1] and "kWh" in ran.stdout and "nine of ten times" in ran.stdout


def test_rows_that_are_the_same_are_one_row_and_said_to_be(recipe, capsys):
    _, out, _ = ask(capsys, recipe, "--gpus", "8", "--compare", "buckets")
    table = out.split("\n\n")[1]
    assert len(table.splitlines()) == 2 and "+7" in table
    assert "the choice of bucket size does not matter" in out


def test_a_cliff_and_waste_are_said(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(published.imagenet("resnet50", 65536).to_json())
    _, out, _ = ask(capsys, str(config), "--machine", "abci", "--gpus", "1028")
    assert "leave 4 of 1,028 GPUs idle: 1,024 end in" in " ".join(out.split())
    config.write_text(published.imagenet("resnet50", 8192).to_json())
    _, out, _ = ask(capsys, str(config), "--gpus", "4096")
    assert "2,048 GPUs, half as many," in " ".join(out.split())


def test_a_page_that_cannot_be_written_gets_one_sentence(recipe, capsys, tmp_path):
    status, _, err = ask(capsys, recipe, "--gpus", "8", "--html", str(tmp_path / "no" / "x.html"))
    assert status == 2 and "x.html cannot be written: No such file" in err


def test_money_and_power_may_be_given(recipe, capsys):
    words = ("--gpus", "8", "--plan", "ring", "--price", "2", "--watts", "1000", "--json")
    (row,) = json.loads(ask(capsys, recipe, *words)[1].splitlines()[-1])["rows"]
    assert row["dollars"] == pytest.approx(2 * row["gpu_hours"])
    assert row["kwh"] == pytest.approx(row["gpu_hours"])


@pytest.mark.parametrize("model", ["vgg16", "resnet152", "efficientnet_b0", "convnext_tiny",
                                   "vit_b_16", "vit_l_16"])  # fmt: skip
def test_models_of_today_by_name(recipe, capsys, model):
    words = ("--gpus", "64", "--workload", model, "--json")
    status, out, _ = ask(capsys, recipe, *words)
    assert status == 0
    assert f"{model} was not measured on dgx-h100" in " ".join(out.split())
    assert json.loads(out.splitlines()[-1])["best"][0]["epochs"] == 90


def test_what_is_given_is_not_searched(recipe, capsys):
    given = ["--plan", "torus", "--grid", "16", "4", "--bucket-mb", "10", "--wire", "fp16"]
    _, out, _ = ask(capsys, recipe, "--machine", "abci", "--gpus", "64", *given, "--json")
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert [row[k] for k in ("plan", "grid", "bucket_mb", "wire")] == ["torus", [16, 4], 10, "fp16"]


def test_a_hybrid_is_a_plan_with_the_recipes_thresholds_or_ones_that_are_given(capsys):
    words = ("jia2018_alexnet", "--machine", "tencent-p40", "--gpus", "1024", "--json")
    given = ("--plan", "hybrid", "--grid", "64", "16", "--bucket-mb", "25")
    parted = []
    for more in (
        (),
        ("--hybrid.threshold-mb", "50"),
        ("--hybrid.small", "torus", "--hybrid.large", "three_phase"),
    ):
        status, out, _ = ask(capsys, *words, *given, *more)
        *table, result = out.splitlines()
        (row,) = json.loads(result)["rows"]
        assert status == 0 and row["plan"] == "hybrid" and row["grid"] == [64, 16]
        parted.append(row["parted"])
        (small, count), (large, others) = row["parted"]
        said = f"hybrid ({count} buckets by {small}, {others} buckets by {large}) on 64 x 16"
        assert said in " ".join(" ".join(table).split())
    assert parted == [
        [["hierarchical", 3], ["ring", 2]],
        [["hierarchical", 4], ["ring", 1]],
        [["torus", 3], ["three_phase", 2]],
    ]


def test_a_recipes_own_sum_is_told_beside_the_best(capsys):
    words = ("jia2018", "--machine", "tencent-p40", "--gpus", "512,1024")
    _, out, _ = ask(capsys, *words, "--json")
    result = json.loads(out.splitlines()[-1])
    assert "hybrid" in {row["plan"] for row in result["rows"]}
    own = result["as_configured"]
    assert [(row["gpus"], row["grid"], row["bucket_mb"], row["wire"]) for row in own] == [
        (512, [64, 8], 25.0, "fp16"), (1024, [128, 8], 25.0, "fp16")]  # fmt: skip
    asked = ("--plan", "hybrid", "--grid", "128", "8", "--bucket-mb", "25")
    _, same, _ = ask(capsys, *words[:-1], "1024", *asked, "--json")
    (row,) = json.loads(same.splitlines()[-1])["rows"]
    assert row == own[1]
    said = " ".join(out.split())
    assert "as the recipe sums: 1,024 GPUs, hybrid (5 buckets by hierarchical, 0 buckets" in said
    for others in (("--wire", "fp32"), ("--plan", "ring"), ("--compare", "buckets")):
        assert "as the recipe sums" not in ask(capsys, *words, *others)[1]


def test_the_pass_is_as_large_as_asked_for(recipe, capsys):
    ask_for = ["--machine", "hgx-h200", "--gpus", "8", "--plan", "ring", "--json"]
    whole, parts = (
        json.loads(ask(capsys, recipe, *ask_for, *more)[1].splitlines()[-1])["rows"][0]
        for more in ((), ("--micro", "256"))
    )
    assert (whole["micro"], parts["micro"]) == (1024, 256)
    assert parts["images_per_second"] < whole["images_per_second"]


def test_another_batch_and_length(recipe, capsys):
    _, out, _ = ask(capsys, recipe, "--gpus", "8", "--batch", "4096", "--epochs", "9", "--json")
    row = json.loads(out.splitlines()[-1])["rows"][0]
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
        (("--epochs", "0"), "--epochs is 0; give a length above 0"),
        (("--epochs", "nan"), "--epochs is nan"),
        (("--batch", "0"), "--batch is 0; give at least 1 image"),
        (("--bucket-mb", "-5"), "buckets of -5 MB hold nothing: give a size above 0"),
        (("--bucket-mb", "nan"), "buckets of nan MB hold nothing"),
        (("--target-seconds", "-5"), "a run in -5 s cannot be: give a time above 0"),
        (("--target-seconds", "nan"), "a run in nan s cannot be"),
        (("--price", "-1"), "--price is -1; give a number from 0 on"),
        (("--workload", "vgg"), "did you mean vgg16?"),
        (("--workload", ""), "--workload is empty: give it a value"),
        (("--gpus", "8", "--grid", "-1", "-8"), "a grid of -1 x -8 is none"),
        (("--machine", "abci", "--target-seconds", "1"), "the fastest, "),
        (("--target-seconds", "60", "--gpus", "8"), "finds the number of GPUs: leave --gpus away"),
        (("--target-seconds", "60", "--grid", "2", "4"), "leave --grid away"),
        (("--target-seconds", "60", "--compare", "wire"), "leave --compare away"),
        (("--target-seconds", "60", "--plan", "toros"), "did you mean torus?"),
        (("--plan", "hybird"), "did you mean hybrid?"),
        (("--plan", "hybrid:ring"), "there is no plan 'hybrid'"),
        (("--plan", "hybrid", "--hybrid.small", "toros"), "did you mean torus?"),
        (("--plan", "hybrid", "--hybrid.large", "hybrid"), "there is no plan 'hybrid'"),
        (("--plan", "hybrid", "--hybrid.threshold-mb", "0"), "hybrid.threshold_mb is 0"),
        (("--hybrid.threshold-mb", "5"), "has no hybrid plan to change: add --plan hybrid"),
        (("--plan", "ring", "--hybrid.small", "ring"), "has no hybrid plan to change"),
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
    page = tmp_path / "plan.html"
    ask(capsys, recipe, "--machine", "abci", "--gpus", "64,256", "--html", str(page))
    text = page.read_text()
    assert len(text) < 2_000_000
    assert not re.search(r"<(script|img)|https?:", text)
    assert 'name="viewport"' in text and "prefers-color-scheme:dark" in text


def test_the_pages_timelines_are_of_the_steps_in_its_table(capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = ("mikami2018", "--machine", "abci", "--gpus", "1024", "--html", str(page), "--json")
    (best,) = json.loads(ask(capsys, *words)[1].splitlines()[-1])["best"]
    text = page.read_text()
    steps = [f"{1e3 * stage['step_seconds']:,.2f}" for stage in best["stages"]]
    assert len(steps) == 2
    assert f"steps of {' and '.join(steps)} ms" in text
    for batch, step in zip((34_816, 69_632), steps, strict=True):
        assert re.search(rf"batch {batch:,}, stage . of 2: 1,104 steps of {step} ms", text)
        assert f"<span>worker</span><span>{step} ms</span>" in text
    assert " to ".join(map(duration, best["interval"])) in text


def test_published_prints_the_table_of_the_docs(capsys):
    status, out, err = ask(capsys, "published", "--json")
    assert status == 0
    *table, result = out.splitlines()
    assert "\n".join(table) in (DOCS / "planner.md").read_text() and err == ""
    rows = json.loads(result)["rows"]
    assert all({"paper", "published", "predicted", "error"} <= set(row) for row in rows)


def test_today_prints_the_table_of_the_docs(capsys):
    status, out, _ = ask(capsys, "today")
    assert status == 0
    assert out.strip() == tables.today()
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
    # A CPU's peak is not known.
    monkeypatch.setattr("megabatch.bench.step.share_of_peak", lambda *_: 0.25)
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
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["micro"] for row in rows] == [8, 16]
    assert all(row["images_per_second"] > 0 and row["peak_share"] == 0.25 for row in rows)
    status, out, _ = ask(capsys, "digits", "--machine", "machine.json", "--gpus", "1", "--json")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["rows"][0]["images_per_second"] > 0
    status, _, err = ask(capsys, "digits", "--machine", "machine.json", "--gpus", "2")
    assert (status, "has no network" in err) == (2, True)


def test_a_model_of_ones_own_comes_as_json(capsys, tmp_path, recipe):
    own = tmp_path / "model.json"
    assert main(["bench", "step", "--model", "resnet18", "--export", str(own)]) == 0
    _, out, _ = ask(capsys, recipe, "--gpus", "64", "--workload", str(own), "--json")
    assert "resnet18 was not measured on dgx-h100" in " ".join(out.split())
    assert json.loads(out.splitlines()[-1])["rows"]


LAYER = {"name": "one", "parameters": [1000], "multiply_adds": 10**6, "outputs": 1000}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ([1], "it has no list of layers"),
        ({"layers": []}, "none of its layers has parameters"),
        ({"layers": [5]}, "its layer 1 is 5, not an object"),
        ({"layers": [LAYER | {"parameters": [10**400]}]}, "a tensor of its layer 1 is 1000"),
        ({"layers": [LAYER | {"outputs": 1.5}]}, "outputs of its layer 1 is 1.5, not a whole"),
        ({"layers": [LAYER | {"multiply_ads": 5}]}, "did you mean multiply_adds?"),
        ({"name": "a\x1b[1m", "layers": [LAYER]}, "its name is 'a\\x1b[1m', not a line of text"),
    ],
)  # fmt: skip
def test_a_wrong_model_gets_one_sentence(capsys, tmp_path, recipe, text, sentence):
    own = tmp_path / "model.json"
    own.write_text(text if isinstance(text, str) else json.dumps(text))
    status, out, err = ask(capsys, recipe, "--gpus", "8", "--workload", str(own))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert len(err) < 400


def test_a_model_may_have_a_long_name_and_a_mark_before_it(capsys, tmp_path, recipe):
    own = tmp_path / "model.json"
    own.write_text("\ufeff" + json.dumps({"name": "package." * 40 + "Net", "layers": [LAYER]}))
    status, out, _ = ask(capsys, recipe, "--gpus", "8", "--workload", str(own))
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80


def test_any_module_is_exported_with_its_attention(capsys, tmp_path, recipe, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.patches = nn.Conv2d(3, 64, 16, 16)\n"
        "        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)\n"
        "        self.head = nn.Linear(64, 1000)\n"
        "    def forward(self, images):\n"
        "        tokens = self.patches(images).flatten(2).transpose(1, 2)\n"
        "        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))\n"
        "number = 5\n"
    )
    words = ["bench", "step", "--model", "ours:Net", "--export", "ours.json"]
    assert main(words) == 0
    (attention,) = (
        layer
        for layer in json.loads(Path("ours.json").read_text())["layers"]
        if layer["name"] == "attention"
    )
    # four products of 64 x 64 a token, and 196 x 196 x 64 twice
    assert attention["multiply_adds"] == 4 * 196 * 64 * 64 + 2 * 196 * 196 * 64
    status, out, _ = ask(capsys, recipe, "--gpus", "8", "--workload", "ours.json", "--json")
    assert status == 0 and json.loads(out.splitlines()[-1])["rows"]
    for wrong in ("ours:number", "ours:nothing", "theirs:Net"):
        assert main([*words[:3], wrong, *words[4:]]) == 2
        err = capsys.readouterr().err
        assert "ours" in err or "theirs" in err
        assert err.count("\n") == 1


def test_the_settings_of_a_batch_and_what_is_not_known_of_it_stand_beside_the_times(capsys):
    status, out, _ = ask(capsys, "mlperf", "--batch", "32768", "--gpus", "8", "--json")
    words = " ".join(out.split())
    assert status == 0 and "a batch of 32,768, 58 epochs: LARS at a rate of" in words
    found = json.loads(out.splitlines()[-1])
    assert found["settings"] in words and found["doubts"] == []
    status, out, _ = ask(
        capsys, "mlperf", "--batch", "32768", "--gpus", "8", "--keep-epochs", "--json"
    )
    kept = json.loads(out.splitlines()[-1])
    assert "a batch of 32,768, 37 epochs: LARS" in kept["settings"]
    (cost,) = kept["doubts"]
    assert "37 are expected to cost" in cost and f"note: {cost}" in " ".join(out.split())
    assert kept["best"][0]["seconds_to_target"] < found["best"][0]["seconds_to_target"]
    status, _, err = ask(capsys, "goyal2017", "--keep-epochs")
    assert status == 2 and "goyal2017 keeps its epochs at any batch" in err
    _, out, _ = ask(capsys, "mikami2018", "--gpus", "8")
    assert "a batch of 34,816, then 69,632, 90 epochs: LARS at a rate of" in " ".join(out.split())
