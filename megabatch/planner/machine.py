"""A machine as the planner sees it: links by level, images/s by model and micro-batch, jitter,
price and power.

`machine.json`, which the benches write, is read and written here and described in docs/planner.md.
Every number is checked as it comes in, from a file or from Python.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from megabatch.config.settings import shown
from megabatch.errors import UserError, nearest
from megabatch.planner.chips import CHIPS, Chip, named_in, unknown
from megabatch.planner.workload import LONGEST_NAME, parsed, usual

FORMAT = "megabatch-machine-1"
_LARGEST, _MOST = 1e30, 1e12
"""no machine has as much of anything, or as many"""

# Spread of a worker's step time, as a share of it: what eight GPUs of a node lose to each other
# where all that they send is hidden is 1 to 3 % (TensorFlow's table [found: S30], MLPerf's logs),
# and the slowest of eight is 1.42 spreads late. docs/planner.md has what other values give.
JITTER = 0.025

# The share of its line rate at which a transport carries large all-reduces, and its range.
TRANSPORTS = {
    "infiniband": (0.94, 0.80, 0.97),
    "roce": (0.95, 0.75, 0.98),
    "efa": (0.60, 0.45, 0.90),
    "tcp": (0.85, 0.45, 0.96),
}


@dataclass(frozen=True)
class _Limits:
    above: float = -float("inf")
    least: float = -float("inf")
    most: float = float("inf")
    whole: bool = False

    def sentence(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if isfinite(self.above):
            return f"{kind} above {self.above:g}"
        if isfinite(self.most):
            return f"{kind} from {self.least:g} to {self.most:g}"
        return f"{kind} from {self.least:g} on"

    def hold(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        most = _MOST if self.whole else _LARGEST
        if not abs(value) < most:  # nan too
            return False
        if self.above == 0 and not 1 / most < value:  # something will be divided by it
            return False
        if self.whole and value != int(value):
            return False
        return self.above < value and self.least <= value <= self.most


def _number(default: Any = MISSING, **limits: Any) -> Any:
    return field(default=default, metadata={"limits": _Limits(**limits)})


class Checked:
    """Its numbers are within their limits, or a sentence says which is not."""

    called = ""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            limits, value = one.metadata.get("limits"), getattr(self, one.name)
            if one.type == "str" and not isinstance(value, str):
                key = f"{self.called}.{one.name}".lstrip(".")
                raise UserError(f"{key} is {shown(value)}: give a text")
            if one.type == "bool" and not isinstance(value, bool):
                raise UserError(f"{self.called}.{one.name} is {shown(value)}: give true or false")
            if limits is None or (value is None and one.default is None):
                continue
            if not limits.hold(value):
                key = f"{self.called}.{one.name}".lstrip(".")
                raise UserError(f"{key} is {shown(value)}: give {limits.sentence()}")
            if limits.whole:
                object.__setattr__(self, one.name, int(value))  # 4.0 is a whole number


@dataclass(frozen=True)
class Node(Checked):
    """Between two workers of one node."""

    called = "links.node"
    latency_seconds: float = _number(least=0)
    bytes_per_second: float = _number(above=0)
    """what one worker can send to its neighbour, in one direction"""


@dataclass(frozen=True)
class Network(Checked):
    """Between two nodes of one rack: what leaves a node shares the node's NICs."""

    called = "links.network"
    latency_seconds: float = _number(least=0)
    """from the memory of one worker to that of another"""
    bytes_per_second: float = _number(above=0)
    """of one NIC, in one direction: what it was measured to carry, or its line rate if
    `transport` is given"""
    nics: int = _number(1, least=1, whole=True)
    flow_bytes_per_second: float | None = _number(None, above=0)
    """the most that one pair of workers gets (None: all NICs, as NCCL's channels do)"""
    transport: str = ""
    """infiniband, roce, efa or tcp: which share of the line rate is to be had"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport and self.transport not in TRANSPORTS:
            raise UserError(
                f"there is no links.network.transport {shown(self.transport)}: "
                f"{nearest(self.transport, TRANSPORTS)}"
            )

    @property
    def nic_bytes_per_second(self) -> float:
        share = TRANSPORTS[self.transport][0] if self.transport else 1.0
        return share * self.bytes_per_second

    @property
    def range(self) -> tuple[float, float]:
        """How much less and how much more it may carry, as factors."""
        if not self.transport:
            return 0.9, 1.05
        usual_share, low, high = TRANSPORTS[self.transport]
        return low / usual_share, high / usual_share


@dataclass(frozen=True)
class Spine(Checked):
    """Between two racks: what leaves a rack shares its uplinks."""

    called = "links.spine"
    latency_seconds: float = _number(least=0)
    nodes_per_rack: int = _number(least=1, whole=True)
    oversubscription: float = _number(1.0, above=0)
    """bandwidth of a rack's NICs over that of its uplinks"""


