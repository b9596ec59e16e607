"""The nearest right word for one that is unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from rlpost.errors import ConfigError

E = TypeVar("E", bound=Enum)


@lru_cache(maxsize=4096)
def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.

    A swap counts as one edit, since it is the commonest typing mistake (optimal string alignment).
    """
    two_back: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, two_back[j - 2] + 1)
            row.append(cost)
        two_back, previous = previous, row
    return previous[-1]


def one_edit_apart(a: str, b: str) -> bool:
    """Whether `edit_distance(a, b)` is at most 1, found without computing it."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[start:], b[start:]
    return (
        rest_a[1:] == rest_b[1:]  # replaced, or the same
        or rest_a[1:] == rest_b  # inserted
        or rest_a == rest_b[1:]  # left out
        or (rest_a[:2] == rest_b[1::-1] and rest_a[2:] == rest_b[2:])  # swapped
    )


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `word`, or None if none is close; case does not count."""
    lowered, known = word.lower(), list(candidates)
    near, most = one_typo_away(lowered, known), _farthest(lowered)
    return near or _closest(lowered, [(_distance_within(most, lowered, c.lower()), c) for c in known])


def one_typo_away(word: str, candidates: Iterable[str]) -> str | None:
    """The first candidate that one edit turns `word` into, one that differs in case only before all others."""
    lowered = word.lower()
    near = [c for c in candidates if one_edit_apart(lowered, c.lower())]
    return next((c for c in near if c.lower() == lowered), near[0] if near else None)


def nearest_key(word: str, keys: Sequence[str]) -> str | None:
    """The dotted key closest to `word`: as a whole, or by its last part (`lr` is near `optim.lr`)."""
    lowered = word.lower()
    last = lowered.rpartition(".")[2]
    most = _farthest(lowered)

    def distance(key: str) -> float:
        whole = _distance_within(most, lowered, key)
        by_last = _distance_within(len(last) / 3, last, key.rpartition(".")[2])
        if by_last > len(last) / 3:
            return whole
        return min(whole, by_last + (1.5 if "." in word else 0.5))

    return one_typo_away(lowered, keys) or _closest(lowered, [(distance(key), key) for key in keys])


def did_you_mean(suggestion: str | None, otherwise: str = "") -> str:
    """The end of an error message: `; did you mean X?`, or `; otherwise` where nothing is near."""
    if suggestion is not None:
        return f"; did you mean {suggestion}?"
    return f"; {otherwise}" if otherwise else ""


def member(kind: type[E], key: str, name: E | str) -> E:
    """The value of `kind` that is called `name`, or is it. Raises ConfigError, in which `key` stands for what it is."""
    if isinstance(name, kind):
        return name
    known = kind.__members__
    if name not in known:
        raise ConfigError(
            f"{key}={name} is unknown: it is one of {', '.join(known)}{did_you_mean(nearest(str(name), known))}"
        )
    return known[str(name)]


def _closest(word: str, ranked: Sequence[tuple[float, str]]) -> str | None:
    """The first of the smallest distance, unless so much would have to change that it is another word."""
    if not ranked:
        return None
    distance, candidate = min(ranked, key=lambda pair: pair[0])
    return candidate if distance <= _farthest(word) else None


def _farthest(word: str) -> float:
    """The edits beyond which another word is no misspelling of `word`."""
    return max(1.5, 0.4 * len(word))


def _distance_within(most: float, a: str, b: str) -> float:
    """`edit_distance(a, b)`; infinite, without counting, where the lengths alone differ by more than `most`."""
    return edit_distance(a, b) if abs(len(a) - len(b)) <= most else math.inf
