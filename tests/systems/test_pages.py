"""Reports in a real browser: drawn, silent on the console, asking the network for nothing, on a
laptop and on a phone, in light and in dark. MEGABATCH_PICTURES=DIR keeps pictures to look at."""

import json
import os
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from browser import CHROMIUM, Browser
from run_folders import evaluation_line, layer_line, made_up, real_run, step_line
from studies import changed, made_up_run

from megabatch.report.figure import error_figure
from megabatch.report.run import report
from megabatch.report.study import study_page
from megabatch.runs.record import read
from megabatch.study import results

pytestmark = [pytest.mark.systems, pytest.mark.timeout(300)]

LAPTOP, PHONE = 1200, 390
HOSTILE = "<img src=x onerror=console.error(1)><script>console.error(2)<\\script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert CHROMIUM, "there is no Chromium: scripts/install-systems.sh installs it"
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of two real runs."""
    top = tmp_path_factory.mktemp("pages")
    real_run(top / "first")
    real_run(top / "second", batch=128, precision="bf16", stages=())
    out = top / "report.html"
    out.write_text(report([read(top / "first"), read(top / "second")]))
    return out


def picture(browser, name):
    folder = os.environ.get("MEGABATCH_PICTURES")
    if folder:
        browser.picture(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_a_report_is_drawn(browser, page, tmp_path, width, dark):
    browser.show(page, width, dark=dark)
    picture(browser, f"report-{width}-{'dark' if dark else 'light'}")
    assert browser.console == []
    assert browser.requests == [page.resolve().as_uri()]
    # Nothing sticks out to the side, and charts have a size and something in them.
    assert browser.run("document.documentElement.scrollWidth") == width
    boxes = browser.run(
        "[...document.querySelectorAll('.plot svg')].map(s => {"
        " const b = s.getBoundingClientRect();"
        " return [b.left, b.right, b.width, b.height, s.querySelectorAll('path, rect').length] })"
    )
    assert len(boxes) >= 9
    for left, right, wide, high, parts in boxes:
        assert 0 <= left < right <= width and wide > 200 and high > 100 and parts >= 1
    # The page's ground is what the reader's system asks for.
    browser.picture(tmp_path / "top.png", whole=False)
    corner = numpy.asarray(Image.open(tmp_path / "top.png").convert("L"))[-5:, :5].mean()
    assert corner < 40 if dark else corner > 220


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_stand_out_from_their_ground(browser, page, dark):
    """The contrast that the accessibility guidelines ask of text, 4.5 to 1, for every word."""
    browser.show(page, LAPTOP, dark=dark)
    found = browser.run(CONTRAST)
    assert len(found) > 100
    low = [row for row in found if row["contrast"] < 4.5]
    assert low == []


CONTRAST = """
(() => {
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parts = words => words.match(/[\\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
  const out = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.tagName === "SCRIPT" || !e.getClientRects().length) continue;
    const a = light(parts(getComputedStyle(e).color).slice(0, 3)), b = light(ground(e));
    out.push({ words: e.textContent.slice(0, 30),
               contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) });
  }
  return out;
})()
"""


def centre_of(browser, selector):
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    return browser.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        " return [b.left + b.width / 2, b.top + b.height / 2] })()"
    )


def test_pointing_at_a_chart_tells_its_values(browser, page):
    browser.show(page, LAPTOP)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    assert browser.run("document.querySelector('.tip').hidden")
    browser.move_to(*centre_of(browser, ".charts figure .plot"))
    told = browser.run("document.querySelector('.tip').innerText")
    assert "epoch" in told and "first, evaluation" in told and "second, training" in told
    assert "%" in told
    box = browser.run("(() => { const b = document.querySelector('.tip').getBoundingClientRect();"
                      " return [b.left, b.right, b.top, b.bottom] })()")  # fmt: skip
    assert box[0] >= 0 and box[1] <= LAPTOP and box[2] >= 0 and box[3] <= 900
    browser.move_to(*centre_of(browser, ".heat .plot"))
    assert "weight" in browser.run("document.querySelector('.tip').innerText")
    browser.move_to(2, 2)
    assert browser.run("document.querySelector('.tip').hidden")
    assert browser.console == []


def test_a_run_can_be_hidden_and_shown(browser, page):
    browser.show(page, LAPTOP)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    shown = (
        "[...document.querySelectorAll('svg [data-run=\"1\"]')]"
        ".filter(p => getComputedStyle(p).display !== 'none').length"
    )
    before = browser.run(shown)
    assert before >= 6
    browser.click(*centre_of(browser, 'button[data-run="1"]'))
    assert browser.run(shown) == 0
    browser.click(*centre_of(browser, 'button[data-run="1"]'))
    assert browser.run(shown) == before


def test_without_scripts_the_charts_are_there_all_the_same(browser, page):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.show(page, PHONE, drawn=False)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("document.querySelectorAll('.plot svg path').length") > 20
    assert browser.run("document.querySelectorAll('.tip').length") == 0


def test_a_hostile_run_does_nothing(browser, tmp_path):
    lines = [step_line(0), step_line(1), evaluation_line(0.1), layer_line(HOSTILE, 0.1, 0.5)]
    lines += [json.dumps({"kind": "train", "epoch": float("nan"), "loss": 1e308, "lr": HOSTILE})]
    folder = made_up(
        tmp_path / HOSTILE,
        lines,
        config={"name": HOSTILE, HOSTILE: HOSTILE},
        environment={HOSTILE: [HOSTILE], "command": [HOSTILE] * 3},
        summary={"ended": HOSTILE, "top1": HOSTILE},
    )
    out = tmp_path / "report.html"
    out.write_text(report([read(folder)]))
    browser.show(out, PHONE)
    assert browser.console == [] and browser.requests == [out.resolve().as_uri()]
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == f"megabatch: {HOSTILE}"
    assert browser.run("document.documentElement.scrollWidth") == PHONE


def test_a_long_name_leaves_the_results_in_sight(browser, tmp_path):
    """On a laptop, where names of the usual length stand in one line."""
    lines = [step_line(0), step_line(1), evaluation_line(0.1)]
    runs = [made_up(tmp_path / name, lines) for name in ("digits-20261116-032334", "long " * 40)]
    out = tmp_path / "report.html"
    out.write_text(report([read(run) for run in runs]))
    browser.show(out, LAPTOP)
    tables = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"
    assert browser.run(tables)[0] == 0
    high = "[...document.querySelectorAll('tbody .called')].map(n => n.clientHeight)"
    one, many = browser.run(high)[:2]
    assert one < 30 < many


def test_the_pages_policy_stops_what_would_slip_through(browser, page, tmp_path):
    """Markup put into a finished page by hand: the browser refuses to run or fetch it."""
    slipped = "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x.png'>"
    out = tmp_path / "report.html"
    out.write_text(page.read_text().replace("</main>", f"{slipped}</main>"))
    browser.show(out)
    assert browser.run("document.title") != "run"
    assert browser.blocked == ["http://127.0.0.1:9/x.png"]
    assert browser.requests == [out.resolve().as_uri()]
    assert browser.console != []  # it says so


def test_a_long_run_is_drawn_at_once(browser, tmp_path):
    lines = [step_line(n, images=50_000, loss=1 / (1 + n % 97)) for n in range(40_000)]
    names = [f"layer{n}.some.block.conv.weight" for n in range(60)]
    lines += [layer_line(n, e, 0.01 * e, 50_000) for e in range(1, 81) for n in names]
    lines += [evaluation_line(e, 50_000, top1=e / 100) for e in range(1, 81)]
    out = tmp_path / "report.html"
    out.write_text(report([read(made_up(tmp_path / "run", lines))]))
    browser.show(out)
    picture(browser, "long-1280-light")
    milliseconds = browser.run(
        "(() => { const t = performance.getEntriesByType('navigation')[0];"
        " return t.loadEventEnd - t.startTime })()"
    )
    assert browser.console == [] and milliseconds < 5000


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The page of a study with arms, rates and a probe."""
    top = tmp_path_factory.mktemp("study")
    for batch, top1s in ((64, (0.90, 0.91, 0.92)), (256, (0.89, 0.91, 0.9)), (1024, (0.7, 0.72))):
        for seed, top1 in enumerate(top1s):
            made_up_run(top, batch, seed, top1)
            made_up_run(top, batch, seed, top1 - 0.1, arm="sgd")
        for factor in (0.5, 1, 2):
            made_up_run(top, batch, 0, 0.8 - 0.1 * (factor - 1) ** 2, kind="rate", factor=factor)
    made_up_run(top, 1024, 0, 0.3, kind="probe", noise=600.0)
    found = results.read(top)
    (top / "report.html").write_text(study_page(found))
    (top / "error.svg").write_text(error_figure(found, "error against batch"))
    return top / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_a_study_is_drawn(browser, study, width, dark):
    browser.show(study, width, dark=dark)
    picture(browser, f"study-{width}-{'dark' if dark else 'light'}")
    assert browser.console == []
    assert browser.requests == [study.resolve().as_uri()]
    assert browser.run("document.documentElement.scrollWidth") == width
    if width == LAPTOP:  # every section is in sight above
        hidden = "(n => n.scrollWidth - n.clientWidth)(document.querySelector('nav'))"
        assert browser.run(hidden) == 0
    boxes = browser.run(
        "[...document.querySelectorAll('.plot svg')].map(s => {"
        " const b = s.getBoundingClientRect();"
        " return [b.left, b.right, b.width, b.height, s.querySelectorAll('path').length] })"
    )
    assert len(boxes) >= 6
    for left, right, wide, high, parts in boxes:
        assert 0 <= left < right <= width and wide > 200 and high > 100 and parts >= 2
    found = browser.run(CONTRAST)
    assert len(found) > 100
    assert [row for row in found if row["contrast"] < 4.5] == []


