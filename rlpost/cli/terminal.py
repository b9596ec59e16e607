"""Prints to the terminal: errors on one line, text without control characters, fitted to the columns of the screen."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.output import Pace, WaitingLine, descriptors_onto
from rlpost.text import printable, shortened, without_passwords

if TYPE_CHECKING:
    from rich.text import Text

    from rlpost.record import Fact

RED, GREEN, YELLOW = "\x1b[31m", "\x1b[32m", "\x1b[33m"
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def print_error(message: str) -> None:
    """Print `error: message` on stderr, the first word red on a terminal."""
    print(f"{painted('error:', RED, sys.stderr)} {printable(without_passwords(message))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result as JSON. All but ASCII is escaped, so that no control character reaches the terminal.

    A date from a config.yaml becomes text.
    """
    print(json.dumps(value, indent=2, default=str))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines without control characters, cut to the width of a terminal; whole in a pipe or file."""
    width = output_width(0)
    print("\n".join(shortened(printable(line), width) if width else printable(line) for line in lines))


def takes_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with colours, and the user wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style (RED, DIM, ...) if `stream` takes colours, else unchanged."""
    return f"{style}{text}{RESET}" if text and takes_colour(stream) else text


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send stdout to stderr meanwhile, also that of engines and subprocesses.

    They write to the file descriptor, so replacing `sys.stdout` alone would not catch them.
    """
    with descriptors_onto(2, 1), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def saying_stopped(words: str) -> Iterator[None]:
    """Print `words` on stderr if Ctrl-C or SIGTERM ends the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):  # there may be no terminal any more
            print(words, file=sys.stderr, flush=True)
        raise


class StatusLine(WaitingLine):
    """Shows the work in progress on stderr: a live line on a terminal, else a line now and then; a context manager."""

    def __init__(self, doing: str) -> None:
        super().__init__(2, self._progress, live=sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
        self.now(doing)

    def now(self, doing: str, done: int | None = None, total: int | None = None, tokens: int | None = None) -> None:
        """Set the work in progress; repeated calls update how far it is and how many tokens were sampled."""
        now = time.monotonic()
        if getattr(self, "_doing", None) != doing:
            self._doing, self._pace = doing, Pace(now)
        self._pace.done, self._pace.total, self._pace.tokens = done, total, tokens

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.say(f"note: {printable(text)}")

    def precision(self, precision: Fact) -> None:
        """Print the precision of a command, and its warning if it has one."""
        if precision.value:
            self.say(painted(printable(str(precision)), DIM, sys.stderr))
        if precision.note:
            self.note(precision.note)

    def _progress(self) -> str:
        return printable(self._pace.line(self._doing, time.monotonic()))


def output_width(piped: int = 100) -> int:
    """Columns of the terminal on stdout, or `piped` if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else piped


WHOLE = 100_000  # columns of a table that nothing cuts
NARROWEST = 5  # columns of a cell that is cut, at least


def table(
    rows: Sequence[Sequence[str | Text]],
    width: int | None = None,
    *,
    right: Collection[int] = (),
    cuttable: Sequence[int] = (),
    indent: int = 0,
    heading: bool = False,
) -> list[str]:
    """Rows of equal length as lines with aligned columns, of at most `width` columns of the terminal.

    Columns of `right` are right-aligned; with `heading` the first row is dim. Where the table is too wide, its gaps
    are narrowed, then the columns of `cuttable` cut, in this order.
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
    for i, row in enumerate(texts):
        grid.add_row(*row, style="dim" if heading and i == 0 else None)
    lines = io.StringIO()
    colours = "standard" if takes_colour(sys.stdout) else None
    Console(file=lines, width=WHOLE, force_terminal=colours is not None, color_system=colours).print(grid)
    return [f"{' ' * indent}{line}".rstrip() for line in lines.getvalue().splitlines()]
