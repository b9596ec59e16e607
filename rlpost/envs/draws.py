"""The process-wide generators of `random` and NumPy, with a state of its own for each game that draws from them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

GENERATORS = ("random", "numpy")
_turn = threading.Lock()  # held during a turn
_ending = threading.Lock()  # held while a turn sets the generators, or ends
_turns = [0]  # how many turns there have been


class Draws:
    """The states of the generators as one game left them; they begin with its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states: list[Any] | None = None

    def restore(self, generators: Sequence[str]) -> None:
        """Set the generators to these states."""
        if self._states is not None:
            _set_states(generators, self._states)
            return
        for name in generators:
            (random if name == "random" else np.random).seed(self.seed)

    def keep(self, generators: Sequence[str]) -> None:
        """Take the states from the generators."""
        self._states = _states(generators)


class Turn:
    """A time in which the games of one thread draw from `generators`, while all others wait.

    The states of the rest of the program are saved at the beginning and restored at the end. Another thread may end
    the turn of a thread that hangs.
    """

    def __init__(self, generators: Sequence[str]) -> None:
        self.generators = generators
        self._others: list[Any] | None = None  # None: not begun, or over

    def begin(self) -> None:
        """Wait for the turn."""
        _turn.acquire()
        _turns[0] += 1
        self._others = _states(self.generators)

    def enter(self, draws: Draws) -> bool:
        """Give the generators to a game; False if the turn is over."""
        with _ending:
            if self._others is not None:
                draws.restore(self.generators)
            return self._others is not None

    def end(self) -> None:
        """Give the generators back to the rest of the program; does nothing if the turn is over or has not begun."""
        with _ending:
            others, self._others = self._others, None
            if others is not None:
                _set_states(self.generators, others)
                _turn.release()


class Watch:
    """Finds out whether the games played since it was made have drawn from the generators."""

    def __init__(self) -> None:
        self._turns, self._alone = _turns[0], not _turn.locked()  # before the states: a turn from here on is counted
        self._before = _states(GENERATORS)

    def end(self) -> bool:
        """Whether the generators were drawn from; if so, they are set back.

        False if a turn overlaps with this time: the change may come from the turn, whose states must stay.
        """
        if not self._alone or not _turn.acquire(blocking=False):
            return False
        try:
            if _turns[0] != self._turns or _digest(_states(GENERATORS)) == _digest(self._before):
                return False
            _turns[0] += 1
            _set_states(GENERATORS, self._before)
            return True
        finally:
            _turn.release()


def _states(generators: Sequence[str]) -> list[Any]:
    return [random.getstate() if name == "random" else np.random.get_state() for name in generators]


def _set_states(generators: Sequence[str], states: Sequence[Any]) -> None:
    for name, state in zip(generators, states, strict=True):
        if name == "random":
            random.setstate(state)
        else:
            np.random.set_state(state)


def _digest(states: Sequence[Any]) -> tuple[Any, ...]:
    own, (_, keys, place, *normal) = states
    return own, keys.tobytes(), place, *normal
