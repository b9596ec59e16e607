"""What reaches the terminal: errors on one line, and no control character of anybody's text.

Text fitted to a terminal's columns: tables, wrapped paragraphs, text as it streams; small curves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.output import Pace, WaitingLine, descriptors_onto
from rlpost.text import printable, shortened, width_of, without_passwords, wrapped

if TYPE_CHECKING:
    from rlpost.model.precision import Numbers

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


RED, GREEN, DIM, BOLD, RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def print_error(message: str) -> None:
    """`error: message` on stderr, the first word red where a person is looking."""
    print(f"{painted('error:', RED, sys.stderr)} {printable(without_passwords(message))}", file=sys.stderr)


class StatusLine(WaitingLine):
    """What is under way, on stderr: one line on a terminal, one now and then elsewhere; a context manager."""

    def __init__(self, doing: str) -> None:
        super().__init__(2, self._progress, live=sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
        self.now(doing)

    def now(self, doing: str, done: int | None = None, total: int | None = None, tokens: int | None = None) -> None:
        """From now on this is being done; said again it tells how far it is and how much was sampled."""
        now = time.monotonic()
        if getattr(self, "_doing", None) != doing:
            self._doing, self._pace = doing, Pace(now)
        self._pace.count(now, done, total, tokens)

    def note(self, text: str) -> None:
        """Say something that stays, in a line of its own."""
        self.say(f"note: {printable(text)}")

    def numbers(self, numbers: Numbers) -> None:
        """The formats that a command computes in, with the warning there may be."""
        if numbers.used:
            self.say(painted(printable(numbers.line), DIM, sys.stderr))
        if numbers.warning is not None:
            self.note(numbers.warning)

    def _progress(self) -> str:
        return printable(self._pace.line(self._doing, time.monotonic()))


@contextlib.contextmanager
def saying_stopped(words: str) -> Iterator[None]:
    """Print `words` on stderr where Ctrl-C or SIGTERM ends the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):  # there may be no terminal any more
            print(words, file=sys.stderr, flush=True)
        raise


def takes_colour(stream: TextIO) -> bool:
    """Whether a person is looking at `stream` on a terminal that has colours, and wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style (RED, DIM, ...) where `stream` takes it, else as it is."""
    return f"{style}{text}{RESET}" if text and takes_colour(stream) else text


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equal length as lines with aligned columns."""
    return [indent + line for line in fitted_table(rows, None)]


def print_lines(lines: Iterable[str]) -> None:
    """Anybody's lines, cut to the width of the screen where a person reads them; whole in a pipe or file."""
    width = output_width(0)
    print("\n".join(shortened(printable(line), width) if width else printable(line) for line in lines))


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send everything written to stdout to stderr meanwhile, by engines and subprocesses too.

    Those write to the file descriptor, so replacing `sys.stdout` alone would not catch them.
    """
    with descriptors_onto(2, 1), contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(value: Any) -> None:
    """A result for a program to read. All but ASCII is escaped, so no text can reach the terminal as more.

    A date that somebody wrote into a config.yaml becomes text.
    """
    print(json.dumps(value, indent=2, default=str))
