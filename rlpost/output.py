"""Output: where stdout and stderr of this process, its C++ and its subprocesses lead, and progress in long waits."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlpost.text import cut, printable

EVERY = 30.0  # seconds of silence before a heartbeat's first line; each further one waits twice as long
LONGEST = 10  # most times EVERY between two lines
LOOK = 0.5  # seconds between two frames on a terminal: painting competes with the work for the CPU
ERASE_LINE = "\r\x1b[K"


@contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Inside the block, append everything written to stdout and stderr to `file`."""
    with file.open("a") as sink, descriptors_onto(sink.fileno(), 1, 2):
        yield


@contextmanager
def output_aside() -> Iterator[None]:
    """Hide everything written to stdout and stderr inside the block, unless an error ends it."""
    with tempfile.TemporaryFile() as kept:
        try:
            with descriptors_onto(kept.fileno(), 1, 2):
                yield
        except Exception:
            kept.seek(0)
            hidden = kept.read().decode(errors="replace").replace("\r", "\n")  # progress bars as lines
            print(printable(hidden), end="", file=sys.stderr)
            raise


@contextmanager
def descriptors_onto(sink: int, *numbers: int) -> Iterator[None]:
    """Inside the block, send everything written to the file descriptors `numbers` to the descriptor `sink`.

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
        finally:  # a full disk fails the flush, and the error must be seen
            for number, copy in zip(numbers, kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def where_it_leads(number: int) -> Iterator[int]:
    """A copy of the descriptor `number`, which keeps leading to the same place if `number` is redirected."""
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
    """Columns and lines of a terminal; 80 x 24 if unknown or closed."""
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24


def is_closed(number: int) -> bool:
    """Whether a descriptor leads to a closed terminal or a pipe without a reader (`| head`)."""
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def lead_nowhere(number: int) -> None:
    """Redirect a descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def leave_dead_terminals() -> None:
    """Redirect stdout and stderr to /dev/null if nobody reads them."""
    for number in (1, 2):
        if is_closed(number):
            lead_nowhere(number)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# Progress lines during a wait, so that it is not taken for a standstill


class Heartbeat:
    """Prints `line()` with `say` after `EVERY` seconds of silence, then ever more rarely; a context manager.

    An OSError from `say`, as from a closed terminal, ends it.
    """

    def __init__(self, line: Callable[[], str], say: Callable[[str], None]) -> None:
        self._line = line
        self._say = say

    def __enter__(self) -> Heartbeat:
        self.restart()
        self._ticker = Ticker(self._beat, every=min(LOOK, EVERY / 4))
        return self

    def __exit__(self, *error: object) -> None:
        self._ticker.stop()

    def restart(self) -> None:
        """Restart the silence: something else was printed."""
        self._last_printed, self._wait = time.monotonic(), EVERY

    def _beat(self) -> None:
        if time.monotonic() - self._last_printed < self._wait:
            return
        wait = min(2 * self._wait, LONGEST * EVERY)
        if text := self._line():
            self._say(text)
        self._last_printed, self._wait = time.monotonic(), wait


class WaitingLine:
    """Prints `line()` on `descriptor` during a wait; a context manager.

    If `live`, each line replaces the one before; otherwise a line is printed now and then. They go where the
    descriptor led at first, even if other output is redirected meanwhile.
    """

    def __init__(self, descriptor: int, line: Callable[[], str], *, live: bool) -> None:
        self._leads_to = descriptor
        self._line = line
        self._live = live
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._descriptor = self._opened.enter_context(where_it_leads(self._leads_to))
        if self._live:
            self._opened.callback(self._erase)
            self._opened.callback(Ticker(self._paint).stop)
        else:
            self._opened.enter_context(Heartbeat(self._line, self.say))
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(f"{ERASE_LINE if self._live else ''}{text}\n")

    def make_way(self) -> None:
        """Erase the line, so that something else can be printed; it will come back."""
        if self._live:
            self._erase()

    def _paint(self) -> None:
        if in_front(self._descriptor):
            width, _ = size_of(self._descriptor)
            self._write(ERASE_LINE + cut(self._line(), width - 1))

    def _erase(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        os.write(self._descriptor, text.encode(errors="replace"))


class Ticker:
    """Calls `tick` from a thread, at once and then every `every` seconds, until stopped or the terminal is gone."""

    def __init__(self, tick: Callable[[], None], *, every: float = LOOK) -> None:
        self._tick = tick
        self._every = every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; no tick runs when this returns, unless the terminal blocks."""
        self._done.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone away
            self._tick()
            while not self._done.wait(self._every):
                self._tick()


@dataclass
class Pace:
    """The progress of work that began at `since`: a count with its total, and the tokens sampled so far."""

    since: float
    done: int | None = None
    total: int | None = None
    tokens: int | None = None

    def line(self, doing: str, now: float, unit: str = "") -> str:
        """Progress as a line: `evaluating 120 of 500, 34 s, 850 tok/s, 0:52 left`."""
        extent = "" if self.total is None else f" {self.done or 0} of {self.total}{unit}"
        return ", ".join([f"{doing}{extent}", f"{now - self.since:.0f} s", *self.figures(now)])

    def figures(self, now: float) -> list[str]:
        """Tokens per second and the time left, if known."""
        seconds = now - self.since
        figures = [f"{self.tokens / seconds:.0f} tok/s"] if self.tokens and seconds > 0 else []
        if self.done and self.total and self.done < self.total:
            minutes, second = divmod(round(seconds * (self.total - self.done) / self.done), 60)
            figures.append(f"{minutes}:{second:02d} left")
        return figures
