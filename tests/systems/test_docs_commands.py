"""Every command of the README and the docs is run, in its page's order, where what it asks for is
there: small images for ImageNet, a step for an epoch. Plans and launch scripts are tested in
tests/test_docs.py, the tutorial, extensions, examples and launchers by tests of their own.
"""

import importlib.util
import re
import shutil

import pictures
import pytest
from commands import megabatch_process
from PIL import Image
from test_docs import ROOT, commands_of

from megabatch.cli import VERBS

pytestmark = [pytest.mark.systems, pytest.mark.timeout(1800)]

ELSEWHERE = {"docs/tutorial.md", "docs/extending.md", "docs/chaos.md"}
WORDS = {"FOLDER": "pictures", "PICTURES": "pictures", "SOURCE": "pictures", "RECIPE": "digits"}
WORDS |= {"/data/runs": "runs", "W": "2"}
# The least that is still the same command: what an ImageNet would need is replaced.
SMALL = {"--epochs": "0.0001", "--workers": "2", "--device": "cpu", "--max-restarts": "3"}
SMALL_NET = {"--model": "small", "--data.size": "8", "--precision": "fp32", "--data.resize": "0"}
STUDY = {"--seeds": "1"}
BENCH = {
    "loader": {"--seconds": "0.1", "--turns": "1", "--size": "32", "--most": "16", "--micro": "4"},
    # Two nodes, which the page's machine.json is of, are not here.
    "sync": {"--sizes": "1024", "--repeats": "3", "--workers": "2", "--machine": "this.json"},
    "step": {"--model": "small", "--precision": "fp32", "--seconds": "0.1"},
}

COMMANDS = [
    (page, words) for page, words in commands_of("megabatch") if words[1:2] and words[1] in VERBS
]
PAGES = {
    page: [words[1:] for at, words in COMMANDS if at == page]
    for page, _ in COMMANDS
    if page not in ELSEWHERE and not page.startswith("results/")
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with all that pages take for granted."""
    top = tmp_path_factory.mktemp("stage")
    pictures.folder(top / "pictures", classes=("ant", "bee"), each=24, val=4)
    for name in ("cat.jpg", "dog.png"):
        Image.new("RGB", (40, 30), (200, 120, 40)).save(top / name)
    done(top, "pack", "pictures", "imagenet.arrow", "--raw", "--size", "8")
    shutil.copy(top / "imagenet.arrow", top / "tiny.arrow")
    given = ["--data.path", "pictures", "--data.channels", "3", "--workers", "1", "--epochs", "0.1"]
    resnet = ["--model", "resnet18", "--data.size", "32", "--out"]
    for name in ("a", "b", "large", "NAME"):
        done(top, "train", "digits", *given, *resnet, f"runs/{name}")
    done(top, "export", "runs/a", "--out", "weights.safetensors")
    shutil.copy(ROOT / "results" / "sync" / "machine.json", top)
    done(top, "bench", "step", "--micro", "16", *changed([], BENCH["step"]))
    return top


def done(folder, *words):
    ended = megabatch_process(*words, cwd=folder)
    assert ended.returncode == 0, (words, ended.stderr)
    assert "Traceback" not in ended.stderr, words
    return ended


def changed(words, settings):
    """The words with each setting's value replaced, or put behind them."""
    words = [*words]
    for flag, value in settings.items():
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


def small(verb, *rest):
    words = [WORDS.get(word, word).replace("OUT.arrow", "out.arrow") for word in rest]
    if "--help" in words:
        return [verb, *words]
    if verb == "bench":
        return [verb, *changed(words, BENCH[words[0]])]
    if verb == "plan":  # whose example is a cluster's
        return [verb, *("mikami2018" if word == "RECIPE" else word for word in rest)]
    if verb not in ("train", "study"):
        return [verb, *words]
    settings = dict(SMALL)
    if "--lr.warmup" in words or any(re.fullmatch(r"\d+:\d+", word) for word in words):
        settings.pop("--epochs")  # what they name lies in a run of that length
    whole_images = "imagenet.arrow" in words or "tiny.arrow" in words
    own_net = any(word.startswith(("timm:", "torchvision:")) for word in words)
    if whole_images:
        settings |= SMALL_NET if not own_net else {"--data.size": "32"}
        words += ["--no-half-weights"]
        words = [re.sub(r"--model alexnet_bn ?", "", word) for word in words]
    if "--data.size" in words and not whole_images:
        settings["--data.size"] = "32"
    return [verb, *changed(words, settings | (STUDY if verb == "study" else {}))]


def lacking(words):
    """What a command needs that is not here."""
    if "pretrained" in words:
        return "weights from the network"
    for library in ("timm", "torchvision"):
        if any(word.startswith(f"{library}:") for word in words):
            return "" if importlib.util.find_spec(library) else library
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_do_what_they_say(page, stage, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(stage, folder, symlinks=True)
    ran = 0
    for verb, *rest in PAGES[page]:
        if verb == "launch" or lacking(rest):
            continue
        words = small(verb, *rest)
        if "--out" in words:
            target = folder / words[words.index("--out") + 1]
            if verb in ("train", "study") and "--resume" not in words:
                shutil.rmtree(target, ignore_errors=True)
        if verb == "pack" and "--verify" not in words:
            (folder / words[2]).unlink(missing_ok=True)
        done(folder, *words)
        ran += 1
    assert ran


def test_no_page_is_forgotten():
    assert {"README.md", "docs/one-gpu.md", "docs/leaving.md", "docs/reports.md"} <= {*PAGES}
    assert all((ROOT / page).exists() for page in ELSEWHERE)
