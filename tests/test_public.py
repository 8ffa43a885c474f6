"""The public face: which names there are, that type checkers see them, that they come lazily."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch as mb

ROOT = Path(mb.__file__).parent.parent

# What users rely on. A name goes or comes only with a line here.
NAMES = {
    "recipes", "plans", "models", "__version__",
    "Config", "Data", "Hybrid", "LearningRate", "Noise", "OptimizerConfig", "Stage",
    "UserError", "RunFailed",
    "linear_scaling", "warmup", "constant", "poly", "cosine", "step_decay", "join",
    "LARS", "LAMB", "Muon", "parameter_groups", "Cluster", "GradSync",
    "train", "evaluate", "Summary", "Logger", "Loader", "forecast",
}  # fmt: skip


def test_the_public_names_are_these():
    assert set(mb.__all__) == NAMES
    assert set(dir(mb)) >= NAMES
    for name in NAMES:
        assert getattr(mb, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mb.nothing  # noqa: B018


def test_a_type_checker_sees_the_same_names():
    tree = ast.parse((ROOT / "megabatch" / "__init__.py").read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        name.name: node.module
        for node in seen.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert homes.keys() | {"__version__"} == NAMES
    for name, home in homes.items():
        value = getattr(mb, name)
        there = sys.modules[home]
        assert value is (getattr(there, name) if home != "megabatch" else value)


def test_a_name_alone_brings_no_torch():
    names = "mb.Config, mb.poly, mb.forecast, mb.recipes, mb.plans"
    code = f"import sys, megabatch as mb; {names}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


SNIPPET = """
import megabatch as mb
from torch import nn

summary = mb.train(mb.recipes.digits(), nn.Linear(2, 2))
reveal_type(mb.train)
reveal_type(summary.top1)
reveal_type(mb.LARS)
reveal_type(mb.Cluster.from_env(grid=(8, 8)).rank)
reveal_type(mb.join(mb.warmup(5, to=29.0), mb.poly(85, power=2))(1.0))
reveal_type(mb.recipes.digits().resized(epochs=1).epochs)
reveal_type(mb.forecast)
mb.train("digits")
mb.nothing
"""


def test_types_reach_the_user(tmp_path):
    assert (ROOT / "megabatch" / "py.typed").is_file()
    script = tmp_path / "script.py"
    script.write_text(SNIPPET)
    # With the project's settings, so that the cache of its own check is used.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line.split(": ", 1)[1] for line in found.stdout.splitlines() if "script.py:" in line]
    revealed = [line for line in said if "Revealed type" in line]
    assert len(revealed) == 7, found.stdout + found.stderr
    assert not [line for line in revealed if line.endswith('"Any"')]
    assert "megabatch.between_steps.Summary" in revealed[0]
    assert [line.rsplit('"', 2)[1] for line in (revealed[1], *revealed[3:6])] == [
        "float", "int", "float", "float",
    ]  # fmt: skip
    errors = [line for line in said if line.startswith("error")]
    assert len(errors) == 2
    assert 'expected "Config"' in errors[0]
    assert 'has no attribute "nothing"' in errors[1]
