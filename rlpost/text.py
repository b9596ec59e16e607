"""Text for people: made safe to show, counted, cut and folded to a terminal's columns, and the nearest right word."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

PASSWORD = re.compile(r"(?P<user>\w[\w+.-]*://[^\s/@:?#]*):[^\s/@]+@")  # in a URL
_FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r")
_OWN = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")  # parts that may differ between two reasons of one cause


def printable(text: str) -> str:
    """`text` made safe for a terminal and any encoder; line breaks and tabs stay.

    Characters that could move the cursor, change the writing direction, hide or fail to encode become escapes
    (`\\x1b`, `\\u202e`): control characters (C0, C1), format characters, lone surrogates, and
    spaces other than the plain one.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def without_passwords(text: str) -> str:
    """`text` with `***` for the password of each URL in it."""
    return PASSWORD.sub(r"\g<user>:***@", text)


class PrintableFormatter(logging.Formatter):
    """Makes every log record `printable`, exceptions of a user's code included, and masks passwords."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return printable(without_passwords(super().format(record)))


def no_formula(value: Any) -> Any:
    """`value`, with an apostrophe in front if it is a text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_BEGINS) else value


def first_line_of(documented: Any) -> str:
    """The first line of a docstring; empty for the one that a dataclass writes itself."""
    doc = inspect.getdoc(documented) or ""
    written = isinstance(documented, type) and doc.startswith(f"{documented.__name__}(")
    return "" if written else doc.partition("\n")[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop; its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".") or type(error).__name__


def with_calls(message: Mapping[str, Any]) -> str:
    """The content of a message as text, with the thoughts and the calls that it holds apart from its content."""
    thoughts = f"<think>\n{reasoning}\n</think>" if (reasoning := message.get("reasoning_content")) else ""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join(filter(None, [thoughts, str(message["content"]), *tagged]))


def inline(text: str) -> str:
    """`text` as inline code of Markdown, on one line, whatever it holds."""
    shown = " ".join(printable(text).split())
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    return f"{fence} {shown} {fence}" if len(fence) > 1 or not shown else f"`{shown}`"


def readable(size: float) -> str:
    """A number of bytes in three digits: 2.73 MB, 15.2 GB, 122 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} bytes"


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def cause_of(reason: str) -> str:
    """`reason` without numbers and quoted texts, so that reasons of one cause are equal; a field's name stays."""
    field, found, wrong = reason.partition("': ") if reason.startswith("field '") else ("", "", reason)
    return f"{field}{found}{_OWN.sub('..', wrong)}"


# Cut and folded to a terminal's columns

MARKS_ON_ONE = 3  # most combining characters on one letter


