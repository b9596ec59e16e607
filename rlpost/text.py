"""Text to show: anybody's, made safe, and things counted."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` as a terminal and any encoder can take it; line breaks and tabs stay.

    What could move the cursor, turn the writing direction, hide or be refused is shown as an escape
    (`\\x1b`, `\\u202e`): control characters (C0, C1), format characters, lone surrogates, and
    spaces other than the plain one.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
