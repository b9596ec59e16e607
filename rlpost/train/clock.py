"""How long a step takes, and its parts."""

from __future__ import annotations

import time


class Clock:
    """Seconds of a step, and of its parts by name."""

    def begin(self) -> None:
        """A step begins."""
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str | None = None) -> None:
        """What ends here was `name`; None: nothing that is timed."""
        now = time.perf_counter()
        if name is not None:
            self._laps[name] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """The parts, and the step until now."""
        return self._laps | {"time/step": time.perf_counter() - self._began}
