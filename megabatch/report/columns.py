"""Tables of plain text: as wide as what they hold, without what a narrow screen has no room for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

WIDE = 80
_GAP = 2


def aligned(
    rows: Sequence[Mapping[str, str]],
    spare: Sequence[str] = (),
    left: Collection[str] = (),
    wide: int = WIDE,
) -> Iterator[list[str]]:
    """The heads, then each row, as cells of even width; words in `left` columns begin there.

    Columns that hold nothing are left out, and `spare` ones, the first first, until a line is no
    wider than `wide`. No cell is ever cut: a line that cannot be made to fit is too long.
    """
    heads = [head for head in rows[0] if any(row[head] for row in rows)] if rows else []
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}
    for head in spare:
        if sum(widths[one] + _GAP for one in heads) - _GAP > wide and head in heads:
            heads.remove(head)
    for row in [{head: head for head in heads}, *rows] if heads else []:
        yield [row[h].ljust(widths[h]) if h in left else row[h].rjust(widths[h]) for h in heads]


def lines(cells: Iterator[list[str]]) -> Iterator[str]:
    for row in cells:
        yield (" " * _GAP).join(row).rstrip()
