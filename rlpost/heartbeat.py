"""A word now and then while something long is under way, so that a wait is told from a standstill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 9.0  # seconds without a word, after which there is one


class Heartbeat:
    """Says what `line` gives whenever nothing has been said for a while, from a thread; a context manager.

    A while is `every` seconds. `say` raising OSError, as a terminal that has been closed does, ends it.
    """

    def __init__(self, line: Callable[[], str], say: Callable[[str], None], every: float | None = None) -> None:
        self._line = line
        self._say = say
        self._every = EVERY if every is None else every
        self._said = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        self.said()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def said(self) -> None:
        """Something else was said just now."""
        self._said = time.monotonic()

    def _run(self) -> None:
        while not self._done.wait(min(0.5, self._every / 4)):
            if time.monotonic() - self._said < self._every:
                continue
            if text := self._line():
                try:
                    self._say(text)
                except OSError:
                    return
            self.said()


def progress_line(
    doing: str, seconds: float, *, done: int | None = None, total: int | None = None, tokens: int | None = None
) -> str:
    """What is under way, how far it is and how fast: `evaluating 120 of 500, 34 s, 850 tok/s, 0:52 left`.

    The time left is that of an even pace.
    """
    parts = [doing if total is None else f"{doing} {done or 0} of {total}", f"{seconds:.0f} s"]
    parts += figures_of_pace(seconds, done, total, tokens)
    return ", ".join(parts)


def figures_of_pace(seconds: float, done: int | None, total: int | None, tokens: int | None) -> list[str]:
    """Tokens a second and the time left, where they can be told."""
    figures = [f"{tokens / seconds:.0f} tok/s"] if tokens and seconds > 0 else []
    if done and total and seconds >= 1:
        minutes, second = divmod(round(seconds * (total - done) / done), 60)
        figures.append(f"{minutes}:{second:02d} left")
    return figures
