"""config.json from anyone: read as it was meant, or refused in one sentence; nothing else."""

import copy
import json
import math
import os
import random
import string
from pathlib import Path

import pytest

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.plans import PLANS
from megabatch.recipes import RECIPES

CONFIGS = [json.loads(recipe().to_json()) for recipe in RECIPES.values()]
DEFAULTS = json.loads(Config().to_json())
JUNK = [
    None, True, False, 0, 1, -1, 2, 3, 64, 2**31, 2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5,
    1.0, 1e-300, 1e99, 1e308, -1e308, math.nan, math.inf, -math.inf, "", "1", "nan", "true", "auto",
    "torus", "ring:backend", "lamb", "steps", "pytorch", "fp16", "../../x", "a\0b", "\ud800",
    "[/red]", "x" * 10_000, [], [0], [0.5, 1], [1, 1], [[]], [None, None], [0.1, 0.1, 0.1], {},
    {"epoch": 3}, {"epoch": 3, "batch": 512}, {"__class__": "x"}, [{"epoch": 3, "batch": 512}],
    [{"epoch": 3, "batch": 512, "momentum": 0.5}], [{"epoch": "3", "batch": 512}],
]  # fmt: skip


def places(value, path=()):
    """Every place in a JSON value, by its path."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def misspelt(name, chance):
    at = chance.randrange(len(name))
    return chance.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + chance.choice(string.ascii_lowercase) + name[at + 1 :],
            name.upper(),
        ]
    )


def mutated(value, chance):
    """A config's JSON with one thing changed, somewhere."""
    value = copy.deepcopy(value)
    *parents, last = chance.choice([path for path in places(value) if path])
    inside = value
    for key in parents:
        inside = inside[key]
    kind = chance.choice(["junk", "junk", "junk", "scaled", "missing", "misspelt", "more"])
    if kind == "scaled" and type(inside[last]) in (int, float):
        factor = chance.choice([-1, 0, 2, 3, 0.5, 1e9])
        inside[last] = type(inside[last])(inside[last] * factor)
    elif kind == "missing":
        del inside[last]
    elif kind == "misspelt" and isinstance(inside, dict):
        inside[misspelt(last, chance)] = inside.pop(last)
    elif kind == "more" and isinstance(inside, dict):
        inside[chance.choice(["", "momentum", "stage", "x", "__init__"])] = chance.choice(JUNK)
    else:
        inside[last] = chance.choice(JUNK)
    return value


def completed(given, defaults):
    """What was meant: what is given, and the defaults of the rest."""
    if isinstance(given, list):  # of stages, or of numbers
        return [completed(item, {"momentum": None}) for item in given]
    if not isinstance(given, dict):
        return given
    return {**defaults, **{k: completed(v, defaults.get(k, {})) for k, v in given.items()}}


