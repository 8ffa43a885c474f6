"""The README and docs name only what exists: targets, verbs, flags, names, files, numbers'
commands."""

import dataclasses
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import megabatch as mb
from megabatch.cli import VERBS, main
from megabatch.errors import UserError
from megabatch.recipes import RECIPES
from megabatch.verbs import train as train_verb
from megabatch.verbs.parsing import flags_of

ROOT = Path(mb.__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/*.md")])
README = (ROOT / "README.md").read_text()


def commands(text):
    """Lines of shell blocks, continued lines joined, comments left out."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in (inside for language, inside in blocks if language in ("", "sh", "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            bare = re.sub(r"(^|\s)# .*", "", line)  # an apostrophe there is no quote
            words = shlex.split(bare) if bare.count("'") % 2 == 0 else []
            if words:
                yield words


def commands_of(program):
    return [
        (page.relative_to(ROOT).as_posix(), words[words.index(program) :])
        for page in PAGES
        for words in commands(page.read_text())
        if program in words
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)  # code has brackets too
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_command_has_a_verb_that_exists():
    found = commands_of("megabatch")
    assert len(found) > 10
    for page, words in found:
        if len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
            assert words[1] in VERBS, (page, words)


def test_every_train_command_would_be_accepted():
    checked = 0
    for page, (_, verb, *rest) in [c for c in commands_of("megabatch") if len(c[1]) > 2]:
        if verb != "train" or rest[0] not in RECIPES or any("$" in word for word in rest):
            continue
        if page == "docs/extending.md":  # whose commands are run, on a package with its diffs
            continue
        plain = [word for word in rest if word not in ("W", "...")]
        try:
            train_verb.read_flags(plain[0], plain[1:])
        except UserError as error:
            if "is not installed here" in str(error):  # a model of timm's or torchvision's
                continue
            raise AssertionError(f"{page}: {' '.join(rest)}: {error}") from None
        checked += 1
    assert checked >= 3


def flags_known(verb, rest):
    """The flags that a verb or its subject has, of all dataclasses that it reads them by."""
    names = [f"megabatch.verbs.{verb}"]
    if verb == "bench" and rest and not rest[0].startswith("-"):
        names = [f"megabatch.bench.{rest[0]}"]
    kinds = [
        kind
        for name in names
        for kind in vars(import_module(name)).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if kind.__module__ == name
    ]
    return {"--help", "--help-all"} | {flag for kind in kinds for flag in flags_of(kind)}


def test_every_flag_of_every_command_exists():
    checked = 0
    for page, (_, verb, *rest) in [c for c in commands_of("megabatch") if len(c[1]) > 1]:
        if verb not in VERBS:
            continue
        known = flags_known(verb, rest)
        for started in {"train", "study"} & {*rest} if verb == "launch" else ():
            known |= flags_known(started, rest[rest.index(started) + 1 :])
        for word in rest:
            if re.match(r"--[a-z]", word):
                assert word.partition("=")[0] in known, (page, verb, word)
                checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=" ".join(words[2:6]))
        for _, words in commands_of("megabatch")
        if words[1:2] == ["plan"] and not re.search(r"[A-Z]{3}|\.json|\.\.\.", " ".join(words))
    ],
)  # fmt: skip
def test_every_plan_command_is_answered(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page} {words[2]}")
        for page, words in commands_of("megabatch")
        if words[1:2] == ["launch"]
    ],
)
def test_every_launch_command_writes_its_script(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "--data.path" in words:
        Path(words[words.index("--data.path") + 1]).touch()
    assert main(words[1:]) == 0
    assert [path for path in tmp_path.iterdir() if path.read_text().startswith("#!/bin/sh")]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"install", "train", "test", "test-systems", "lint", "bench"} <= targets
    for page, words in commands_of("make"):
        assert words[1] in targets, page


def test_names_in_the_readmes_python_exist():
    for name in set(re.findall(r"\bmb\.([A-Za-z_]+)", README)):
        assert hasattr(mb, name), name
    assert mb.plans.prove(mb.plans.TORUS, y=3, x=5) is True
    lr = mb.join(mb.warmup(5, to=29.0), mb.poly(85, power=2))
    assert lr(5) == 29.0


def test_scripts_that_are_named_are_there():
    for page in PAGES:
        for script in re.findall(r"\b((?:benchmarks|examples|scripts)/\w+\.\w+)", page.read_text()):
            assert (ROOT / script).exists(), (page, script)


def test_the_tree_in_the_readme_names_rooms_that_exist():
    tree = README.split("## The tree")[1].split("```")[1]
    named = re.findall(r"\b(\w+\.py|\w+/)(?=\s|;|:|,|$)", tree)
    rooms = {path.name for path in (ROOT / "megabatch").glob("*.py")}
    folders = {path.name + "/" for path in (*ROOT.iterdir(), *(ROOT / "megabatch").iterdir())}
    for name in named:
        assert name in rooms | folders, name
    missing = {name for name in rooms - {"__init__.py"} if name not in tree}
    assert not missing
