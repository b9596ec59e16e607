"""The nearest right word for one that is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `word`, or None if none is close; case does not count."""
    lowered = word.lower()
    return _closest(lowered, [(edit_distance(lowered, c.lower()), c) for c in candidates])


def nearest_key(word: str, keys: Sequence[str]) -> str | None:
    """The dotted key closest to `word`: as a whole, or by its last part (`lr` is near `optim.lr`)."""
    lowered = word.lower()
    last = lowered.rpartition(".")[2]

    def distance(key: str) -> float:
        whole = edit_distance(lowered, key)
        by_last = edit_distance(last, key.rpartition(".")[2])
        if by_last > len(last) / 3:
            return whole
        return min(whole, by_last + (1.5 if "." in word else 0.5))

    return _closest(lowered, [(distance(key), key) for key in keys])


def did_you_mean(suggestion: str | None, otherwise: str = "") -> str:
    """The end of an error message: `; did you mean X?`, or `; otherwise` where nothing is near."""
    if suggestion is not None:
        return f"; did you mean {suggestion}?"
    return f"; {otherwise}" if otherwise else ""


def _closest(word: str, ranked: Sequence[tuple[float, str]]) -> str | None:
    """The first of the smallest distance, unless so much would have to change that it is another word."""
    if not ranked:
        return None
    distance, candidate = min(ranked, key=lambda pair: pair[0])
    return candidate if distance <= max(1.5, 0.4 * max(len(word), 1)) else None