def width_of(text: str) -> int:
    """How many columns `text` takes; a Chinese character takes two."""
    if text.isascii() and text.isprintable():
        return len(text)
    from rich.cells import cell_len  # 30 ms, too slow for `rlpost config list`

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """The longest beginning of `text` that fits into `width` columns."""
    text = text[: 4 * width]
    while text and width_of(text) > width:
        text = text[: len(text) - max(1, (width_of(text) - width) // 2)]
    return text


def shortened(text: str, width: int) -> str:
    """`text`; if wider than `width` columns, cut with `…` at its end."""
    return text if width_of(text) <= width else f"{cut(text, width - 1)}…"


def one_line(text: str, width: int, *, counted: bool = False) -> str:
    """Any text as one line of at most `width` columns, safe to show.

    A cut line ends in `…`, or in `… +N` if `counted`, where N characters were cut off.
    """
    line = _without_piles(printable(" ".join(text.split())))
    kept = cut(line, width - len(f"… +{len(line)}")) if counted and width_of(line) > width else ""
    return f"{kept}… +{len(line) - len(kept)}" if kept else shortened(line, width)


def fold(text: str, width: int, most: int) -> list[str]:
    """Any text as one to `most` lines of at most `width` columns, safe to show; `…` marks a cut.

    Words that fit on a line stay whole; several empty lines become one.
    """
    rows, is_whole = _folded(text, width, most)
    return rows if is_whole else [*rows[: most - 1], _cut_off(rows[most - 1 : most], width)]


def both_ends(text: str, width: int, most: int) -> list[str]:
    """Like `fold`, but of a longer text the end stays too: a prompt's question often stands there."""
    width = max(1, width)
    rows, is_whole = _folded(text, width, most)
    if is_whole:
        return rows
    if most == 1:
        line = _without_piles(printable(" ".join(f"{text[: 4 * width]} {text[4 * width :][-4 * width :]}".split())))
        half = max(1, width // 2 - 3)
        begun = wrapped(line, max(1, width - half - 3))[0].rstrip()
        return [line if width_of(line) <= width else cut(f"{begun} … {_from_its_end(line, half)[-1]}", width)]
    first = most // 2
    room = most - first
    last: list[str] = []
    for line in reversed(_lines(text.strip("\r\n")[-4 * width * most :])):
        whole = [row.rstrip(" ") for row in wrapped(line, width)]
        last = [*(whole if len(last) + len(whole) <= room else _from_its_end(line, width)), *last][-room:]
        if len(last) == room:
            break
    return [*rows[: first - 1], _cut_off(rows[first - 1 : first], width), *last]


def _folded(text: str, width: int, most: int) -> tuple[list[str], bool]:
    """The rows of a text, at least the first `most`, and whether they are all of it."""
    text, width = text.strip("\r\n"), max(1, width)
    reach = 4 * width * most  # more than fits: the rest is not read
    rows: list[str] = []
    for line in _lines(text[:reach]):
        if line.strip() or (rows and rows[-1]):
            rows += [row.rstrip(" ") for row in wrapped(line, width)]
        if len(rows) > most:
            break
    return rows or [""], len(rows) <= most and len(text) <= reach


def _lines(text: str) -> list[str]:
    return [_without_piles(line) for line in printable(text.replace("\r\n", "\n").expandtabs(4)).split("\n")]


def _cut_off(row: list[str], width: int) -> str:
    """The row, or nothing, with the mark of a cut at its end."""
    return cut("".join(row), max(1, width) - 1) + "…"


def _from_its_end(line: str, width: int) -> list[str]:
    """One line in rows; the first one is short, rather than the last."""
    rows = [row[::-1].strip(" ") for row in reversed(wrapped(line[::-1], max(1, width)))]
    return [cut(row, width) for row in rows]  # an emoji of several characters is wider than backwards


def wrapped(line: str, width: int) -> list[str]:
    """One line in rows, broken between words, and inside words that are wider than a row.

    Joined, the rows give the line again: spaces at a break end the row before it.
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


def paragraph(text: str, width: int, most_lines: int | None = None, *, keep_end: bool = False) -> list[str]:
    """Text wrapped at `width` columns, its control characters shown.

    Of more than `most_lines` the first are kept, or the last if `keep_end`, and one line counts the
    characters left out.
    """
    lines = printable(text).expandtabs(4).splitlines(keepends=True) or [""]
    rows = [row for line in lines for row in wrapped(line, width)]
    cut: list[str] = []
    if most_lines is not None and len(rows) > most_lines + 1:  # the counting line takes the room of one
        kept = slice(-most_lines, None) if keep_end else slice(most_lines)
        cut, rows = (rows[:-most_lines] if keep_end else rows[most_lines:]), rows[kept]
    shown = [row.rstrip() for row in rows]
    remark = [f"… {sum(map(len, cut)):,} more characters"] if cut else []
    return remark + shown if keep_end else shown + remark


def _without_piles(text: str) -> str:
    """`text` without the combining characters that would pile up over other lines."""
    if text.isascii():
        return text
    kept: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if width_of(character) == 0 else 0
        if marks <= MARKS_ON_ONE:
            kept.append(character)
    return "".join(kept)


# The nearest right word for an unknown one


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to `word`, ignoring case; None if none is close."""
    return _closest(word, candidates, cutoff=0.6)


def one_typo_away(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that differs from `word` by about one letter; one that differs only in case comes first."""
    return _closest(word, candidates, cutoff=max(0.6, 1 - 1.01 / max(1, len(word))))


def nearest_key(word: str, keys: Sequence[str]) -> str | None:
    """The dotted key closest to `word`, as a whole or by its last part (`lr` is near `optim.lr`)."""
    last = word.rpartition(".")[2]
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = _closest(last, by_last, cutoff=0.75)
    return one_typo_away(word, keys) or (by_last[near] if near else None) or nearest(word, keys)


def _closest(word: str, candidates: Iterable[str], *, cutoff: float) -> str | None:
    lowered = {candidate.lower(): candidate for candidate in reversed([*candidates])}
    near = get_close_matches(word.lower(), lowered, 3, cutoff)
    swapped = (each for each in near if sorted(each) == sorted(word.lower()))  # letters in another order are a slip
    return next((lowered[each] for each in (*swapped, *near)), None)


def did_you_mean(suggestion: str | None, otherwise: str = "") -> str:
    """The end of an error message: `; did you mean X?`, or `; otherwise` without a suggestion."""
    if suggestion is not None:
        return f"; did you mean {suggestion}?"
    return f"; {otherwise}" if otherwise else ""
