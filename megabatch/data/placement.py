"""Where the images of a run lie: in the pack, in the device's memory, or shared out over all
workers'."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megabatch.batch import Step
from megabatch.cluster import Cluster
from megabatch.config import Config
from megabatch.data.source import Fills, Source
from megabatch.errors import UserError

if TYPE_CHECKING:
    from megabatch.data.shared import SharedOut

_ROOM = 0.5
"""share of a node's free memory that a pack may take"""
_WORTH_PROCESSES = 50_000
"""images: to start processes takes about as long as to decode a few thousand"""


@dataclass(frozen=True)
class Placed:
    """A source where it lies; `begin` is told of each step before it is read."""

    source: Source
    begin: Callable[[Step], None] = lambda step: None
    close: Callable[[], None] = lambda: None


def place(source: Source, config: Config, cluster: Cluster) -> Placed:
    """Decide where the training images lie, as the config says or by what fits."""
    from megabatch.data.decoded import Decoded, FromPack

    if not isinstance(source, Decoded) or not isinstance(source.records, FromPack):
        for name in ("resident", "shared"):
            if getattr(config.data, name) == "always":
                raise UserError(f"data.{name} is for packs: make one with megabatch pack")
        decoded = isinstance(source, Decoded)
        return Placed(_decoded_where(source, config, cluster) if decoded else source)
    resident = _resident(source, config, cluster)
    if resident is not None:
        return Placed(resident)
    if _share_out(source, config, cluster):
        from megabatch.data.shared import SharedOut

        records = SharedOut(source.records, source.chosen, config, cluster)
        shared = Decoded(source.data, records, source.chosen, source.labels, source.classes)
        return Placed(_decoded_where(shared, config, cluster), records.begin, records.close)
    return Placed(_decoded_where(source, config, cluster))


def _decoded_where(source: Source, config: Config, cluster: Cluster) -> Source:
    """The source itself, or its images decoded on the GPU."""
    from megabatch.data.decoded import Decoded
    from megabatch.data.on_gpu import OnGpu, faster

    wish, device = config.data.decode, cluster.device
    assert isinstance(source, Decoded)
    if wish == "gpu" and device.type != "cuda":
        raise UserError("data.decode is gpu, but this worker has none: use --data.decode cpu")
    # A trial on the clock has no place in a run whose bits must not depend on it.
    if wish == "cpu" or device.type != "cuda" or (wish == "auto" and config.deterministic):
        return source
    if wish == "auto" and not faster(source, device, threads_of(config, cluster)):
        return source
    there = OnGpu(source, device)
    there.prove()
    return there


def threads_of(config: Config, cluster: Cluster) -> int:
    """How many threads a worker decodes with: as told, or its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return config.data.threads or max(1, cores // cluster.local_world)


def by_processes(source: Source, config: Config, cluster: Cluster) -> bool:
    """Whether a worker reads a source with processes of its own."""
    if config.data.processes == "never" or not separable(source):
        return False
    to_read = len(source) * max(1.0, config.epochs) / cluster.world
    return config.data.processes == "always" or to_read >= _WORTH_PROCESSES


def separable(source: Source) -> bool:
    """Whether another process can open a source and decode its images."""
    records = getattr(source, "records", None)
    return isinstance(source, Fills) and getattr(records, "separable", False)


def shared_out(source: Source) -> SharedOut | None:
    """Where the images of a source are received from other workers, if they are."""
    from megabatch.data.shared import SharedOut

    records = getattr(source, "records", None)
    return records if isinstance(records, SharedOut) else None


def place_validation(source: Source, config: Config, cluster: Cluster) -> Source:
    """Validation images live on the device too, where they fit."""
    from megabatch.data.decoded import Decoded

    if isinstance(source, Decoded):
        return _resident(source, config, cluster) or source
    return source


def _resident(source: Source, config: Config, cluster: Cluster) -> Source | None:
    from megabatch.data.decoded import Decoded
    from megabatch.data.resident import Resident, fits, image_shape

    wish = config.data.resident
    assert isinstance(source, Decoded)
    if wish == "always" and image_shape(source) is None:
        raise UserError(
            "data.resident is always, but the images are no pack of one size: "
            "pack them with --raw --size N"
        )
    if wish == "never":
        return None
    # The free memory of the moment has no say in a run whose bits must not depend on it.
    if wish == "auto" and (config.deterministic or not fits(source, cluster.device)):
        return None
    if source.resident is None:  # decoded once, also for every later evaluation
        source.resident = Resident(source, cluster.device, threads_of(config, cluster))
    kept: Source = source.resident
    return kept


def _share_out(source: Source, config: Config, cluster: Cluster) -> bool:
    from megabatch.data.decoded import Decoded, FromPack

    wish = config.data.shared
    assert isinstance(source, Decoded) and isinstance(source.records, FromPack)
    if cluster.world == 1 or wish == "never":
        return False
    if wish == "always":
        return True
    nbytes, nodes = source.records.pack.nbytes, cluster.world / cluster.local_world
    if nodes <= 1:  # one node's memory is all there is, and the system's cache fills it by itself
        return False

    def too_large_for_one_but_not_for_all() -> bool:
        room = _ROOM * free_memory()
        # Each worker holds its own share, and what it is dealt of two epochs.
        return nbytes > room and 3 * nbytes / nodes <= room

    return cluster.agree(too_large_for_one_but_not_for_all)


def free_memory() -> int:
    """Memory that this node could give, in bytes."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
