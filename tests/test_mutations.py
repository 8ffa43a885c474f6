"""3,000 changed files, drawn from seeds: configs, states of checkpoints, metrics, packs and machine
files, the first half of them with the ordinary tests. Each is read right or gets one sentence;
nothing is written, and none takes long.

They are read in this process, a few milliseconds each; what verbs make of changed folders is in
test_run_folder.py.
"""

import hashlib
import json
import math
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

import pictures
import pytest
from test_config_json import CONFIGS, DEFAULTS, completed, is_sane, same
from test_config_json import mutated as mutated_value
from test_machine_file import GOOD
from test_pack import mutations as mutated_packs
from test_pack import packed
from test_run_folder import ALONE

import megabatch as mb
from megabatch.config import Config
from megabatch.data.packs.reading import Pack, PackError
from megabatch.errors import UserError
from megabatch.parts import assemble, prepared
from megabatch.planner import load
from megabatch.planner.published import imagenet
from megabatch.planner.search import forecast
from megabatch.report.run import report
from megabatch.runs import checkpoint, record
from megabatch.runs.folder import State
from megabatch.verbs.runs import run_numbers

some_and_all = pytest.mark.parametrize(
    "each", [300, pytest.param(600, marks=pytest.mark.systems)], ids=["half", "all"]
)
SECONDS = 60.0
"""of a core, for one file"""
CONFIG = replace(mb.recipes.named("digits", epochs=2), keep=1, ema=0.9)
FILES = ("state.json", "optimizer.safetensors", "extra.safetensors", "model.safetensors")


def read_or_refused(outside, read, *arguments):
    """Whether a file was read; else it got one sentence. Nothing may be opened for writing."""
    outside.allowed, outside.found = ("/nowhere",), []
    began = time.process_time()
    try:
        read(*arguments)
        return True
    except (UserError, PackError) as error:
        assert "\n" not in str(error) and 0 < len(str(error)) < 1000
        return False
    finally:
        outside.allowed = None
        assert outside.found == []
        assert time.process_time() - began < SECONDS


def damaged(text, chance):
    """Some bytes other than they were."""
    text = bytearray(text)
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(len(text) + 1)
        match chance.choice(["flip", "cut", "end", "byte", "double"]):
            case "flip" if place < len(text):
                text[place] ^= 1 << chance.randrange(8)
            case "cut":
                del text[place : place + chance.choice([1, 3, 100])]
            case "end":
                del text[place:]
            case "byte":
                text[place : place + 1] = chance.choice([b"\0", b'"', b"{", b"]", b"9e", b"\xff"])
            case "double":
                text[place:place] = text[place : place + 40]
    return bytes(text)