def same(a, b):
    """Equal as JSON: true is not 1, but 1 may be 1.0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def is_sane(config):
    """What no run can do without, asked of the written values and not of the checks."""
    written = json.loads(config.to_json())
    numbers = [
        v for path in places(written) for v in [at(written, path)] if isinstance(v, int | float)
    ]
    assert all(math.isfinite(number) and abs(number) <= 2**53 for number in numbers)
    assert 0 < config.epochs <= 1e9
    batches = [stage.batch for stage in config.all_stages]
    assert all(type(b) is int and b > 0 and b % config.micro == 0 for b in batches)
    assert config.micro % config.span == 0
    assert config.lr.decay in ("poly", "cosine", "steps", "constant")
    assert config.precision in ("fp32", "fp64", "bf16", "fp16")
    assert config.plan.partition(":")[0] in (*PLANS, "backend", "hybrid", "auto")
    assert 0 <= config.optimizer.momentum < 1
    assert "/" not in config.name and "[" not in config.name
    assert len(config.data.jitter) == 3 and len(config.data.crop_area) == 2
    steps = [config.lr_at(config.epochs * share) for share in (0, 0.3, 0.99)]
    assert all(math.isfinite(rate) and rate >= 0 for rate in steps)
    for _, value, formula in config.derived(1000, 4):  # and the table does not take for ever
        assert "nan" not in value + formula and "inf" not in value


def at(value, path):
    for key in path:
        value = value[key]
    return value


def read(text, path):
    path.write_bytes(text)
    return Config.read(path)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_configs_are_read_as_meant_or_refused(seed, tmp_path):
    chance, accepted = random.Random(seed), 0
    for _ in range(250):
        value = mutated(chance.choice(CONFIGS), chance)
        if chance.random() < 0.3:
            value = mutated(value, chance)
        text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
        try:
            config = read(text.encode("utf-8", "surrogatepass"), tmp_path / "config.json")
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 700
            continue
        accepted += 1
        assert same(json.loads(config.to_json()), completed(value, DEFAULTS))
        is_sane(config)
    assert 10 < accepted < 200  # both happen


@pytest.mark.parametrize("seed", range(4))
def test_damaged_text_is_read_as_it_stands_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    for _ in range(250):
        text = bytearray(json.dumps(chance.choice(CONFIGS), indent=2).encode())
        for _ in range(chance.choice([1, 1, 2, 5])):
            place = chance.randrange(len(text))
            match chance.choice(["flip", "cut", "byte", "double"]):
                case "flip":
                    text[place] ^= 1 << chance.randrange(8)
                case "cut":
                    del text[place : place + chance.choice([1, 3, 10_000])]
                case "byte":
                    text[place] = chance.choice(b'\0"{}[],:0eN-\xff')
                case "double":
                    text[place:place] = text[place : place + 40]
            text = text or bytearray(b" ")
        try:
            config = read(bytes(text), tmp_path / "config.json")
        except UserError as error:
            assert "\n" not in str(error)
            continue
        assert same(json.loads(config.to_json()), completed(json.loads(text), DEFAULTS))
        is_sane(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is not JSON"),
        ("[]", "it is []: give an object of settings"),
        ("3", "it is 3: give an object"),
        ("null", "it is none"),
        ('{"batc": 64}', "there is no setting 'batc': did you mean batch?"),
        ('{"lr": {"warm_up": 1}}', "there is no setting 'warm_up' in lr: did you mean warmup?"),
        ('{"data": 3}', "data is 3: give an object of settings"),
        ('{"data": {"crop_area": [1]}}', "data.crop_area is 1: give 2 values"),
        ('{"epochs": NaN}', "NaN is no number"),
        ('{"epochs": 1e999}', "epochs is inf: give a finite number"),
        ('{"epochs": 1e99}', "epochs is 1e+99"),
        ('{"seed": ' + "9" * 5000 + "}", "of digits: no setting is so large"),
        ('{"batch": true}', "batch is true: give a whole number"),
        ('{"batch": 64.0}', "batch is 64: give a whole number"),
        ('{"epochs": "20"}', "epochs is '20': give a finite number"),
        ('{"epochs": 20, "epochs": 30}', "it has 'epochs' twice"),
        ('{"precision": "fp31"}', "precision is 'fp31': did you mean fp32?"),
        ('{"loss_scale": "big"}', "loss_scale is 'big': give a finite number or none"),
        ('{"stages": [{"epoch": 3}]}', "stages[0].batch is missing"),
        ('{"stages": [3]}', "stages[0] is 3: give an object"),
        ("[" * 200_000, "nested too deeply"),
        ('{"data":' * 100_000, "nested too deeply"),
        ('{"name": "' + "x" * 2_000_000 + '"}', "more than 1,048,576 bytes"),
        ('{"name": "\\ud800"}', "name is"),
    ],
)
def test_hostile_text_gets_one_sentence(text, says, tmp_path):
    with pytest.raises(UserError) as refused:
        read(text.encode(), tmp_path / "config.json")
    assert says in str(refused.value)
    assert str(tmp_path / "config.json") in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "bytes", "/dev/zero", "nul"])
def test_what_is_no_plain_file_gets_one_sentence(kind, tmp_path):
    path = tmp_path / "config.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # nobody will ever write to it
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe{}")
    elif kind == "/dev/zero":
        path = Path("/dev/zero")
    elif kind == "nul":
        path = Path("a\0b")
    with pytest.raises(UserError):
        Config.read(path)
