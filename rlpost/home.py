"""Paths as people write them: with `~`, and several as a list."""

from __future__ import annotations

import re
from pathlib import Path

from rlpost.errors import DataError

_ELEMENT = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)""")


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` written out. Raises DataError where that home folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} begins with a home folder that is not known here: set HOME (for the cache, XDG_CACHE_HOME will do)"
        ) from error


def paths_in(text: str) -> list[str]:
    """The paths of a list written as text, "[a.jsonl,b.jsonl]"; of any other text the path that it is.

    A path with a comma is quoted.
    """
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    return [path.strip().strip("\"'") for path in _ELEMENT.findall(text[1:-1]) if path.strip()]
