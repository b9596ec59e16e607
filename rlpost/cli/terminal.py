"""What reaches the terminal: errors on one line, and no control character of anybody's text."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.heartbeat import Heartbeat, progress_line
from rlpost.output import descriptors_onto, where_it_leads
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.model.precision import Numbers

ERASE_LINE = "\r\x1b[2K"
LIVE = 0.5  # seconds between two looks at a line on a terminal
RED, GREEN, DIM, BOLD, RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def print_error(message: str) -> None:
    """`error: message` on stderr, the first word red where a person is looking."""
    print(f"{painted('error:', RED, sys.stderr)} {printable(message)}", file=sys.stderr)


def show_status(text: str) -> None:
    """One line that the next one replaces, where a person is looking; an empty one takes it away."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        width = shutil.get_terminal_size().columns
        print(f"\r\x1b[2K{printable(text)[: width - 1]}", end="", file=sys.stderr, flush=True)


def print_numbers(numbers: Numbers) -> None:
    """The formats that a command computes in, on stderr, with the warning there may be."""
    show_status("")
    if numbers.used:
        print(painted(printable(numbers.line), DIM, sys.stderr), file=sys.stderr, flush=True)
    if numbers.warning is not None:
        print(f"note: {printable(numbers.warning)}", file=sys.stderr, flush=True)


class StatusLine:
    """What is under way, on stderr: one line on a terminal, one now and then elsewhere; a context manager.

    It is seen wherever other output is sent meanwhile.
    """

    def __init__(self, doing: str) -> None:
        self._opened = contextlib.ExitStack()
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.now(doing)

    def now(self, doing: str, done: int | None = None, total: int | None = None, tokens: int | None = None) -> None:
        """From now on this is being done; said again it tells how far it is and how much was sampled."""
        if getattr(self, "_doing", None) != doing:
            self._doing, self._since = doing, time.monotonic()
        self._done, self._total, self._tokens = done, total, tokens

    def __enter__(self) -> StatusLine:
        number = self._number = self._opened.enter_context(where_it_leads(2))
        if self._live:
            self._opened.callback(lambda: _write(number, ERASE_LINE))
        self._opened.enter_context(
            Heartbeat(self._line, lambda text: self._say(number, text), LIVE if self._live else None)
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def note(self, text: str) -> None:
        """Say something that stays, in a line of its own."""
        _write(self._number, f"{ERASE_LINE if self._live else ''}note: {printable(text)}\n")

    def _line(self) -> str:
        seconds = time.monotonic() - self._since
        return printable(progress_line(self._doing, seconds, done=self._done, total=self._total, tokens=self._tokens))

    def _say(self, number: int, text: str) -> None:
        _write(number, f"{ERASE_LINE}{text[: shutil.get_terminal_size().columns - 1]}" if self._live else f"{text}\n")


def _write(number: int, text: str) -> None:
    os.write(number, text.encode(errors="replace"))


def takes_colour(stream: TextIO) -> bool:
    """Whether a person is looking at `stream` on a terminal that has colours, and wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style (RED, DIM, ...) where `stream` takes it, else as it is."""
    return f"{style}{text}{RESET}" if text and takes_colour(stream) else text


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equal length as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def stdout_is_closed() -> bool:
    """Whether the program that read our output (`| head`) has gone away."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLERR)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll here, or stdout is no file
        return False


def discard_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not complain when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send everything written to stdout to stderr meanwhile, by engines and subprocesses too.

    Those write to the file descriptor, so replacing `sys.stdout` alone would not catch them.
    """
    with descriptors_onto(2, 1), contextlib.redirect_stdout(sys.stderr):
        yield


def fitted(line: str) -> str:
    """`line`, cut to the width of the screen where a person reads it; whole in a pipe or file."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else f"{line[: width - 1]}…"


def print_json(value: Any) -> None:
    """A result for a program to read. All but ASCII is escaped, so no text can reach the terminal as more."""
    print(json.dumps(value, indent=2))
