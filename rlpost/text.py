"""Text to show: anybody's, made safe, and things counted."""

from __future__ import annotations

import logging
import re

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
