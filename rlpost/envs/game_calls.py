"""Calls of games with deadlines, those of each game in a thread of its own.

A call that does not return in time is left behind in its thread, where a SystemExit ends it as soon as it runs Python
code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rlpost.envs.draws import Draws, Turn
from rlpost.errors import named

GRACE_SECONDS = 60.0  # in which no Python code runs, beyond a call's own; then the process ends
NO_CALL = ("", 0.0, math.inf)  # name, seconds, deadline


class Called:
    """A game with pending calls: what each is named, the seconds it may take, and the call itself."""

    def __init__(self, name: str, draws: Draws) -> None:
        self.name, self.draws = name, draws
        self.calls: list[tuple[str, float, Callable[[], None]]] = []
        self.error: str | None = None
        self.failure: BaseException | None = None  # that the error comes from; None for a late call


def make_calls(games: Sequence[Called], generators: Sequence[str] = ()) -> None:
    """Make the pending calls of games: at the same time, or in turn if they draw from process-wide `generators`.

    A call that raises or is late sets the `error` of its game (and `failure`, the exception), and the calls behind it
    are not made. The time in which a game waits for its turn does not count.
    """
    pending = [game for game in games if game.calls]
    if generators:
        for game in pending:
            _finish([_Run(game, generators)])
    else:
        _finish([_Run(game) for game in pending])


_pending: list[float] = []  # seconds of the calls in `ended_if_stuck`
_counting = threading.Lock()


@contextmanager
def ended_if_stuck(seconds: float) -> Iterator[None]:
    """End the process, with the stacks of its threads on stderr, if a call in the block keeps the GIL for good.

    Then no Python code runs that could leave the call behind. `seconds` are the call's. Python has one such timer:
    the block ends a timer that somebody else has set.
    """
    _count(seconds, _pending.append)
    try:
        yield
    finally:
        _count(seconds, _pending.remove)


def _count(seconds: float, change: Callable[[float], None]) -> None:
    """Set the timer anew: one of the pending calls returns, or is left behind, before it runs out."""
    with _counting:
        change(seconds)
        if _pending:
            faulthandler.dump_traceback_later(max(_pending) + GRACE_SECONDS, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()


class _Run:
    """The pending calls of one game."""

    def __init__(self, game: Called, generators: Sequence[str] = ()) -> None:
        self._game = game
        self._calls, game.calls = game.calls, []
        self._turn = Turn(generators) if generators else None
        self._call = NO_CALL
        self._left = False  # left behind
        self._done = threading.Event()
        self._lock = threading.Lock()  # held while a call ends or is left behind: SystemExit comes only into a call
        # a daemonic one: a game that hangs must not keep the interpreter from exiting
        self._thread = threading.Thread(target=self._work, name="rlpost-games", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the calls are made, or one is late, which is left behind."""
        shortest = min(seconds for _, seconds, _ in self._calls)
        while not self._done.wait(max(0.0, min(self._call[2] - monotonic(), shortest))):
            with self._lock:
                what, seconds, deadline = self._call
                if monotonic() > deadline:
                    self._game.error = _late(self._game, what, seconds)
                    break

    def leave(self) -> None:
        """End a call that is still being made: the thread does no more work for the game."""
        with self._lock:
            if self._done.is_set():
                return
            self._left = True
            if self._turn is not None:
                self._turn.end()
            if self._call is not NO_CALL and self._thread.ident is not None:
                thread = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))

    # In the thread

    def _work(self) -> None:
        if self._turn is None:
            self._make_calls()
        else:
            self._turn.begin()
            if not self._left and self._turn.enter(self._game.draws):
                self._make_calls()
                if self._left:  # and the turn has ended
                    return
                self._game.draws.keep(self._turn.generators)
            self._turn.end()
        self._done.set()

    def _make_calls(self) -> None:
        game = self._game
        for what, seconds, act in self._calls:
            failure: BaseException | None = None
            deadline = monotonic() + seconds
            self._call = what, seconds, deadline
            try:
                act()
            except BaseException as error:  # noqa: BLE001  the error of this game alone
                failure = error
            with self._lock:
                self._call = NO_CALL
                if self._left or game.error is not None:
                    return
                if monotonic() > deadline:  # also if the call has kept the GIL, so that nobody could look
                    game.error = _late(game, what, seconds)
                elif failure is not None:
                    game.failure, game.error = failure, f"{game.name}: {what} failed: {named(failure)}"
                if game.error is not None:
                    return


def _finish(runs: Sequence[_Run]) -> None:
    try:
        for run in runs:
            run.wait()
    finally:  # also if Ctrl-C ends the wait
        for run in runs:
            run.leave()


def _late(game: Called, what: str, seconds: float) -> str:
    return f"{game.name}: {what} did not return within {seconds:g} s"
