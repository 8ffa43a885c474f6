"""Reports: charts drawn right, words escaped, anything in a run's files survived, nothing written
but the page."""

import html
import html.parser
import json
import math
import re
import shlex
import time

import pytest
from commands import megabatch
from run_folders import evaluation_line, layer_line, made_up, real_run, step_line

from megabatch import recipes
from megabatch.report import axes, charts, numbers
from megabatch.report.look import Section, page
from megabatch.report.named import names
from megabatch.report.run import report
from megabatch.report.settings import dotted
from megabatch.runs.record import read


class Balanced(html.parser.HTMLParser):
    """Every tag closed in its order; collects attributes and scripts."""

    EMPTY = frozenset({"meta", "link", "br", "line", "rect", "path"})

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    real_run(folder / "a")
    real_run(folder / "b", seed=1, precision="bf16")
    return folder


def test_a_page_of_two_runs_from_the_command(real, tmp_path):
    out = tmp_path / "report.html"
    result = megabatch("report", real / "a", real / "b", "--out", out, "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    text = out.read_text()
    assert told["nbytes"] == out.stat().st_size and told["bad_lines"] == 0
    assert list(tmp_path.iterdir()) == [out]
    checked(text)
    for words in ("Accuracy", "Loss", "Learning rate", "Batch", "Gradient noise scale", "Trust",
                  "Derived numbers", "Throughput", "Environment", "layer1.0.conv1.weight",
                  "peak rate", "precision", "momentum 0.9"):  # fmt: skip
        assert words in text, words
    # What the two agree in is behind a click; what differs is not.
    shown, hidden = re.split("<details>", text.split("<h2>Settings</h2>")[1])[:2]
    assert (
        "<td>seed</td>" in shown and "<td>precision</td>" in shown and "<td>epochs</td>" in hidden
    )


def test_a_page_names_nothing_outside_itself(real):
    text = report([read(real / "a")])
    found = checked(text)
    assert not [value for name, value in found.attributes if name == "src"]
    assert {value[:1] for name, value in found.attributes if name == "href"} == {"#", "d"}
    assert (
        "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;</script><!--"


def test_markup_in_any_word_of_a_run_is_text(tmp_path):
    name = HOSTILE.replace("/", "")
    lines = [step_line(0), step_line(1), evaluation_line(0.1), layer_line(HOSTILE, 0.1, 0.5)]
    lines += [layer_line(HOSTILE + "2", 0.1, 0.7)]
    folder = made_up(
        tmp_path / name,
        lines,
        config={"name": HOSTILE, HOSTILE: HOSTILE, "data": {HOSTILE: [HOSTILE]}},
        environment={HOSTILE: HOSTILE, "command": [HOSTILE], "began": HOSTILE},
        summary={"ended": HOSTILE, "top1": HOSTILE, "world": HOSTILE},
    )
    text = report([read(folder), read(made_up(tmp_path / "b", lines))])
    found = checked(text)
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    # Scripts: one of data a chart, and ours.
    assert text.count("<script") == text.count('<script type="application/json">') + 1
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text):
        json.loads(data)
    assert "layer1" not in text and "&lt;script&gt;alert(1)" in text


def test_only_the_pages_own_script_may_run():
    text = page("t", [Section("s", "<p>b</p>")], scripts=["let a = 1;"])
    # The hash of "let a = 1;", made by openssl dgst -sha256 -binary | base64.
    assert "script-src 'sha256-xY6QKfH9PRsQnLz56nj6MBwiK5oHg+im1Jkpdp1x/Ck='" in text
    assert "default-src 'none'" in text


def test_settings_are_told_as_a_reader_would(tmp_path):
    stages = [{"epoch": 1.4000000000000001, "batch": 128, "momentum": None}]
    config = {
        "epochs": 6.0,
        "flip": True,
        "stages": stages,
        "data": {"path": "", "sizes": [1, 2.5]},
    }
    told = dotted(read(made_up(tmp_path / "run", config=config)).config)
    assert told == {
        "epochs": "6", "flip": "true", "stages": "epoch 1.4, batch 128", "data.path": "",
        "data.sizes": "1, 2.5",
    }  # fmt: skip


def test_a_command_is_told_whole_and_can_be_given_again(tmp_path):
    command = ["megabatch", "study", *["--arms"] * 100, "a=--lr.warmup 0 --epochs 3"]
    text = report([read(made_up(tmp_path / "run", environment={"command": command}))])
    told = html.unescape(re.sub(r"</?span>", "", text))
    assert " ".join(shlex.join(command).split()) in " ".join(told.split())


def test_muons_last_layer_is_told_as_it_is(tmp_path):
    """The setting is on in the config, and without a meaning."""
    config = recipes.named("tiny", batch=4096)
    assert config.optimizer.adapt_head and not config.optimizer.head_adapts
    config = json.loads(config.to_json())
    text = report([read(made_up(tmp_path / "run", config=config))])
    row = text[text.index("optimizer.adapt_head") :].split("</tr>")[0]
    assert "false" in row and "true" not in row


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [made_up(tmp_path / parent / "run") for parent in ("x", "y")]
    assert names([read(folder) for folder in folders]) == ["x/run", "y/run"]


def test_an_empty_run_still_has_a_page(tmp_path):
    text = report([read(made_up(tmp_path / "run", config={}))])
    checked(text)
    assert "Curves" not in text and "run" in text


def test_faults_are_told(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0), "torn"])
    (folder / "environment.json").unlink()
    text = report([read(folder)])
    assert "environment.json is missing; 1 line of metrics.jsonl could not be read" in text


