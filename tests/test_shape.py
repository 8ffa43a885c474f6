"""The shape of the code: what stays free of torch, which way imports go, what no file is called."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch

ROOT = Path(megabatch.__file__).parent
MODULES = {
    ".".join(("megabatch", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}
TORCH_FREE = [
    "errors", "version", "config", "plans.names", "schedule", "batch", "tree", "plans", "recipes",
    "models", "noise", "optim", "planner", "workers.place", "cluster", "elastic.supervisor",
    "launch", "cli", "verbs.train", "verbs.plan",
]  # fmt: skip

# Each room may import those before it in this list (and its own); nothing goes up.
LEVELS = [
    ["errors", "version", "host"],
    ["schedule", "tree", "plans"],
    ["optim", "kernels"],
    ["batch", "models"],
    ["config"],
    ["layers", "keyed"],
    ["recipes", "workers", "cluster", "elastic", "launch", "planner"],
    ["batchnorm", "noise"],
    ["precision", "finetune", "data", "sync", "own"],
    ["ema", "runs"],
    ["passes"],
    ["parts"],
    ["step", "recompute", "between_steps"],
    ["training", "evaluation"],
    ["study"],
    ["report", "cli", "bench", "doctor", "chaos", "verbs"],
]


@pytest.mark.parametrize("room", TORCH_FREE)
def test_these_import_no_torch(room):
    check = f"import sys, megabatch.{room}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def imports_of(path):
    """The megabatch modules a file imports at its top level or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megabatch"):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("megabatch"))


def room_of(module):
    return module.split(".")[1] if "." in module else None


def test_imports_go_down_only():
    level = {room: index for index, rooms in enumerate(LEVELS) for room in rooms}
    for module, path in MODULES.items():
        here = room_of(module)
        if here is None:
            continue
        assert here in level, f"{module} has no place in LEVELS"
        for imported in imports_of(path):
            there = room_of(imported)
            if there is not None and there != here:
                assert level[there] <= level[here], f"{module} imports {imported}"


# Modules that import each other in a circle, until they are mended; the list only gets shorter.
KNOTS: set[frozenset[str]] = set()


def knots(graph):
    """Sets of modules that reach each other: strongly connected, more than one."""
    reached = {}

    def reach(module):
        found, waiting = set(), [module]
        while waiting:
            for there in graph.get(waiting.pop(), ()):
                if there not in found:
                    found.add(there)
                    waiting.append(there)
        return found

    for module in graph:
        reached[module] = reach(module)
    return {
        frozenset(there for there in reached[module] if module in reached.get(there, ()))
        for module in graph
        if module in reached[module]
    }


def test_knots_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert knots(graph) == {frozenset("abc"), frozenset("f")}


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions and for type checkers count too."""
    graph = {module: set(imports_of(path)) for module, path in MODULES.items()}
    found = knots(graph)
    assert found <= KNOTS, [sorted(knot) for knot in found - KNOTS]
    assert found == KNOTS, f"mended: take {[sorted(knot) for knot in KNOTS - found]} off the list"


def private_uses(path):
    """Private names of other modules of ours that a file imports or reaches into."""
    tree = ast.parse(path.read_text())
    ours = set()  # names that stand for a module of ours in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megabatch"):
            for name in node.names:
                if is_private(name.name):
                    yield f"{node.module}.{name.name}"
                if f"{node.module}.{name.name}" in MODULES:
                    ours.add(name.asname or name.name)
        elif isinstance(node, ast.Import):
            ours |= {n.asname or n.name for n in node.names if n.name.startswith("megabatch")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            inside = ast.unparse(node.value)
            if inside in ours:
                yield f"{inside}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from megabatch.batch import _dealt_once, deal\nfrom megabatch import tree\n"
        "import megabatch.errors\ntree._x\nmegabatch.errors._y\nself._z\n"
    )
    assert sorted(private_uses(path)) == [
        "megabatch.batch._dealt_once",
        "megabatch.errors._y",
        "tree._x",
    ]


def test_private_names_stay_at_home():
    assert {
        module: used for module, path in MODULES.items() if (used := [*private_uses(path)])
    } == {}


# Of two rooms' public face each: the groups of parameters, and those of ranks.
PUBLIC_TYPES = {"Group"}


def types_of(path):
    """Classes, and names that a file gives to types: what each is."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name):
                yield name, f"the class of {path}"
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_type_name(name):
                yield name, ast.unparse(value)


def is_type_name(name):
    return name[0].isupper() and not name.isupper()


def test_no_two_types_have_one_name():
    """But for names of the same type, which several files may spell out."""
    found: dict[str, set[str]] = {}
    for path in MODULES.values():
        for name, what in types_of(path):
            found.setdefault(name, set()).add(what)
    several = {name: all_ for name, all_ in found.items() if len(all_) > 1}
    assert several.keys() == PUBLIC_TYPES, several


def test_types_of_one_name_are_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("class A: ...\nBee = tuple[int, int]\nLEAST = 3\nT = TypeVar('T')\n")
    assert [name for name, _ in types_of(path)] == ["A", "Bee"]


def test_there_is_one_training_step():
    """Whoever runs backward or an optimizer in the package does it through train_step, but for the
    rival that it is measured against."""
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if called.endswith((".backward", "optimizer.step", "optim.step")):
                    found.add((module, called))
    assert found == {
        ("megabatch.step", "parts.engine.backward"),
        ("megabatch.step", "optimizer.step"),
        ("megabatch.sync.buckets", "loss.backward"),
        ("megabatch.bench.rivals", "(loss / config.batch).backward"),
        ("megabatch.bench.rivals", "optimizer.step"),
    }


def test_no_room_for_everything():
    banned = {"utils", "helper", "helpers", "manager", "handler", "base", "misc", "common"}
    for module in MODULES:
        assert not banned & set(module.split("."))
        assert not banned & set(module.rsplit(".")[-1].split("_"))


def test_words_of_speech_name_nothing():
    """Names say what a thing is: these would do for anything."""
    vague = {"said", "told", "turn_to", "room"}
    for name, path in MODULES.items():
        found = {
            getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.ClassDef)
        }
        assert not {word.strip("_") for word in found if word} & vague, name


# Of each a fraction of 0 to 1, and others' scripts and checkpoints have it: the rate of a group of
# parameters as a share of the whole, and a slice's part of its tensor. So have settings and keys
# of files: val_share, tuning_share, evaluation_share, peak_share, sending_share.
PUBLIC_SHARES = {("megabatch.optim.groups", "share"), ("megabatch.plans.message", "share")}


def test_one_name_is_one_thing():
    """`share` and `whole` once stood for a dozen things each: whatever is named anew says which."""
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add((module, name.strip("_")))
                case ast.arg(arg=name) | ast.alias(asname=str(name)):
                    found.add((module, name.strip("_")))
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add((module, name.strip("_")))
    assert {(m, name) for m, name in found if name in ("share", "shares", "whole")} == PUBLIC_SHARES
