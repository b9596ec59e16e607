"""How a training is asked to stop by a signal: what is finished, what is abandoned, and what is said."""

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
from rlpost.screen.lines import AGAIN, STOPPING

LEAVING = f"stopping: there is nothing new to save; {AGAIN}"
ENDING = f"the training is done, and ends once it is saved; {AGAIN}"


class Stopped(BaseException):
    """A signal has ended what was under way and is not to be finished; the run takes it for its end."""


class Stoppable:
    """What is under way when a signal comes decides what happens: the part of a run that knows it.

    Loading and evaluations are abandoned, a step and what saves it are finished first. A second signal
    leaves at once, unless it is SIGHUP, which a closing terminal sends more than once.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.exit_code = 0
        self._told = LEAVING  # what the first signal is answered with
        self._abandons = True  # whether it ends what is under way
        self._leaves_next = False  # whether one more leaves at once
        self._previous: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.exit_code != 0

    def catch_signals(self) -> None:
        """From now on Ctrl-C, SIGTERM and SIGHUP end the run, until `release_signals`.

        SIGHUP stays ignored where it is, as under nohup. Only the main thread can catch signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOPPED_BY:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

    def release_signals(self) -> None:
        """Signals do what they did before."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    @contextmanager
    def abandoning(self, what: str) -> Iterator[None]:
        """A signal ends the block, which does `what`; the step before it is saved, if it is not yet."""
        before = self._told, self._abandons
        self._told, self._abandons = f"stopping: {what} is abandoned, the last step is saved first; {AGAIN}", True
        try:
            yield
        except Stopped:
            return
        finally:
            self._told, self._abandons = before

    def steps_begin(self) -> None:
        """A signal lets the step under way end from now on."""
        self._told, self._abandons = STOPPING, False

    def steps_end(self) -> None:
        """There is nothing left that a signal could stop."""
        self._told = ENDING

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
        self.screen.stop_asked(self._told)
        if self._told is ENDING:
            return
        self.exit_code = code
        if self._abandons:
            raise Stopped
