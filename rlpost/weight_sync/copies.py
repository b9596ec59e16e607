"""Folders that were copied to a machine, in memory where it can be: one for all processes of that machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_SH, flock
from pathlib import Path
from typing import IO, Any

from rlpost.policies.vllm_exchange import EXCHANGE, memory_folder, sweep_exchange, with_room


def host_id() -> str:
    """The same in all processes that see the same `memory_folder`, and in no other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    return f"{machine}/{os.stat(memory_folder()).st_dev}"


@contextmanager
def fetched(key: str, files: Callable[[], Mapping[str, Any]]) -> Iterator[Path]:
    """A block in which this machine has a folder with `files()`, contents by name: one for all who ask by `key`.

    It is written by whoever comes first, and is whole before any sees it; whoever leaves last removes it.
    """
    folder = memory_folder() / f"{EXCHANGE}{key}"
    try:
        with _shared(Path(f"{folder}.lock")):
            with open(folder.with_name(f"rlpost-making-{key}"), "w") as making:
                flock(making, LOCK_EX)
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
    """The file at `path`, made where there is none, and held together with others until it is closed."""
    while True:
        lock = path.open("w")
        flock(lock, LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        lock.close()  # it was removed between the two, by whoever held it last
