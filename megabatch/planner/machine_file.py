"""machine.json, which the benches write and docs/planner.md describes: read, written, added to.

`load` finds the machine that somebody names: a bundled one, or that of such a file.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megabatch.config.settings import shown
from megabatch.config.written import read_text
from megabatch.errors import UserError, nearest
from megabatch.planner.bundled import MACHINES
from megabatch.planner.machine import Limits, Machine, Network, Node, Rate, Sending, Spine
from megabatch.planner.workload import LONGEST_NAME, parsed, usual

FORMAT = "megabatch-machine-1"
_LINKS: dict[str, type] = {"node": Node, "network": Network, "spine": Spine}

# What people also type.
_ALSO = {
    "p3dn": "p3dn.24xlarge", "p4d": "p4d.24xlarge", "p5": "p5.48xlarge", "a3-high": "a3-highgpu-8g",
    "h100": "dgx-h100", "h200": "hgx-h200", "b200": "dgx-b200", "a100": "dgx-a100",
    "v100": "dgx1-v100", "dgx-h200": "hgx-h200", "hgx-h100": "dgx-h100", "hgx-b200": "dgx-b200",
    "nd96isr-h100-v5": "nd-h100-v5", "standard-nd96isr-h100-v5": "nd-h100-v5",
    "nd96amsr-a100-v4": "nd-a100-v4", "dgx-1": "dgx1-v100", "dgx-2h": "dgx2h",
}  # fmt: skip


def load(name: str) -> Machine:
    """The bundled machine of that name, or the machine.json at that path."""
    typed = name.strip().lower().replace(" ", "-").replace("_", "-")
    typed = _ALSO.get(typed, typed)
    if typed in MACHINES:
        return MACHINES[typed]
    path = Path(name)
    if path.suffix != ".json":
        raise UserError(
            f"there is no machine {name!r}: {nearest(typed, MACHINES)} "
            f"(or give the path of a machine.json)"
        )
    try:
        plain = "".join(letter for letter in path.stem if letter.isprintable())
        return from_json(read_text(path), default_name=plain[:LONGEST_NAME])
    except OSError as error:
        raise UserError(f"the machine {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{name} is not a machine.json: {error}") from None


def from_json(text: str, default_name: str = "machine") -> Machine:
    """A machine from the text of a machine.json; ValueError says what is wrong with it."""
    described = parsed(text)
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        found = described.get("format") if isinstance(described, dict) else described
        raise ValueError(f"its format is {shown(found)}, not {FORMAT!r}")
    described.pop("format")
    described.pop("plans", None)  # those that bench sync measured: for the trainer
    links = _object(described.pop("links", {}), "links")
    _known(links, _LINKS, "links")
    rows = described.pop("compute", [])
    if not isinstance(rows, list):
        raise UserError(f"compute is {shown(rows)}: give a list of rows")
    sending = described.pop("sending", None)
    names = {one.name for one in fields(Machine)} - {*_LINKS, "rates", "sending"}
    _known(described, names, "")
    for key in ("sources", "host"):
        _object(described.get(key, {}), key)
    for key, default in (("name", default_name), ("workers_per_node", 1)):
        described[key] = default if described.get(key) is None else described[key]
    optional = {one.name: one for one in fields(Machine)}
    given = {
        key: value for key, value in described.items() if _is_given(value, optional[key].default)
    }
    return Machine(
        **{level: _part(_LINKS[level], links[level], f"links.{level}") for level in links},
        sending=_part(Sending, sending, "sending"),
        rates=tuple(_rate(row) for row in rows),
        **given,
    )


def _is_given(value: Any, default: Any) -> bool:
    """A null stands for what is left out."""
    return value is not None or default is None


def _object(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{key} is {shown(value)}: give an object")
    return dict(value)


def _known(described: dict[str, Any], names: Any, where: str) -> None:
    for key in described:
        if key not in names:
            raise UserError(f"there is no key {shown(f'{where}.{key}'.lstrip('.'))}: "
                            f"{nearest(key, names)}")  # fmt: skip


def _part(kind: type, described: Any, where: str) -> Any:
    """One part of the file as its dataclass; null or nothing at all is no part."""
    if described is None or described == {}:
        return None
    described = _object(described, where)
    named = {one.name: one for one in fields(kind)}
    _known(described, named, where)
    for name, one in named.items():
        if one.default is MISSING and described.get(name) is None:
            raise UserError(f"{where} has no {name}")
    return kind(
        **{key: value for key, value in described.items() if _is_given(value, named[key].default)}
    )


def _rate(described: Any) -> Rate:
    """A compute row; `flops` (a second) and the share of them that training reaches stand for
    images/s where nobody has measured them."""
    row = _object(described, "a row of compute")
    flops, efficiency = row.pop("flops", None), row.pop("efficiency", 1.0)
    if flops is not None:
        if not Limits(above=0).hold(flops) or not Limits(above=0, most=1).hold(efficiency):
            raise UserError(
                f"compute.flops is {shown(flops)} and its efficiency {shown(efficiency)}: give "
                f"operations a second above 0 and a share from 0 to 1"
            )
        model = row.get("model")
        if not isinstance(model, str):
            raise UserError(f"compute.model is {shown(model)}: give a text")
        # two operations a multiply-add, and backward has twice as many as forward
        row["images_per_second"] = efficiency * flops / (6 * usual(model).multiply_adds)
        row["assumed"] = True
    rate: Rate = _part(Rate, row, "compute")
    if rate is None:
        raise UserError("a row of compute is empty: give model, micro and images_per_second")
    return rate


def to_json(machine: Machine) -> str:
    described = asdict(machine)
    links = {level: described.pop(level) for level in _LINKS}
    described["links"] = {level: link for level, link in links.items() if link is not None}
    described["compute"] = list(described.pop("rates"))
    return json.dumps({"format": FORMAT} | described, indent=2) + "\n"


def update(path: str | os.PathLike[str], part: dict[str, Any]) -> None:
    """Write a part of machine.json (links by level, sending, compute rows, host facts), keeping the
    rest.

    A compute row replaces the one of the same model, micro-batch and number of workers.
    """
    file = Path(path)
    described = _written(file)
    merged = described | part | {"format": FORMAT, "date": time.strftime("%Y-%m-%d")}
    for key in ("links", "sending", "host", "sources"):
        merged[key] = described.get(key, {}) | part.get(key, {})
    rows = {
        (row["model"], row["micro"], row.get("workers", 1)): row
        for row in (*described.get("compute", []), *part.get("compute", []))
    }
    merged["compute"] = [rows[key] for key in sorted(rows)]
    from_json(json.dumps(merged))  # what cannot be read back is not written
    file.write_text(json.dumps(merged, indent=2) + "\n")


def check_updatable(path: str | os.PathLike[str]) -> None:
    """Refuse, before anything is measured for it, a file that could not take another part."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"{file} cannot be written: name a file in a folder that is there")
    if file.exists():
        _written(file)


def _written(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"name": file.stem}
    try:
        described: dict[str, Any] = _object(json.loads(file.read_text()), str(file))
        from_json(json.dumps(described))
    except (OSError, ValueError) as error:  # UserErrors too
        raise UserError(
            f"{file} is no machine's file, and would be lost: {error}; name another"
        ) from None
    return described
