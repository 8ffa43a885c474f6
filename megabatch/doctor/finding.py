"""What the doctor says of one part of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingState = Literal["works", "limited", "missing", "stops"]


@dataclass(frozen=True)
class Finding:
    """One row: what was found, what that costs and the way out (both empty where the part
    works)."""

    part: str
    state: FindingState
    found: str
    costs: str = ""
    remedy: str = ""

    @property
    def allows(self) -> bool:
        """Whether training can work with the part as it is."""
        return self.state != "stops"
