"""How gradients are to be summed, where a command line says so: what it cannot mean is refused."""

from __future__ import annotations

from dataclasses import dataclass

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.verbs.parsing import parse_some


@dataclass(frozen=True)
class HybridAsked:
    small: str | None = None
    large: str | None = None
    threshold_mb: str | None = None


@dataclass(frozen=True)
class Sums:
    plan: str | None = None
    wire: str | None = None
    hybrid: HybridAsked = HybridAsked()


def check_sums(config: Config, words: str, arguments: list[str]) -> None:
    """Refuse what the arguments of `megabatch WORDS ...` ask for and the config would ignore: a
    recipe's own plan gives way to the tree, one that is asked for beside it contradicts it."""
    asked = parse_some(Sums, words, arguments)
    hybrid = asked.hybrid != HybridAsked()
    if config.deterministic and (
        asked.plan not in (None, "backend") or asked.wire not in (None, "fp32") or hybrid
    ):
        raise UserError(
            "a deterministic run sums along one tree in fp32: drop --plan, --wire and --hybrid"
        )
    if hybrid and config.plan != "hybrid":
        raise UserError(
            f"--hybrid is for plan hybrid, and this run sums by plan {config.plan}: add --plan "
            f"hybrid, or leave it away"
        )
