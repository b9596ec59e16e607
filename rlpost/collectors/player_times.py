"""What the players of a training spend their time on."""

from __future__ import annotations

import time
from statistics import fmean


class PlayerTimes:
    """Seconds of `count` players, from the totals that each tells of itself since it began; a mean over them all."""

    def __init__(self, count: int) -> None:
        self._totals: list[dict[str, float]] = [{} for _ in range(count)]
        self._taken: list[dict[str, float]] = [{} for _ in range(count)]
        self.begin()

    def told(self, player: int, totals: dict[str, float]) -> None:
        """A player has spent so many seconds: rollout, reward, and playing in all."""
        self._totals[player] = totals

    def forget(self, player: int) -> None:
        """Another takes its place, which begins at 0."""
        self._totals[player], self._taken[player] = {}, {}

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()
        self._played = [totals.get("playing", 0.0) for totals in self._totals]

    def taken(self) -> dict[str, float]:
        """Seconds of sampling and scoring since the last call, and of the step with nothing to play."""
        spent = {
            f"time/{name}": fmean(
                now.get(name, 0.0) - before.get(name, 0.0)
                for now, before in zip(self._totals, self._taken, strict=True)
            )
            for name in ("rollout", "reward")
        }
        passed = time.monotonic() - self._began
        idle = (
            max(0.0, passed - max(0.0, totals.get("playing", 0.0) - played))
            for totals, played in zip(self._totals, self._played, strict=True)
        )
        self._taken = [dict(totals) for totals in self._totals]
        return spent | {"time/idle": fmean(idle)}
