"""`~` in a path."""

from __future__ import annotations

from pathlib import Path

from rlpost.errors import DataError


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` written out. Raises DataError where that home folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} begins with a home folder that is not known here: set HOME (for the cache, XDG_CACHE_HOME will do)"
        ) from error
