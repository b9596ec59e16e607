"""Prompts by measured difficulty: how often one is drawn depends on how its last group did.

A prompt that the model always or never solves teaches nothing, so it is drawn less often than one that it solves now
and then, but never not at all: models change. prime-rl's difficulty pools have the same aim.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np


class WeighedRows:
    """The prompts of `base` without end; one is drawn in proportion to a weight that its last group decides.

    The weight is 1 for a prompt not drawn yet, otherwise `least` + (1 - `least`) 4m(1 - m), m being the mean of its
    last group, from 0 (never right) to 1 (always). Each prompt has its next time: a draw takes the prompt with the
    lowest and puts it off by about 1 / weight (stride scheduling, Waldspurger and Weihl 1995). A hash of `seed`, the
    prompt and its draws makes each interval half to one and a half times as long, so that orders differ. So what is
    drawn next depends on `state` alone.

    `base` holds the prompts in a fixed order, as `OrderedRows` does. Prompts are numbered by their first position in
    it, draws from 0.
    """

    def __init__(self, base: Any, seed: int, least: float) -> None:
        self.base = base
        self.seed = seed
        self.least = least
        size = base.count()
        self._next = np.arange(size) / (2 * size)  # of each prompt: its next time; each is drawn once before any again
        self._last = np.full(size, np.nan)  # the time of its last draw
        self._draws = np.zeros(size, np.int64)
        self._means = np.full(size, np.nan)  # of its last group
        self._drawn: list[int] = []  # the prompt of each draw
        self._kinds: Counter[str] = Counter()  # of the draws since `take_shares`

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, draw: int) -> Iterator[Any]:
        """The prompts of `draw` and all later ones."""
        for number in count(draw):
            if number == len(self._drawn):
                self._draw()
            yield next(iter(self.base.iter_from(self._drawn[number])))

    def number_of(self, draw: int) -> int:
        """The prompt that a draw has taken."""
        return self._drawn[draw]

    def count(self) -> int:
        """How many prompts there are."""
        return self.base.count()

    def learn(self, draw: int, mean: float) -> None:
        """The group of `draw` has this mean, from 0 to 1: weigh its prompt by it from now on."""
        number = self._drawn[draw]
        self._means[number] = mean
        self._put_off(number)

    def take_shares(self) -> dict[str, float]:
        """The shares of new, hard, half solved and easy prompts among the draws since the last call."""
        kinds, self._kinds = self._kinds, Counter()
        total = kinds.total()
        return {f"difficulty/{kind}": kinds[kind] / total for kind in ("new", "hard", "middle", "easy") if total}

    def weight(self, number: int) -> float:
        """How often a prompt is drawn, beside one that is half solved."""
        mean = self._means[number]
        return 1.0 if np.isnan(mean) else self.least + (1 - self.least) * 4 * mean * (1 - mean)

    def state(self) -> dict[str, Any]:
        """Everything that decides the next draws, JSON-compatible."""
        known = np.flatnonzero(self._draws)
        columns = (self._last, self._draws, self._means)
        return {
            "drawn": self._drawn,
            "known": [[int(n), *(None if np.isnan(c[n]) else c[n].item() for c in columns)] for n in known],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._drawn = list(state["drawn"])
        for number, last, draws, mean in state["known"]:
            self._last[number], self._draws[number] = last, draws
            self._means[number] = np.nan if mean is None else mean
            self._put_off(number)

    def _draw(self) -> None:
        number = int(np.argmin(self._next))
        mean = self._means[number]
        kind = "new" if np.isnan(mean) else "hard" if mean <= 0 else "easy" if mean >= 1 else "middle"
        self._kinds[kind] += 1
        self._last[number] = self._next[number]
        self._draws[number] += 1
        self._drawn.append(number)
        self._put_off(number)

    def _put_off(self, number: int) -> None:
        salt = f"{self.seed}/{number}/{self._draws[number]}".encode()
        uniform = int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "big") / 2**64
        self._next[number] = self._last[number] + (0.5 + uniform) / self.weight(number)
