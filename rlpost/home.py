"""`~` in a path."""

from __future__ import annotations

from pathlib import Path

from rlpost.errors import DataError


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` written out. Raises DataError where this user has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} lies in the home folder, and there is none: set HOME (or XDG_CACHE_HOME, where it is the cache)"
        ) from error
