"""Text to show: anybody's, made safe, and things counted.

Anybody's text cut and folded to a terminal's columns.

The nearest right word for one that is unknown.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from rlpost.errors import ConfigError

PASSWORD = re.compile(r"(?P<user>\w[\w+.-]*://[^\s/@:?#]*):[^\s/@]+@")  # in a URL


def printable(text: str) -> str:
    """`text` as a terminal and any encoder can take it; line breaks and tabs stay.

    What could move the cursor, turn the writing direction, hide or be refused is shown as an escape
    (`\\x1b`, `\\u202e`): control characters (C0, C1), format characters, lone surrogates, and
    spaces other than the plain one.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def without_passwords(text: str) -> str:
    """`text` with `***` for the password of each URL in it."""
    return PASSWORD.sub(r"\g<user>:***@", text)


class PrintableFormatter(logging.Formatter):
    """Writes whatever is logged, an exception of somebody's code for one, as `printable` has it, without passwords."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return printable(without_passwords(super().format(record)))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, without a full stop; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".") or type(error).__name__


def readable(size: float) -> str:
    """Three digits of a number of bytes: 2.73 MB, 15.2 GB, 122 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} bytes"


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


_OWN = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")  # what two reasons of one cause may differ in


def cause_of(reason: str) -> str:
    """What reasons of one cause share: numbers and quoted texts may differ, the name of a field may not."""
    field, found, wrong = reason.partition("': ") if reason.startswith("field '") else ("", "", reason)
    return f"{field}{found}{_OWN.sub('..', wrong)}"


MARKS_ON_ONE = 3  # combining characters a letter may carry


def width_of(text: str) -> int:
    """Columns that `text` takes; a Chinese character takes two."""
    if text.isascii() and text.isprintable():
        return len(text)
    from rich.cells import cell_len  # 30 ms, which `rlpost config list` need not wait for

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """The longest beginning of `text` that fits `width` columns."""
    text = text[: 4 * width]
    while text and width_of(text) > width:
        text = text[: len(text) - max(1, (width_of(text) - width) // 2)]
    return text


def shortened(text: str, width: int) -> str:
    """`text`, cut to `width` columns with `…` at its end where it is wider."""
    return text if width_of(text) <= width else f"{cut(text, width - 1)}…"


def one_line(text: str, width: int, *, counted: bool = False) -> str:
    """Anybody's text as one line of at most `width` columns, safe to show.

    It ends in `…` where it was cut, or in `… +N` if `counted`: N characters were cut off.
    """
    line = _without_piles(printable(" ".join(text.split())))
    kept = cut(line, width - len(f"… +{len(line)}")) if counted and width_of(line) > width else ""
    return f"{kept}… +{len(line) - len(kept)}" if kept else shortened(line, width)


def fold(text: str, width: int, most: int) -> list[str]:
    """Anybody's text as one to `most` lines of at most `width` columns, safe to show; `…` ends it where it was cut.

    Words stay whole where they fit on a line; several empty lines become one.
    """
    text, width = text.strip("\r\n"), max(1, width)
    reach = 4 * width * most  # more than can be shown: what lies beyond is not looked at
    lines: list[str] = []
    for line in printable(text[:reach].replace("\r\n", "\n").expandtabs(4)).split("\n"):
        if not line.strip() and (not lines or not lines[-1]):
            continue
        lines += [row.rstrip(" ") for row in wrapped(_without_piles(line), width)]
        if len(lines) > most:
            break
    if len(lines) > most or len(text) > reach:
        lines = lines[:most] or [""]
        lines[-1] = cut(lines[-1], width - 1) + "…"
    return lines or [""]


def wrapped(line: str, width: int) -> list[str]:
    """One line in rows, broken between words, and inside a word that is wider than a row.

    Together they are the line again: the spaces at a break end the row before it.
    """
    rows, row = [], ""
    for word in re.findall(r"\s*\S+|\s+$", line):
        bare = word.lstrip()
        if row and bare and width_of(row + word) > width:
            rows.append(row + word[: len(word) - len(bare)])
            row, word = "", bare
        row += word
        while width_of(row.rstrip()) > width:
            head = cut(row, width) or row[0]
            rows.append(head)
            row = row[len(head) :]
    return [*rows, row]


def _without_piles(text: str) -> str:
    """`text` without the combining characters that would pile up over other lines."""
    kept: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if width_of(character) == 0 else 0
        if marks <= MARKS_ON_ONE:
            kept.append(character)
    return "".join(kept)


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
