"""Text fitted to a terminal's columns: tables, wrapped paragraphs, text as it streams; small curves."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Collection, Sequence
from itertools import pairwise

from rlpost.folding import shortened, width_of, wrapped
from rlpost.text import printable

BLOCKS = "▁▂▃▄▅▆▇█"
NARROWEST = 5  # columns that a cell is cut down to at most
LONGEST_WORD = 80  # characters that wait in a pipe


def output_width(piped: int) -> int:
    """Columns of the terminal that stdout is, or `piped` where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else piped


def paragraph(text: str, width: int, most_lines: int | None = None, *, keep_end: bool = False) -> list[str]:
    """Anybody's text wrapped at `width` columns.

    Of more than `most_lines` the first are kept, or the last if `keep_end`, beside a line that
    counts what was cut.
    """
    lines = printable(text).expandtabs(4).splitlines(keepends=True) or [""]
    rows = [row for line in lines for row in wrapped(line, width)]
    cut: list[str] = []
    if most_lines is not None and len(rows) > most_lines + 1:  # the line that counts would take as much room
        kept = slice(-most_lines, None) if keep_end else slice(most_lines)
        cut, rows = (rows[:-most_lines] if keep_end else rows[most_lines:]), rows[kept]
    shown = [row.rstrip() for row in rows]
    remark = [f"… {sum(map(len, cut)):,} more characters"] if cut else []
    return remark + shown if keep_end else shown + remark


class WordWrap:
    """Anybody's text that comes in pieces, broken between words where a line of the terminal ends.

    A word waits until it is whole; `rest` gives the last one.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""

    def add(self, piece: str) -> str:
        """What can be printed now."""
        return "".join(self._character(character) for character in printable(piece).expandtabs(4))

    def rest(self) -> str:
        """The word that waited."""
        width = output_width(0)
        word, self._word = self._word, ""
        breaks = width and self._column > 0 and self._column + width_of(word) > width
        self._column = width_of(word) + (0 if breaks else self._column)
        return f"\n{word}" if breaks and word else word

    def _character(self, character: str) -> str:
        if character == "\n":
            shown, self._column = self.rest() + "\n", 0
            return shown
        if character == " ":
            shown, width = self.rest(), output_width(0)
            self._column += 1
            return shown if width and self._column >= width else f"{shown} "
        if width_of(character) > 1:  # writing systems without spaces break anywhere
            shown = self.rest()
            self._word = character
            return shown + self.rest()
        self._word += character
        return self.rest() if len(self._word) >= (output_width(0) or LONGEST_WORD) else ""


def fitted_table(
    rows: Sequence[Sequence[str]], width: int | None, *, right: Collection[int] = (), cuttable: Sequence[int] = ()
) -> list[str]:
    """Rows of equal length as aligned lines of at most `width` columns.

    Columns of `right` are right-aligned. Where the table is too wide the gaps are narrowed first,
    then the columns of `cuttable` are cut, in this order.
    """
    widths = [max(width_of(cell) for cell in column) for column in zip(*rows, strict=True)]
    gap = 2
    if width is not None:
        if sum(widths) + gap * (len(widths) - 1) > width:
            gap = 1
        for column in cuttable:
            excess = sum(widths) + gap * (len(widths) - 1) - width
            widths[column] -= min(max(0, excess), max(0, widths[column] - NARROWEST))
    return [
        (" " * gap)
        .join(_padded(cell, w, i in right) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]


def curve(values: Sequence[float], width: int) -> str:
    """The course of `values` as at most `width` blocks, from the least value to the greatest."""
    points = [sum(part) / len(part) for part in _parts([v for v in values if math.isfinite(v)], width)]
    low, high = min(points, default=0.0), max(points, default=0.0)
    if not math.isfinite(high - low):
        return ""
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((point - low) * scale)] for point in points)


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """`values` in at most `count` neighbouring parts, none empty."""
    count = min(count, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    return [values[a:b] for a, b in pairwise(edges)]


def _padded(cell: str, width: int, right: bool) -> str:
    cell = shortened(cell, width)
    padding = " " * (width - width_of(cell))
    return padding + cell if right else cell + padding
