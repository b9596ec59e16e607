"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
