"""Prints to the terminal: errors on one line, text without control characters, fitted to the columns of the screen."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.output import Pace, WaitingLine, descriptors_onto
from rlpost.text import printable, shortened, without_passwords, wrapped

if TYPE_CHECKING:
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


def paragraph(text: str, width: int, most_lines: int | None = None, *, keep_end: bool = False) -> list[str]:
    """Text wrapped at `width` columns, its control characters shown.

    Of more than `most_lines` the first are kept, or the last if `keep_end`, and one line counts the
    characters left out.
    """
    lines = printable(text).expandtabs(4).splitlines(keepends=True) or [""]
    rows = [row for line in lines for row in wrapped(line, width)]
    cut: list[str] = []
    if most_lines is not None and len(rows) > most_lines + 1:  # the counting line takes the room of one
        kept = slice(-most_lines, None) if keep_end else slice(most_lines)
        cut, rows = (rows[:-most_lines] if keep_end else rows[most_lines:]), rows[kept]
    shown = [row.rstrip() for row in rows]
    remark = [f"… {sum(map(len, cut)):,} more characters"] if cut else []
    return remark + shown if keep_end else shown + remark
