"""Where stdout and stderr lead, for this process, its C++ and its subprocesses alike."""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpost.text import printable


@contextmanager
def descriptors_onto(sink: int, *numbers: int) -> Iterator[None]:
    """Send everything written to the file descriptors `numbers` meanwhile to the descriptor `sink`.

    C++ and subprocesses write to the descriptors, so replacing `sys.stdout` alone would not catch them.
    """
    _flush()
    kept = [os.dup(number) for number in numbers]
    for number in numbers:
        os.dup2(sink, number)
    try:
        yield
    finally:
        try:
            _flush()
        finally:  # a full disk refuses what was written, and the error has to be seen
            for number, copy in zip(numbers, kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def where_it_leads(number: int) -> Iterator[int]:
    """A descriptor that leads where `number` does now, wherever that is sent meanwhile."""
    copy = os.dup(number)
    try:
        yield copy
    finally:
        os.close(copy)


def in_front(descriptor: int) -> bool:
    """Whether this process may paint the terminal: false in the background (`rlpost ... &`)."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # a terminal that is not the session's own
        return True


def size_of(descriptor: int) -> tuple[int, int]:
    """Columns and lines of a terminal; 80 x 24 for one that does not know or has gone away."""
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24


@contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Append everything written to stdout and stderr meanwhile to `file`."""
    with file.open("a") as sink, descriptors_onto(sink.fileno(), 1, 2):
        yield


@contextmanager
def output_aside() -> Iterator[None]:
    """Keep everything written to stdout and stderr meanwhile from being seen, unless an error ends it."""
    with tempfile.TemporaryFile() as kept:
        try:
            with descriptors_onto(kept.fileno(), 1, 2):
                yield
        except Exception:
            kept.seek(0)
            said = kept.read().decode(errors="replace").replace("\r", "\n")  # progress bars as lines
            print(printable(said), end="", file=sys.stderr)
            raise


def is_closed(number: int) -> bool:
    """Whether a descriptor leads to a closed terminal, or through a pipe to who has gone (`| head`)."""
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def lead_nowhere(number: int) -> None:
    """Send what is written to a descriptor nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def leave_dead_terminals() -> None:
    """Send stdout and stderr nowhere where nobody is at their other end."""
    for number in (1, 2):
        if is_closed(number):
            lead_nowhere(number)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
