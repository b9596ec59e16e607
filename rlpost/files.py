"""Files: written whole or not at all, kept to be read again, locked, and how much they take.

Paths as people write them: with `~`, and several as a list.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from rlpost.errors import DataError

T = TypeVar("T")

log = logging.getLogger("rlpost")


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """The path to write to, beside `file`: what stands there takes the place of `file` once the block ends well.

    Processes that write the same file at once do not meet: the last one's stays. A block that raises leaves `file` as
    it was, and so does a machine that stops before its disk has what was written.
    """
    making = file.with_name(f".{file.name}.{os.urandom(4).hex()}.incomplete")  # a process id is not unique on two hosts
    try:
        yield making
        sync(making)
        os.replace(making, file)
        sync(file.parent)
    finally:
        making.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk take what is written of a file, or which names a folder holds, before this returns."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_tree(folder: Path) -> None:
    """`sync` every file and folder below `folder`, and itself."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(where) / name)
        sync(Path(where))


def json_in(file: Path) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError for what is no JSON or nested too deep to be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deep") from None


def remembered(file: Path, make: Callable[[], dict[str, Any]], read: Callable[[Any], T], making: str) -> T:
    """What `read` makes of the JSON in `file`, or of what `make` returns, which is then kept there.

    A file that cannot be read or written is no error: the log says so, and what is done again; `making` says what, as
    "the speed of products is measured".
    """
    try:
        return read(json_in(file))
    except FileNotFoundError:
        pass  # not made yet
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): %s again", file, error, making)
    content = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as beside:
            beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        log.warning("%s cannot be written (%s): %s each time", file, error, making)
    return read(content)


def locked(file: IO[str], *, shared: bool = False) -> bool:
    """Take the lock of an open file, which it keeps until it is closed; False where another process holds it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def bytes_of(folder: Path) -> int:
    """Bytes of all files below `folder`; links to files count as links, and what is removed meanwhile not at all."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


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
