"""A machine as the planner sees it: links by level, images/s by model and micro-batch, jitter,
price and power.

Every number is checked as it comes in, from a file (planner/machine_file.py) or from Python.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any

from megabatch.config.settings import shown
from megabatch.errors import UserError, nearest
from megabatch.planner.chips import CHIPS, Chip, named_in, unknown
from megabatch.planner.workload import LONGEST_NAME, usual

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
class Limits:
    above: float = -float("inf")
    least: float = -float("inf")
    most: float = float("inf")
    integer: bool = False

    def sentence(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        if isfinite(self.above):
            return f"{kind} above {self.above:g}"
        if isfinite(self.most):
            return f"{kind} from {self.least:g} to {self.most:g}"
        return f"{kind} from {self.least:g} on"

    def hold(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        most = _MOST if self.integer else _LARGEST
        if not abs(value) < most:  # nan too
            return False
        if self.above == 0 and not 1 / most < value:  # something will be divided by it
            return False
        if self.integer and value != int(value):
            return False
        return self.above < value and self.least <= value <= self.most


def _number(default: Any = MISSING, **limits: Any) -> Any:
    return field(default=default, metadata={"limits": Limits(**limits)})


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
            if limits.integer:
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
    nics: int = _number(1, least=1, integer=True)
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
        usual = TRANSPORTS[self.transport][0] if self.transport else 1.0
        return usual * self.bytes_per_second

    @property
    def range(self) -> tuple[float, float]:
        """How much less and how much more it may carry, as factors."""
        if not self.transport:
            return 0.9, 1.05
        usual, low, high = TRANSPORTS[self.transport]
        return low / usual, high / usual


@dataclass(frozen=True)
class Spine(Checked):
    """Between two racks: what leaves a rack shares its uplinks."""

    called = "links.spine"
    latency_seconds: float = _number(least=0)
    nodes_per_rack: int = _number(least=1, integer=True)
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
    micro: int = _number(least=1, integer=True)
    images_per_second: float = _number(above=0)
    workers: int = _number(1, least=1, integer=True)
    assumed: bool = False
    """nobody measured it: the interval is wider for it"""


@dataclass(frozen=True)
class Machine(Checked):
    """`sources` says where each number is from; the one in `fitted` was set to meet a published
    row."""

    name: str
    workers_per_node: int = _number(least=1, integer=True)
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
    largest_micro: int | None = _number(None, least=1, integer=True)
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
            raise UserError(
                f"{self.name} has no network: megabatch bench sync adds it, on two nodes"
            )
