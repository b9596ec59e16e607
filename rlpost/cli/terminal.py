"""What reaches the terminal: errors on one line, and no control character of anybody's text."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.cli.columns import fitted_table, output_width
from rlpost.folding import shortened
from rlpost.heartbeat import Pace, WaitingLine
from rlpost.output import descriptors_onto
from rlpost.text import printable, without_passwords

if TYPE_CHECKING:
    from rlpost.model.precision import Numbers

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