def test_a_config_without_end_is_not_counted_through(tmp_path):
    import megabatch as mb

    config = json.loads(mb.recipes.named("digits").to_json())
    lines = [step_line(0), evaluation_line(1.0)]
    slow = made_up(tmp_path / "run", lines, config={**config, "epochs": 1e5, "batch": 16},
                   summary={"world": 10**12})  # fmt: skip
    text = report([read(slow)])
    assert "no derived numbers: too many steps to count" in text


def test_a_long_run_makes_a_small_page_in_proportion(tmp_path):
    def page_and_seconds(steps):
        lines = [step_line(step, images=100_000) for step in range(steps)]
        epochs = range(1, steps // 1000 + 1)
        lines += [layer_line(f"layer{n}", epoch, 0.1 + n) for epoch in epochs for n in range(60)]
        folder, began = made_up(tmp_path / f"{steps}", lines), time.process_time()
        return report([read(folder)]), time.process_time() - began

    (_, short), (text, long) = page_and_seconds(6_000), page_and_seconds(60_000)
    assert len(text) < 1_500_000
    assert long < 30 * short


def test_hundreds_of_runs_fit_one_page(tmp_path):
    records = [read(made_up(tmp_path / str(n), [step_line(0), step_line(1)])) for n in range(120)]
    checked(report(records))


# --- the verb ---


def test_bad_input_is_one_sentence(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0)])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for arguments, sentence in (
        ([], "report needs a run"),
        ([tmp_path / "none"], "is not the folder of a run"),
        ([tmp_path], "is a folder of 1 run, not a run itself: name one of them"),
        ([folder, "--out", folder / "metrics.jsonl"], "the name of a report ends with .html"),
        ([folder, "--out", tmp_path / "no" / "r.html"], "cannot be written"),
        ([folder, "--ot", "r.html"], "--out"),
    ):
        result = megabatch("report", *arguments, cwd=tmp_path)
        assert result.returncode == 2 and sentence in result.stderr, (arguments, result.stderr)
        assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_run_named_twice_is_one(tmp_path):
    folders = [made_up(tmp_path / name, [step_line(0)]) for name in ("a", "b")]
    words = [folders[0], folders[1], f"{folders[0]}/", folders[1] / ".." / "b"]
    result = megabatch("report", *words, "--out", tmp_path / "r.html", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["runs"] == [str(f) for f in folders]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    folder = made_up(tmp_path / "run", [step_line(0)])
    kept, out = tmp_path / "kept", tmp_path / "report.html"
    kept.write_text("kept")
    out.symlink_to(kept)
    assert megabatch("report", folder, "--out", out).returncode == 0
    assert kept.read_text() == "kept" and not out.is_symlink()


# --- charts ---


def test_thinning_keeps_the_mean_the_least_and_the_largest():
    y = [float(n % 10) for n in range(3600)]
    (xs, ys), low, high = axes.thinned(range(3600), y)
    assert len(xs) == 360
    assert ys == [4.5] * 360 and low == [0.0] * 360 and high == [9.0] * 360


def test_thinning_leaves_short_lines_alone():
    (xs, ys), low, high = axes.thinned([0, 1, 2], [3.0, math.nan, 5.0])
    assert xs == [0, 1, 2] and ys[0] == 3.0 and math.isnan(ys[1]) and ys[2] == 5.0
    assert low[2] == high[2] == 5.0


def test_smoothing_is_the_weighted_mean_of_both_sides():
    values, known, keep = [4.0, math.nan, 1.0, 7.0], [4.0, 1.0, 7.0], 1 - 1 / 3

    def mean(numbers):  # the first counts most
        weights = [keep**n for n in range(len(numbers))]
        return sum(w * v for w, v in zip(weights, numbers, strict=True)) / sum(weights)

    found = axes.smoothed(values, 3)
    for at, place in enumerate((0, 2, 3)):
        expected = (mean(known[at::-1]) + mean(known[at:])) / 2
        assert found[place] == pytest.approx(expected)
    assert math.isnan(found[1])


def test_a_straight_line_stays_straight_but_for_its_ends():
    line = [2.0 * n for n in range(200)]
    found = axes.smoothed(line, 5)
    assert found[60:140] == pytest.approx(line[60:140], abs=1e-2)


def test_stairs_are_never_cut_off():
    text = charts.chart("t", [charts.Curve("l", 0, range(300), [1.0] * 299 + [64.0], "stairs")])
    tops = [float(y) for y in re.findall(r"V([-\d.]+)", text)]
    assert tops and min(tops) >= 0


@pytest.mark.parametrize(("low", "high", "ticks"), [
    (0, 10, [0, 2.5, 5, 7.5, 10]), (0, 6.05, [0, 2, 4, 6]), (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    (0.9, 0.90001, None),
])  # fmt: skip
def test_ticks_are_round_and_inside(low, high, ticks):
    found = axes.ChartAxis(low, high).ticks(4)
    assert len(found) >= 2 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    if ticks is not None:
        assert found == pytest.approx(ticks)


def test_ticks_of_powers():
    assert axes.ChartAxis(0.5, 2e4, True).ticks(5) == [1, 10, 100, 1000, 10000]


def test_a_line_stops_where_there_is_no_number():
    text = charts.chart("t", [charts.Curve("l", 0, [0, 1, 2, 3], [1.0, 2.0, math.nan, 3.0])])
    path = re.search(r'class="s"[^>]* d="([^"]*)"', text)[1]
    assert path.count("M") == 2 and path.count("L") == 1


def test_higher_values_are_drawn_higher():
    text = charts.chart("t", [charts.Curve("l", 0, [0, 1], [1.0, 2.0])])
    (first, second) = re.findall(r"[ML]([\d.]+) ([\d.]+)", re.search(r' d="([^"]*)"', text)[1])
    assert float(first[0]) < float(second[0]) and float(first[1]) > float(second[1])


def test_one_wild_value_does_not_flatten_the_rest():
    values = [1.0 + 0.001 * n for n in range(500)]
    values[250] = 1e30
    axis = axes.axis_of(values)
    assert axis.high < 4


def test_the_ramp_runs_from_dark_to_light():
    def light(colour):
        return sum(int(colour[at : at + 2], 16) for at in (1, 3, 5))

    shades = [light(charts.ramp(n / 20)) for n in range(21)]
    assert shades[0] < 160 and shades[-1] > 600
    assert shades == sorted(shades)


@pytest.mark.parametrize(("value", "words"), [
    (0, "0"), (1.23456, "1.235"), (12800, "12,800"), (1.5e6, "1.5M"), (3e-5, "3e-05"),
    (math.nan, numbers.UNKNOWN), (-2.5, "-2.5"), (65536, "65,536"),
])  # fmt: skip
def test_numbers_in_few_letters(value, words):
    assert numbers.short(value) == words


@pytest.mark.parametrize(("seconds", "words"), [
    (0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"),
    (200_000, "2 d 7 h"), (math.inf, numbers.UNKNOWN), (59.97, "1 min 0 s"),
])  # fmt: skip
def test_durations(seconds, words):
    assert numbers.duration(seconds) == words
