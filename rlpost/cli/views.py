"""How results are laid out on the terminal: tables and curves, for every verb that shows them."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlpost.cli.terminal import takes_colour

if TYPE_CHECKING:
    from rich.text import Text

WHOLE = 100_000  # columns of a table that nothing cuts
NARROWEST = 5  # columns of a cell that is cut, at least


def table(
    rows: Sequence[Sequence[str | Text]],
    width: int | None = None,
    *,
    right: Collection[int] = (),
    cuttable: Sequence[int] = (),
    indent: int = 0,
) -> list[str]:
    """Rows of equal length as lines with aligned columns, of at most `width` columns of the terminal.

    Columns of `right` are right-aligned. Where the table is too wide, its gaps are narrowed, then the columns of
    `cuttable` cut, in this order.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(text.cell_len for text in column) for column in zip(*texts, strict=True)]
    room = WHOLE if width is None else width - indent
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= room else 1
    for i in cuttable:
        excess = max(0, sum(widths) + gap * (len(widths) - 1) - room)
        widths[i] -= min(excess, max(0, widths[i] - NARROWEST))
    grid = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    for i, each in enumerate(widths):
        grid.add_column(width=each, justify="right" if i in right else "left", no_wrap=True, overflow="ellipsis")
    for row in texts:
        grid.add_row(*row)
    lines = io.StringIO()
    colours = "standard" if takes_colour(sys.stdout) else None
    Console(file=lines, width=WHOLE, force_terminal=colours is not None, color_system=colours).print(grid)
    return [f"{' ' * indent}{line}".rstrip() for line in lines.getvalue().splitlines()]