def changed(value, chance):
    """JSON with a value changed here or there, or bytes of it."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        with suppress(OverflowError):  # of a number that has grown before
            value = mutated_value(value, chance)
        if not isinstance(value, dict) or not value:
            break
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return text if chance.random() < 0.7 else damaged(text, chance)


@some_and_all
def test_configs(outside, tmp_path, each):
    chance, path = random.Random(1), tmp_path / "config.json"

    def read():
        config = Config.read(path)
        assert same(json.loads(config.to_json()), completed(json.loads(text), DEFAULTS))
        is_sane(config)

    found = []
    for _ in range(each):
        text = changed(chance.choice(CONFIGS), chance)
        path.write_bytes(text)
        found.append(read_or_refused(outside, read))
    assert min(found.count(True), found.count(False)) > each / 30


@some_and_all
def test_machine_files(outside, tmp_path, each):
    chance, path = random.Random(2), tmp_path / "machine.json"

    def read():
        taken = forecast(imagenet("resnet50", 512, 1.0), load(str(path)), 16)
        assert 0 < taken.interval[0] < taken.seconds_to_target < taken.interval[1] < math.inf

    found = []
    for _ in range(each):
        path.write_bytes(changed(GOOD, chance))
        found.append(read_or_refused(outside, read))
    assert min(found.count(True), found.count(False)) > each / 12


@pytest.fixture(scope="module")
def parts():
    """What a checkpoint is loaded into."""
    with ExitStack() as ending:
        net = ending.enter_context(prepared(CONFIG, ALONE, 10))
        yield ending.enter_context(assemble(CONFIG, ALONE, net))


@some_and_all
@pytest.mark.parametrize("means_it", [False, True], ids=["damaged", "sealed"])
def test_states(outside, finished, parts, tmp_path, means_it, each):
    """Damage is found by the checksums; who means it makes them fit."""
    chance = random.Random(3 + means_it)
    saved = next((finished / "checkpoints").iterdir())
    whole = {path.name: path.read_bytes() for path in saved.iterdir()}
    path = tmp_path / saved.name
    path.mkdir()

    def read():
        found = checkpoint.newest(tmp_path)
        if found is None:
            raise UserError("left out")
        with checkpoint.fitting(found):
            state = State.of(checkpoint.load(found, parts), len(CONFIG.all_stages))
        written = json.loads(files["state.json"])["state"]
        assert json.dumps({**asdict(state), **written}) == json.dumps(asdict(state))  # nan is nan

    read_ = []
    for _ in range(each // 2):
        files, name = dict(whole), chance.choice((*FILES, *([] if means_it else ["manifest.json"])))
        if name == "state.json":
            files[name] = changed(json.loads(whole[name]), chance)
        else:
            files[name] = damaged(whole[name], chance)
        if means_it:
            entries = {
                one: {"nbytes": len(files[one]), "sha256": hashlib.sha256(files[one]).hexdigest()}
                for one in FILES
            }
            files["manifest.json"] = checkpoint._manifest(entries)
        for one, data in files.items():
            (path / one).write_bytes(data)
        read_.append(read_or_refused(outside, read) and files != whole)
    if means_it:
        assert min(read_.count(True), read_.count(False)) > each / 20
    else:
        assert read_.count(True) == 0


@some_and_all
def test_metrics(outside, finished, tmp_path, each):
    chance, path = random.Random(5), tmp_path / "run"
    path.mkdir()
    for name in ("config.json", "environment.json", "summary.json"):
        (path / name).write_bytes((finished / name).read_bytes())
    lines = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)

    def read():
        found = record.read(path)
        json.dumps(run_numbers(found, time.time()), allow_nan=False)
        assert run_numbers(record.glance(path), time.time())["recipe"] == "digits"
        assert len(found.steps) <= len(changed_lines)
        if turn % 20 == 0:
            assert "<html" in report([found])

    for turn in range(each):  # noqa: B007, read() reads it
        changed_lines = list(lines)
        for _ in range(chance.choice([1, 3, 20])):
            place = chance.randrange(len(changed_lines))
            try:
                value = json.loads(changed_lines[place])
                changed_lines[place] = changed(value, chance) + b"\n"
            except (ValueError, IndexError):  # it is no record any more
                changed_lines[place] = damaged(changed_lines[place], chance)
        (path / "metrics.jsonl").write_bytes(b"".join(changed_lines))
        assert read_or_refused(outside, read)


@some_and_all
def test_packs(outside, tmp_path, each):
    root = pictures.folder(tmp_path / "set", each=4, val=2, size=(16, 24))
    whole = packed(root, tmp_path / "a.arrow")
    right = [(bytes(whole.record(i)), int(whole.labels[i])) for i in range(len(whole))]
    path, found = tmp_path / "mutated.arrow", []

    def read():
        opened = Pack(path)
        for index, image in enumerate(right):
            assert (bytes(opened.record(index)), int(opened.labels[index])) == image

    for change in mutated_packs((tmp_path / "a.arrow").read_bytes(), each, seed=6):
        path.write_bytes(change)
        found.append(read_or_refused(outside, read))
    assert min(found.count(True), found.count(False)) > each / 12
