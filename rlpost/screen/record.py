"""What stays on the terminal after the live picture: every note, and some of the steps."""

from __future__ import annotations

from collections import deque
from itertools import count

STEPS = 12
FIRST, LAST = 20, 80  # of all other lines

Line = tuple[str, str]  # text and style


class Record:
    """Lines in the order they came, bounded: of the steps every n-th and the last, of others the first and last."""

    def __init__(self) -> None:
        self._serial = count()
        self._steps: list[tuple[int, Line]] = []  # every n-th, the first among them
        self._latest_step: tuple[int, Line] | None = None
        self._num_steps = 0
        self._every = 1
        self._first: list[tuple[int, Line]] = []
        self._last: deque[tuple[int, Line]] = deque(maxlen=LAST)
        self._num_others = 0

    def add(self, text: str, style: str) -> None:
        """A line that matters."""
        entry = (next(self._serial), (text, style))
        if len(self._first) < FIRST:
            self._first.append(entry)
        else:
            self._last.append(entry)
        self._num_others += 1

    def add_step(self, text: str) -> None:
        """The line of the next step."""
        self._latest_step = (next(self._serial), (text, ""))
        if self._num_steps % self._every == 0:
            self._steps.append(self._latest_step)
        self._num_steps += 1
        if len(self._steps) > STEPS:
            self._steps = self._steps[::2]
            self._every *= 2

    def lines(self) -> list[Line]:
        """What is left of it all, with a word on what is not."""
        entries = {*self._first, *self._last, *self._steps}
        if self._latest_step is not None:
            entries.add(self._latest_step)
        lines = [line for _, line in sorted(entries)]
        missing = self._num_others - len(self._first) - len(self._last)
        if missing:
            lines.append((f"{missing} more lines are in the run's log.txt", "dim"))
        return lines
