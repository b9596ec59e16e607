"""What reaches the terminal: errors on one line, and no control character of anybody's text."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator, Sequence

from rlpost.text import printable

RED, RESET = "\x1b[31m", "\x1b[0m"


def print_error(message: str) -> None:
    """`error: message` on stderr, the first word red where a person is looking."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = f"{RED}error:{RESET}" if coloured else "error:"
    print(f"{label} {printable(message)}", file=sys.stderr)


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
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
