"""The score of a reply, failed scores, and the deadlines of scoring."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings.base import RESERVED_PARTS
from rlpost.text import printable

LARGEST = 3.4028234663852886e38  # of float32, the dtype of rewards in training
LOST_IN_A_ROW = 3  # rows lost in a row; each costs the deadline, so a function that always hangs is noticed soon
LOST_IN_ALL = 16  # rows lost in one batch


@dataclass(slots=True)
class Score:
    """The score of a finished reply.

    `reward` is trained on. It is the sum of its `parts`, each times its weight in `weights`: 1 where that has none, and
    0 for a figure that is shown with the parts and is not in the sum. `accuracy_strict` and `accuracy_lenient` are the
    task's own 0/1 measure, apart from the reward, or None if the task has none. `answer` is the answer read from the
    reply, in a canonical form: "" if there is none, None if the task reads no answers; maj@k votes by it.
    `instructions` has, under strict and loose, whether each of the prompt's instructions is followed; None if a task
    has no instructions. A reward that failed is `valid=False` with its `error`: never a 0. Raises ConfigError for a
    part whose name in the metrics is taken.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    accuracy_strict: float | None = None
    accuracy_lenient: float | None = None
    answer: str | None = None
    instructions: dict[str, list[bool]] | None = None
    valid: bool = True
    error: str | None = None
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if reserved := next((name for name in self.parts if name in RESERVED_PARTS), None):
            raise ConfigError(
                f"a part of a reward is named {reserved}, but reward/{reserved} is a figure of the whole step"
            )


def why_untrainable(value: float) -> str | None:
    """The fault of a reward that is not a finite float32; None for one that can be trained on."""
    if not math.isfinite(value):
        return "which is not a finite number"
    return "which is infinite in float32, where rewards are trained on: scale it down" if abs(value) > LARGEST else None


def log_failures(errors: Sequence[str | None], count: int) -> None:
    """Log that these of `count` rewards failed; without a run, several go to stderr."""
    if errors:
        level = logging.WARNING if count > 1 else logging.INFO
        first = printable(errors[0] or "no reason given")
        logging.getLogger("rlpost").log(level, "%d of %d rewards failed; the first: %s", len(errors), count, first)


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
    """A function has not returned in time; not an Exception, which the function might catch."""


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
