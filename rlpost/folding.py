"""Anybody's text cut and folded to a terminal's columns."""

from __future__ import annotations

import re

from rlpost.text import printable

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
