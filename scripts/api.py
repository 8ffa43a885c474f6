"""Writes docs/api.md: the public names, their signatures and docstrings.

python scripts/api.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import megabatch as mb

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

SECTIONS = {
    "Whole runs": ["train", "evaluate", "Summary", "Logger", "forecast"],
    "Settings": [
        "Config", "Data", "LearningRate", "OptimizerConfig", "Noise", "Hybrid", "Stage", "recipes",
    ],
    "Pieces for your own loop": [
        "Cluster", "Loader", "GradSync", "LARS", "LAMB", "Muon", "parameter_groups", "models",
    ],
    "Rates": ["warmup", "constant", "poly", "cosine", "step_decay", "join", "linear_scaling"],
    "All-reduce as a value": ["plans"],
    "What goes wrong": ["UserError", "RunFailed"],
}  # fmt: skip
HEAD = """# The public names

Made by `python scripts/api.py` from the docstrings. `import megabatch as mb`; a name is imported
when it is first used. Everything else in the package may change.
"""


def page() -> str:
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def entry(name: str) -> str:
    found = getattr(mb, name)
    if isinstance(found, ModuleType):
        return _module(name, found)
    lines = [f"### mb.{name}\n", "```python", _signature(name, found), "```\n", _words(found)]
    if dataclasses.is_dataclass(found):
        lines += ["", *_fields(found)]
    if inspect.isclass(found) and not issubclass(found, Exception):
        lines += _methods(name, found)
    return "\n".join(lines) + "\n"


def _module(name: str, module: ModuleType) -> str:
    """A module's own words and the functions that it gives away."""
    lines = [f"### mb.{name}\n", _words(module), ""]
    named = getattr(module, "__all__", None)
    given = named or [
        one
        for one, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__.startswith("megabatch")
    ]
    for one in given:
        value = getattr(module, one)
        if one.startswith("_") or not callable(value):
            continue
        says = _first(value)
        lines.append(f"- `mb.{name}.{_signature(one, value, short=True)}`: {says}")
    return "\n".join(lines) + "\n"


def _methods(name: str, kind: type) -> list[str]:
    lines = []
    for one, value in vars(kind).items():
        if one.startswith("_") or one in {field.name for field in _dataclass_fields(kind)}:
            continue
        plain = getattr(kind, one)
        # torch puts a wrapper of its own into the class of an optimiser once there is one.
        if getattr(plain, "__qualname__", f"{kind.__name__}.").split(".")[0] != kind.__name__:
            continue
        if isinstance(value, property):
            says, shown = _first(value.fget), f"{name}.{one}"
        elif callable(plain):
            says, shown = _first(plain), f"{name}.{_signature(one, plain, short=True)}"
        else:
            continue
        if says:
            lines.append(f"- `{shown}`: {says}")
    return ["", *lines] if lines else []


def _dataclass_fields(kind: Any) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _fields(kind: Any) -> list[str]:
    """Fields, their defaults, and the string that follows each of them in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    said: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
            said[ast.unparse(before.target)] = " ".join(ast.literal_eval(after.value).split())
    rows = ["| field | default | |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        words = said.get(field.name, "").replace("|", "\\|")
        rows.append(f"| `{field.name}` | {default} | {words} |")
    return rows


def _signature(name: str, found: Any, short: bool = False) -> str:
    if dataclasses.is_dataclass(found):
        return f"{name}(...)"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    if short:
        names = [one for one in signature.parameters if one != "self"]
        return f"{name}({', '.join(names)})"
    # Annotations are strings already, and would be shown in quotes; defaults keep theirs.
    bare = [p.replace(annotation=_Bare(p.annotation)) for p in signature.parameters.values()]
    ending = signature.return_annotation
    gives = "" if ending is inspect.Signature.empty else f" -> {_Bare(ending)!r}"
    text = str(inspect.Signature(bare)).replace(": <empty>", "")
    return _broken(name, re.sub(r"<[^>]* object at 0x[0-9a-f]+>", "...", text) + gives)


class _Bare:
    """An annotation as it is written, without the modules' names."""

    def __init__(self, annotation: Any) -> None:
        empty = annotation is inspect.Parameter.empty
        plain = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        text = "<empty>" if empty else plain
        self._text = re.sub(r"\b(?:[a-z]\w*\.)+(?=[A-Z])", "", text)

    def __repr__(self) -> str:
        return self._text.strip("'\"")


def _broken(name: str, text: str) -> str:
    """A parameter a line where one line is too long."""
    if len(name + text) <= 88:
        return name + text
    inside, _, after = text[1:].rpartition(")")
    parts, depth, start = [], 0, 0
    for at, char in enumerate(inside):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inside[start:at].strip())
            start = at + 1
    parts.append(inside[start:].strip())
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){after}"


def _words(found: Any) -> str:
    text = inspect.getdoc(found) or ""
    return "" if text.startswith(f"{getattr(found, '__name__', '')}(") else text


def _first(found: Any) -> str:
    """The first sentence or paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())
