"""Calls of games with deadlines, made in threads that are kept for the next ones.

One thread makes the calls of all games of a batch. If a call takes long, more threads take over the other games, and
a call that does not return in time is left behind in its thread, where a SystemExit ends it as soon as it runs Python
code. Starting or waking a thread costs more than a move of most games.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from time import monotonic
from typing import Protocol

from rlpost.envs.draws import Draws, Turn
from rlpost.errors import named

LONG_SECONDS = 0.002  # after which other games do not wait for a call any more
KEPT = 2  # threads without work that wait for more
GRACE_SECONDS = 60.0  # in which no Python code runs, beyond a call's own; then the process ends
_idle: list[SimpleQueue[Callable[[], bool]]] = []  # of threads without work


class Called(Protocol):
    """A game with pending calls: what each is named, the seconds it may take, and the call itself."""

    name: str
    draws: Draws
    calls: list[tuple[str, float, Callable[[], None]]]
    error: str | None
    failure: BaseException | None


def make_calls(games: Sequence[Called], generators: Sequence[str] = ()) -> None:
    """Make the pending calls of games: at the same time, or in turn if they draw from process-wide `generators`.

    A call that raises or is late sets the `error` of its game (and `failure`, the exception), and the calls behind it
    are not made. The time in which a game waits for its turn does not count.
    """
    pending = [game for game in games if game.calls]
    if pending:
        _Batch(pending, generators).run()


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


class _Runner:
    """The part of a batch that one thread does."""

    def __init__(self, generators: Sequence[str]) -> None:
        self.turn = Turn(generators) if generators else None
        self.game: Called | None = None
        self.seen: Called | None = None  # the game when the batch last looked
        self.call: tuple[str, float, float] = ("", 0.0, math.inf)  # name, seconds, deadline
        self.left = False  # left behind
        self.thread = 0  # its ident


class _Batch:
    def __init__(self, games: Sequence[Called], generators: Sequence[str]) -> None:
        self._generators = generators
        self._shortest = min(seconds for game in games for _, seconds, _ in game.calls)
        self._waiting = deque(games)
        self._running: list[_Runner] = []
        # a runner takes the lock itself: SystemExit may come inside Condition.__enter__, and would leave it locked
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def run(self) -> None:
        """Return when each game has made its calls or has an error."""
        with self._changed:
            self._add_runners(1)
            try:
                while self._running:
                    self._look(monotonic())
            finally:  # also if Ctrl-C ends the wait
                self._waiting.clear()
                for runner in list(self._running):
                    self._leave(runner)

    def _look(self, now: float) -> None:
        """Leave late calls behind, let others take over from long ones, and wait."""
        for runner in list(self._running):
            what, seconds, deadline = runner.call
            if deadline > now:
                continue
            assert runner.game is not None
            runner.game.error = _late(runner.game, what, seconds)
            self._leave(runner)
            self._add_runners(not self._running)
        together = bool(self._waiting) and not self._generators
        if together:
            self._add_runners(sum(runner.game is not None and runner.game is runner.seen for runner in self._running))
        for runner in self._running:
            runner.seen = runner.game
        if self._running:
            first = min(runner.call[2] for runner in self._running) - now
            self._changed.wait(min(first, self._shortest, LONG_SECONDS if together else math.inf))

    def _add_runners(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            runner = _Runner(self._generators)
            self._running.append(runner)
            _in_thread(lambda runner=runner: self._serve(runner))

    def _leave(self, runner: _Runner) -> None:
        """Go on without a runner, and end its call: it does no more work, so no other call can be hit."""
        runner.left = True
        self._running.remove(runner)
        if runner.turn is not None:
            runner.turn.end()
        if runner.call[2] < math.inf:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(runner.thread), ctypes.py_object(SystemExit))

    # In a runner's thread

    def _serve(self, runner: _Runner) -> bool:
        """Play games as long as some wait; whether the runner was left behind."""
        runner.thread = threading.get_ident()
        if runner.turn is not None:
            runner.turn.begin()
        while (game := self._next(runner)) is not None:
            if runner.turn is None or runner.turn.enter(game.draws):
                self._make(runner, game)
        return runner.left

    def _next(self, runner: _Runner) -> Called | None:
        with self._lock:
            if not runner.left and self._waiting:
                runner.game = self._waiting.popleft()
                return runner.game
            if runner.turn is not None:
                runner.turn.end()
            if not runner.left:
                self._running.remove(runner)
                if not self._running:
                    self._changed.notify()
            return None

    def _make(self, runner: _Runner, game: Called) -> None:
        calls, game.calls = game.calls, []
        for what, seconds, call in calls:
            failure: BaseException | None = None
            deadline = monotonic() + seconds
            runner.call = what, seconds, deadline
            try:
                call()
            except BaseException as error:  # noqa: BLE001  the error of this game alone
                failure = error
            late = monotonic() > deadline  # also if the call has kept the GIL, so that nobody could look
            if late or failure is not None:
                with self._lock:
                    if not runner.left:
                        game.error = _late(game, what, seconds)
                        if failure is not None and not late:
                            game.failure, game.error = failure, f"{game.name}: {what} failed: {named(failure)}"
            if runner.left or game.error is not None:
                break
        runner.call = "", 0.0, math.inf
        if runner.turn is not None and not runner.left:
            game.draws.keep(runner.turn.generators)


def _late(game: Called, what: str, seconds: float) -> str:
    return f"{game.name}: {what} did not return within {seconds:g} s"


def _in_thread(work: Callable[[], bool]) -> None:
    """Do `work` in a thread, which ends if `work` returns True.

    A daemonic one: a game that hangs must not keep the interpreter from exiting.
    """
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_work_off, args=(inbox,), name="rlpost-games", daemon=True).start()
    inbox.put(work)


def _work_off(inbox: SimpleQueue[Callable[[], bool]]) -> None:
    while True:
        if inbox.get()():
            return
        _idle.append(inbox)
        if len(_idle) > KEPT:
            with suppress(ValueError):  # another thread has just given this one more work
                _idle.remove(inbox)
                return
