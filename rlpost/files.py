"""Files that are there whole or not at all, and how much they take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """The path to write to, beside `file`: what stands there takes the place of `file` once the block ends well.

    Processes that write the same file at once do not meet: the last one's stays. A block that raises leaves `file` as
    it was.
    """
    making = file.with_name(f".{file.name}.{os.urandom(4).hex()}.incomplete")  # a process id is not unique on two hosts
    try:
        yield making
        os.replace(making, file)
    finally:
        making.unlink(missing_ok=True)


def bytes_of(folder: Path) -> int:
    """Bytes of all files below `folder`; links count as links, and what is removed meanwhile not at all."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
