"""How long a score is waited for: one call, and how many that were late before the rest is not tried."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOST_IN_A_ROW = 3  # rows; each costs the deadline, so a function that always hangs is found out soon
LOST_IN_ALL = 16


@dataclass
class Patience:
    """How many rows may still be lost, to a deadline or with their process, before the rest is not tried."""

    in_a_row: int = 0
    in_all: int = 0
    last: str = ""

    def note(self, error: str | None) -> None:
        """A row was lost with this error, or not lost."""
        self.in_a_row = self.in_a_row + 1 if error else 0
        self.in_all += bool(error)
        self.last = error or self.last

    @property
    def refusal(self) -> str | None:
        """Why the next row is not tried, or None if it is."""
        if self.in_a_row < LOST_IN_A_ROW and self.in_all < LOST_IN_ALL:
            return None
        return f"not tried after {self.in_all} others were lost: {self.last}"


class TooLong(BaseException):
    """A plain function has not returned in time; no Exception, which the function might catch."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise TooLong in a block that takes longer; in the main thread only, where Python can interrupt itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
