"""Where stdout and stderr lead, for this process, its C++ and its subprocesses alike.

What is under way, said now and then, so that a wait is told from a standstill.
"""

from __future__ import annotations

import contextlib
import math
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


EVERY = 30.0  # seconds without a line, after which there is one; each further one waits twice as long
LONGEST = 10  # times EVERY, between two such lines
SLOWER, PATIENCE = 1.5, 10.0  # the estimate grows only if it exceeds 1.5 times the last one plus 10 seconds
LOOK = 0.5  # seconds between two pictures on a terminal: painting competes with the work for the processor
ERASE_LINE = "\r\x1b[K"


class Ticker:
    """Calls `tick` from a thread, at once and then every `every` seconds, until stopped or the terminal is gone.

    If `tick` raises anything else, its traceback goes to stderr and `failed` is called.
    """

    def __init__(
        self, tick: Callable[[], None], *, every: float = LOOK, failed: Callable[[], None] = lambda: None
    ) -> None:
        self._tick = tick
        self._every = every
        self._failed = failed
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No tick is under way when this returns, unless the terminal does not take what is written."""
        self._done.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._tick()
            while not self._done.wait(self._every):
                self._tick()
            self._done.set()
        except OSError:  # the terminal has gone away
            self._done.set()
        finally:
            if not self._done.is_set():
                self._failed()


class Heartbeat:
    """Says what `line` gives when nothing has been said for `EVERY` seconds, then ever more rarely; a context manager.

    `say` raising OSError, as a terminal that has been closed does, ends it.
    """

    def __init__(self, line: Callable[[], str], say: Callable[[str], None]) -> None:
        self._line = line
        self._say = say

    def __enter__(self) -> Heartbeat:
        self.said()
        self._ticker = Ticker(self._beat, every=min(LOOK, EVERY / 4))
        return self

    def __exit__(self, *error: object) -> None:
        self._ticker.stop()

    def said(self) -> None:
        """Something else was said just now."""
        self._said, self._wait = time.monotonic(), EVERY

    def _beat(self) -> None:
        if time.monotonic() - self._said < self._wait:
            return
        wait = min(2 * self._wait, LONGEST * EVERY)
        if text := self._line():
            self._say(text)
        self._said, self._wait = time.monotonic(), wait


class WaitingLine:
    """Says on `descriptor` what `line` gives while that is waited for; a context manager.

    Where somebody looks (`live`) it is one line that the next one replaces, elsewhere a line now and then. It goes
    where the descriptor led at first, wherever other output is sent meanwhile.
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
        """A line that stays."""
        self._write(f"{ERASE_LINE if self._live else ''}{text}\n")

    def make_way(self) -> None:
        """Take the line away for something that is written now; it comes again."""
        if self._live:
            self._erase()

    def _paint(self) -> None:
        if in_front(self._descriptor):
            width, _ = size_of(self._descriptor)
            self._write(ERASE_LINE + cut(self._line(), width - 1))

    def _erase(self) -> None:
        with contextlib.suppress(OSError):  # there may be no terminal any more
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        os.write(self._descriptor, text.encode(errors="replace"))


@dataclass
class Pace:
    """How far something is that began at `since`: a count with its total, and the tokens sampled so far."""

    since: float
    done: int | None = None
    total: int | None = None
    tokens: int | None = None
    _each: float = math.inf  # tokens, or seconds where no tokens are counted, for one of `total`
    _end: float = math.inf  # estimated end time that was last printed

    def count(self, now: float, done: int | None, total: int | None, tokens: int | None) -> None:
        """This much is done by `now`."""
        self.done, self.total, self.tokens = done, total, tokens
        if done:
            self._each = min(self._each, (now - self.since if tokens is None else tokens) / done)

    def line(self, doing: str, now: float, unit: str = "") -> str:
        """What is done, how far it is and how fast: `evaluating 120 of 500, 34 s, 850 tok/s, 0:52 left`."""
        extent = "" if self.total is None else f" {self.done or 0} of {self.total}{unit}"
        return ", ".join([f"{doing}{extent}", f"{now - self.since:.0f} s", *self.figures(now)])

    def figures(self, now: float) -> list[str]:
        """Tokens a second and the time left, where they are known."""
        seconds = now - self.since
        figures = [f"{self.tokens / seconds:.0f} tok/s"] if self.tokens and seconds > 0 else []
        if (left := self._left(now)) is not None:
            minutes, second = divmod(round(left), 60)
            figures.append(f"{minutes}:{second:02d} left")
        return figures

    def _left(self, now: float) -> float | None:
        """Seconds left; None where nothing has ended yet, or more was sampled than all of it should take.

        By tokens, which go on while the count waits for a long completion. The last completions of a batch are
        slower, so the end is put off only for a pace that has really changed.
        """
        seconds = now - self.since
        work = seconds if self.tokens is None else self.tokens
        if not self.done or not self.total or not work or seconds < 1:
            return None
        left = seconds * (self._each * self.total / work - 1)
        if left < self._end - now or left > SLOWER * (self._end - now) + PATIENCE:
            self._end = now + left
        return self._end - now if self._end > now else None
