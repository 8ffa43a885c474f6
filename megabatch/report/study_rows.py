"""A study's cells as lines of text: the recipe by batch, then the arms, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megabatch.report.columns import aligned, lines
from megabatch.study.trials import RECIPE

_SPARE = ("images/s", "seconds", "epochs", "steps")
"""what is left out first where a table would be wider: the page has it"""


def table_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of the recipe by batch, one of the arms, and what their columns mean."""
    recipe = [_cells(row, ("arm", "to recipe")) for row in rows if row["arm"] == RECIPE]
    arms = [_cells(row, ("to baseline", "epochs")) for row in rows if row["arm"] != RECIPE]
    for table in (recipe, arms):
        if table:
            yield from lines(aligned(table, _SPARE, left=("arm",)))
            yield ""
    several = any(row["top1_half"] is not None for row in rows)
    spread = "±: 95 % interval over seeds" if several else "more --seeds give intervals"
    yield f"top-1 in %, differences in points, {spread};"
    yield "epochs: until the baseline's last top-1 was reached, -: it was not"


def _cells(row: dict[str, Any], without: tuple[str, ...]) -> dict[str, str]:
    cells = {
        "arm": row["arm"],
        "batch": f"{row['batch']:,}",
        "seeds": f"{len(row['seeds'])}",
        "failed": f"{len(row['failed']) or ''}",
        "top-1": _spread(row["top1"], row["top1_half"], ".2f"),
        "to baseline": _spread(row["to_baseline"], row["to_baseline_half"], "+.2f"),
        "to recipe": _spread(row["to_recipe"], row["to_recipe_half"], "+.2f"),
        "epochs": _spread(row["epochs_to_baseline"], None, ".1f"),
        "steps": _spread(row["steps"], None, ",.0f"),
        "seconds": _spread(row["seconds"], None, ",.1f"),
        "images/s": _spread(row["images_per_second"], None, ",.0f"),
    }
    return {head: cell for head, cell in cells.items() if head not in without}


def _spread(value: float | None, half: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + (f" ± {half:.2f}" if half is not None else "")
