"""Exchange folders: files that one process hands to another, in memory if they fit, else on disk.

`fetched` is the copy of such a folder on another machine: one for all processes there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlpost.errors import PolicyError
from rlpost.files import MORE_SHARED, memory_folder
from rlpost.text import readable

EXCHANGE = "rlpost-weights-"  # how exchange folders begin


def with_room(file: Path, size: int) -> Path:
    """The path to write a file of an exchange folder to: itself or, if memory is short, a file on disk it links to.

    Half of the free memory stays free for other processes. Raises PolicyError if the disk is full too.
    """
    shared, disk = memory_folder(), Path(tempfile.gettempdir())
    if 2 * size <= shutil.disk_usage(shared).free:
        return file
    if size > shutil.disk_usage(disk).free:
        raise PolicyError(
            f"no room for {readable(size)} of weights, neither in {shared} nor in {disk}: {MORE_SHARED}, or set TMPDIR "
            "to a folder of a larger disk"
        )
    if shared == disk:
        return file
    on_disk = disk / file.parent.name / file.name
    on_disk.parent.mkdir(mode=0o700, exist_ok=True)
    file.symlink_to(on_disk)
    return on_disk


@contextmanager
def exchange_folder() -> Iterator[Path]:
    """A new folder for files that go to an engine; removed afterwards. Write its files as `with_room` says.

    If the owner is killed, the next call of this or of `sweep_exchange` removes the folder: its lock is free.
    """
    sweep_exchange()
    descriptor, name = tempfile.mkstemp(prefix="rlpost-making-", dir=memory_folder())
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    lock = Path(name).rename(memory_folder() / f"{EXCHANGE}{uuid.uuid4()}.lock")
    folder = lock.with_suffix("")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        _remove_exchange(folder)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def sweep_exchange() -> None:
    """Remove the exchange folders of processes that ended before they could."""
    for name in memory_folder().glob(f"{EXCHANGE}*.lock"):
        with suppress(OSError), name.open() as lock:  # another user's, in use, or gone just now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_exchange(name.with_suffix(""))
            name.unlink()


def _remove_exchange(folder: Path) -> None:
    """Remove an exchange folder, whole or in the making, with its files on disk."""
    for name in (folder.name, f"{folder.name}.part"):
        for place in (folder.parent, Path(tempfile.gettempdir())):
            shutil.rmtree(place / name, ignore_errors=True)


@contextmanager
def fetched(key: str, files: Callable[[], Mapping[str, Any]]) -> Iterator[Path]:
    """A block in which this machine has a folder with `files()`, contents by name: one for all who ask by `key`.

    The first to ask writes it, and it is complete before any sees it; the last to leave removes it.
    """
    folder = memory_folder() / f"{EXCHANGE}{key}"
    try:
        with _shared(Path(f"{folder}.lock")):
            with folder.with_name(f"rlpost-making-{key}").open("w") as making:
                fcntl.flock(making, fcntl.LOCK_EX)
                if not folder.is_dir():
                    part = folder.with_name(f"{folder.name}.part")
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(mode=0o700)
                    for name, content in files().items():
                        with_room(part / name, len(content)).write_bytes(content)
                    part.rename(folder)
                Path(making.name).unlink(missing_ok=True)
            yield folder
    finally:
        sweep_exchange()


def _shared(path: Path) -> IO[str]:
    """The file at `path`, created if missing, locked together with others until it is closed."""
    while True:
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        lock.close()  # it was removed between the two, by whoever held it last