@dataclass(frozen=True)
class Sending(Checked):
    """What messages cost the cores that compute. What a GPU's cost it: `sending_share`."""

    called = "sending"
    message_core_seconds: float = _number(least=0)
    """of one core, to send a message and to receive one"""
    byte_core_seconds: float = _number(least=0)
    cores: float = _number(above=0)
    """of a node: its workers share them, and computing takes all of them"""


@dataclass(frozen=True)
class Rate(Checked):
    """Images/s of one worker while `workers` of them train with this micro-batch, update
    included."""

    called = "compute"
    model: str
    micro: int = _number(least=1, whole=True)
    images_per_second: float = _number(above=0)
    workers: int = _number(1, least=1, whole=True)
    assumed: bool = False
    """nobody measured it: the interval is wider for it"""


@dataclass(frozen=True)
class Machine(Checked):
    """`sources` says where each number is from; the one in `fitted` was set to meet a published
    row."""

    name: str
    workers_per_node: int = _number(least=1, whole=True)
    node: Node | None = None
    network: Network | None = None
    spine: Spine | None = None
    sending: Sending | None = None
    rates: tuple[Rate, ...] = ()
    chip: str = ""
    """its generation (left out: what the name or the host's facts speak of)"""
    jitter: float = _number(JITTER, least=0, most=1)
    """standard deviation of a worker's time for a step, as a share of it"""
    launch_seconds: float = _number(0.0, least=0)
    """to start one collective"""
    sending_share: float = _number(0.0, least=0, most=1)
    """of a worker's computing that a collective takes from it while it is on the wire"""
    input_images_per_second: float | None = _number(None, above=0)
    """what one node can read and decode (None: more than its workers ask for)"""
    largest_micro: int | None = _number(None, least=1, whole=True)
    """images of one pass, at most (None: as many as fit into the chip's memory)"""
    start_seconds: float = _number(20.0, least=0)
    """from the start of the workers to the first step; no part of a run's time, but paid for"""
    price_per_gpu_hour: float | None = _number(None, least=0)
    """in dollars"""
    watts_per_gpu: float | None = _number(None, least=0)
    """of a GPU and its share of the node (None: not known)"""
    fitted: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.name.isprintable() and len(self.name) <= LONGEST_NAME):
            raise UserError(
                f"name is {shown(self.name)}: give a line of at most {LONGEST_NAME} letters"
            )
        object.__setattr__(self, "chip", self.chip.lower())
        if self.chip and self.chip not in CHIPS:
            raise UserError(f"there is no chip {shown(self.chip)}: {nearest(self.chip, CHIPS)}")

    @property
    def workers_per_rack(self) -> int | None:
        return self.workers_per_node * self.spine.nodes_per_rack if self.spine else None

    @property
    def generation(self) -> Chip:
        """The chip it says it has, that its name or its host speaks of, or one guessed from its
        speed."""
        if self.chip:
            return CHIPS[self.chip]
        if "gpu" in self.host:
            spoken_of = named_in(str(self.host["gpu"]))
        else:
            spoken_of = CHIPS["cpu"] if "threads" in self.host else named_in(self.name)
        if spoken_of is not None:
            return spoken_of
        best = max(
            (
                row.images_per_second * usual(row.model).multiply_adds
                for row in self.rates
                if row.model.startswith("resnet")
            ),
            default=2000.0 * usual("resnet50").multiply_adds,
        )
        return unknown(best / usual("resnet50").multiply_adds)

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


# --- machine.json --------------------------------------------------------------------------------

_LINKS: dict[str, type] = {"node": Node, "network": Network, "spine": Spine}


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
        if not _Limits(above=0).hold(flops) or not _Limits(above=0, most=1).hold(efficiency):
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