def test_differences_end_below_each_other(browser, study):
    for seed in range(2):
        made_up_run(study.parent, 64, seed, 0.5, arm="no_warmup")
    page = study.with_name("two-arms.html")
    page.write_text(study_page(results.read(study.parent)))
    browser.show(page, LAPTOP)
    ends = browser.run(
        "[...document.querySelector('.versus').querySelectorAll('.n')].map(n => {"
        " const words = document.createRange(); words.selectNodeContents(n);"
        " return words.getBoundingClientRect().right })"
    )
    assert len(ends) == 2 and ends[0] == pytest.approx(ends[1], abs=0.5)


@pytest.mark.parametrize("finishes", [True, False])
def test_the_longest_name_of_an_arm_fits_a_phone(browser, tmp_path, finishes):
    made_up_run(tmp_path, 64, 0, 0.9)
    folder = made_up_run(tmp_path, 64, 0, 0.5, arm="long" * 25)
    if not finishes:
        (folder / "summary.json").unlink()
        changed(folder / "trial.json", failure="it diverged")
    page = tmp_path / "report.html"
    page.write_text(study_page(results.read(tmp_path)))
    browser.show(page, PHONE)
    assert browser.run("document.documentElement.scrollWidth") == PHONE


def test_pointing_at_a_batch_tells_its_values(browser, study):
    browser.show(study, LAPTOP)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.move_to(*centre_of(browser, ".charts figure .plot"))
    told = browser.run("document.querySelector('.tip').innerText")
    assert "batch 256" in told and "recipe" in told and "10.00 %" in told
    assert browser.console == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_figure_of_a_study_is_drawn(browser, study, tmp_path, dark):
    figure = study.with_name("error.svg")
    browser.show(figure, 800, 500, dark=dark, drawn=False)
    browser.picture(tmp_path / "figure.png", whole=False)
    assert browser.console == [] and browser.requests == [figure.resolve().as_uri()]
    drawn = numpy.asarray(Image.open(tmp_path / "figure.png").convert("L"))
    assert drawn[200, 380] < 60 if dark else drawn[200, 380] > 200
