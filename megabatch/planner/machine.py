"""A machine as the planner sees it: links by level, images/s by model and micro-batch, jitter.

`machine.json`, which the benches write, is read and written here and described in docs/planner.md.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megabatch.errors import UserError, nearest
from megabatch.planner.workload import usual

FORMAT = "megabatch-machine-1"

Level = Literal["node", "network", "spine"]


@dataclass(frozen=True)
class Node:
    """Between two workers of one node."""

    latency_seconds: float
    bytes_per_second: float
    """what one worker can send to its neighbour, in one direction"""


@dataclass(frozen=True)
class Network:
    """Between two nodes of one rack: what leaves a node shares the node's NICs."""

    latency_seconds: float
    """from the memory of one worker to that of another"""
    bytes_per_second: float
    """of one NIC, in one direction"""
    nics: int = 1
    flow_bytes_per_second: float | None = None
    """the most that one pair of workers gets (None: all NICs, as NCCL's channels do)"""


@dataclass(frozen=True)
class Spine:
    """Between two racks: what leaves a rack shares its uplinks."""

    latency_seconds: float
    nodes_per_rack: int
    oversubscription: float = 1.0
    """bandwidth of a rack's NICs over that of its uplinks"""


@dataclass(frozen=True)
class Sending:
    """What messages cost the cores that compute. A GPU's messages cost it nothing."""

    message_core_seconds: float
    """of one core, to send a message and to receive one"""
    byte_core_seconds: float
    cores: float
    """of a node: its workers share them, and computing takes all of them"""


@dataclass(frozen=True)
class Rate:
    """Images/s of one worker while `workers` of them train with this micro-batch, update
    included."""

    model: str
    micro: int
    images_per_second: float
    workers: int = 1


# Spread of a worker's step time, as a share of it. Nobody publishes it, and this is no measurement:
# one constant for every machine without a value of its own, the smallest whole per cent that has
# the four published efficiencies it touches within 5 points. docs/planner.md has the alternatives.
JITTER = 0.04


@dataclass(frozen=True)
class Machine:
    """`sources` says where each number is from; the one in `fitted` was set to meet a published
    row."""

    name: str
    workers_per_node: int
    node: Node | None = None
    network: Network | None = None
    spine: Spine | None = None
    sending: Sending | None = None
    rates: tuple[Rate, ...] = ()
    jitter: float = JITTER
    """standard deviation of a worker's time for a step, as a share of it"""
    launch_seconds: float = 0.0
    """to start one collective"""
    input_images_per_second: float | None = None
    """what one node can read and decode (None: more than its workers ask for)"""
    largest_micro: int = 1024
    """images that fit into one worker's memory"""
    fitted: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    date: str = ""

    @property
    def workers_per_rack(self) -> int | None:
        return self.workers_per_node * self.spine.nodes_per_rack if self.spine else None

    def check_world(self, world: int) -> None:
        """Refuse a number of workers that no whole number of nodes, or even share of one, holds."""
        each = self.workers_per_node
        if world < 1:
            raise UserError(f"{world} GPUs cannot train: give at least 1")
        if world % each and each % world:
            lower = max(each, world // each * each)
            near = f"{lower} or {lower + each}" if world > each else f"a divisor of {each}"
            raise UserError(f"{world} GPUs do not fill {self.name}'s nodes of {each}: give {near}")
        if world > 1 and self.node is None and each > 1:
            raise UserError(
                f"{self.name} has no link inside the node: megabatch bench sync adds it"
            )
        if world > each and self.network is None:
            raise UserError(f"{self.name} has no network: megabatch bench sync adds it")


def load(name: str) -> Machine:
    """The bundled machine of that name, or the machine.json at that path."""
    from megabatch.planner.bundled import MACHINES

    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if path.suffix != ".json":
        raise UserError(
            f"there is no machine {name!r}: {nearest(name, MACHINES)} "
            f"(or give the path of a machine.json)"
        )
    try:
        return from_json(path.read_text(), default_name=path.stem)
    except OSError as error:
        raise UserError(f"the machine {name} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name} is not a machine.json: {error}") from None


def from_json(text: str, default_name: str = "machine") -> Machine:
    said = json.loads(text)
    if said.get("format") != FORMAT:
        raise ValueError(f"its format is {said.get('format')!r}, not {FORMAT!r}")
    links = said.get("links", {})
    spine, sending = links.get("spine"), said.get("sending")
    optional = ("jitter", "launch_seconds", "input_images_per_second", "largest_micro", "fitted",
                "sources", "host", "date")  # fmt: skip
    return Machine(
        name=said.get("name", default_name),
        workers_per_node=said.get("workers_per_node", 1),
        node=Node(**links["node"]) if "node" in links else None,
        network=Network(**links["network"]) if "network" in links else None,
        spine=Spine(**spine) if spine else None,
        sending=Sending(**sending) if sending else None,
        rates=tuple(_rate(**row) for row in said.get("compute", [])),
        **{key: said[key] for key in optional if said.get(key) is not None},
    )


def _rate(model: str, micro: int, flops: float = 0.0, efficiency: float = 1.0, **row: Any) -> Rate:
    """A compute row; `flops` (a second) and the share of them that training reaches stand for
    images/s where nobody has measured them."""
    if flops:
        # two operations a multiply-add, and backward has twice as many as forward
        row["images_per_second"] = efficiency * flops / (6 * usual(model).multiply_adds)
    return Rate(model, micro, **row)


def to_json(machine: Machine) -> str:
    fields = asdict(machine)
    links = {level: fields.pop(level) for level in ("node", "network", "spine")}
    fields["links"] = {level: link for level, link in links.items() if link is not None}
    fields["compute"] = list(fields.pop("rates"))
    return json.dumps({"format": FORMAT} | fields, indent=2) + "\n"


def update(path: str | os.PathLike[str], part: dict[str, Any]) -> None:
    """Write a part of machine.json (links by level, sending, compute rows, host facts), keeping the
    rest.

    A compute row replaces the one of the same model, micro-batch and number of workers.
    """
    file = Path(path)
    said = json.loads(file.read_text()) if file.exists() else {"name": file.stem}
    merged = said | part | {"format": FORMAT, "date": time.strftime("%Y-%m-%d")}
    for key in ("links", "sending", "host", "sources"):
        merged[key] = said.get(key, {}) | part.get(key, {})
    rows = {
        (row["model"], row["micro"], row.get("workers", 1)): row
        for row in (*said.get("compute", []), *part.get("compute", []))
    }
    merged["compute"] = [rows[key] for key in sorted(rows)]
    from_json(json.dumps(merged))  # what cannot be read back is not written
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(merged, indent=2) + "\n")
