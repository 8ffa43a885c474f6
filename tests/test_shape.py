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
    "errors", "config", "schedule", "batch", "tree", "plans", "recipes", "models", "noise",
    "planner", "cluster", "launch", "cli", "verbs.train", "verbs.plan",
]  # fmt: skip

# Each room may import those before it in this list (and its own); nothing goes up.
LEVELS = [
    ["errors", "durable", "schedule", "tree", "plans", "models"],
    ["batch"],
    ["config"],
    ["recipes", "cluster", "launch", "keyed", "planner"],
    ["batchnorm", "optim", "noise", "kernels"],
    ["precision", "finetune", "data", "process", "sync"],
    ["ema"],
    ["parts"],
    ["runs"],
    ["training"],
    ["report", "cli", "bench", "doctor", "verbs"],
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


def test_no_room_for_everything():
    banned = {"utils", "helper", "helpers", "manager", "handler", "base", "misc", "common"}
    for module in MODULES:
        assert not banned & set(module.split("."))


def test_public_names_resolve():
    for name in megabatch.__all__:
        assert getattr(megabatch, name) is not None
    assert callable(megabatch.train)
    with pytest.raises(AttributeError):
        megabatch.nothing  # noqa: B018
