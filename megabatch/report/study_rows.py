"""A study's cells as a table on standard output: a line for each arm and batch."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megabatch.study.trials import RECIPE


def show(rows: list[dict[str, Any]]) -> None:
    """At a terminal as wide as it is; in a pipe a row is one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("arm", no_wrap=True)
    for head in ("batch", "seeds", "top-1", "to baseline", "to recipe", "epochs to it"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("steps", "images/s", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        failed = f" ({len(row['failed'])} failed)" if row["failed"] else ""
        is_arm = row["arm"] != RECIPE
        table.add_row(
            row["arm"],
            f"{row['batch']:,}",
            f"{len(row['seeds'])}{failed}",
            _spread(row["top1"], row["top1_half"], ".2f"),
            _spread(row["to_baseline"], row["to_baseline_half"], "+.2f"),
            _spread(row["to_recipe"], row["to_recipe_half"], "+.2f") if is_arm else "",
            _spread(row["epochs_to_baseline"], None, ".1f"),
            _spread(row["steps"], None, ",.0f"),
            _spread(row["images_per_second"], None, ",.0f"),
            _spread(row["seconds"], None, ",.1f"),
        )
    console = Console()
    console.print(table) if console.is_terminal else Console(width=400).print(table)


def _spread(value: float | None, half: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + (f" ± {half:.2f}" if half is not None else "")
