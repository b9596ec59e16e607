"""Signals of a training: Ctrl-C, SIGTERM and SIGHUP end it in order, a second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlpost.errors import STOPPED_BY
from rlpost.output import leave_dead_terminals
from rlpost.screen import Screen
from rlpost.screen.state import AGAIN, STOPPING

LEAVING = f"stopping: there is nothing new to save; {AGAIN}"
ENDING = f"the training is done, and ends once it is saved; {AGAIN}"


class Stopped(BaseException):
    """A signal has ended work that need not be finished; the run ends in order."""


class Signals:
    """Answers signals; the answer depends on the work in progress.

    A signal abandons loading and evaluations, and lets a step and its save finish first. A second signal leaves at
    once, unless it is SIGHUP, which a closing terminal sends more than once.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.exit_code = 0
        self._answer = LEAVING  # shown at the first signal
        self._abandons = True  # whether the first signal ends the work in progress
        self._leaves_next = False  # whether one more signal leaves at once
        self._previous: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether a signal has requested the run to end."""
        return self.exit_code != 0

    def catch(self) -> None:
        """Let signals end the run, until `release`.

        An ignored SIGHUP, as under nohup, stays ignored. Only the main thread can catch signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOPPED_BY:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Restore the signal handlers."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def abandoning(self, what: str) -> Iterator[None]:
        """Let a signal end the block, which does `what`; the step before it is saved, if it is not yet."""
        before = self._answer, self._abandons
        self._answer, self._abandons = f"stopping: {what} is abandoned, the last step is saved first; {AGAIN}", True
        try:
            yield
        except Stopped:
            return
        finally:
            self._answer, self._abandons = before

    def steps_begin(self) -> None:
        """From now on, let the current step finish after a signal."""
        self._answer, self._abandons = STOPPING, False

    def steps_end(self) -> None:
        """From now on, only save and end: a signal has nothing left to stop."""
        self._answer = ENDING

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = STOPPED_BY[signal.Signals(number)]
        if number == signal.SIGHUP:
            leave_dead_terminals()
        elif self._leaves_next:
            self.screen.leave_at_once("left at once, without saving")
            os._exit(code)
        is_first = not (self.stopping or self._leaves_next)
        self._leaves_next |= number != signal.SIGHUP
        if not is_first:
            return
        self.screen.show_stopping(self._answer)
        if self._answer is ENDING:
            return
        self.exit_code = code
        if self._abandons:
            raise Stopped
