"""The processes that a test has under it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container

import psutil


def children(of: int | None = None) -> dict[psutil.Process, str]:
    """Those of this process, or of another, that have not ended, with their commands.

    What an engine or a browser started may be a zombie for long.
    """
    found = {}
    for process in psutil.Process(of).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if (
                process.status() != psutil.STATUS_ZOMBIE and "rlpost/remote/child.py" not in command
            ):  # it ends with this one
                found[process] = command
        except psutil.NoSuchProcess:  # it ended meanwhile; a zombie is one too
            continue
    return found


def kill_engines_since(before: Container[psutil.Process]) -> None:
    """Kill vLLM's processes under this one that are not among `before`."""
    engines = [child for child, command in children().items() if child not in before and "_tracker" not in command]
    assert engines
    for engine in engines:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
            engine.kill()


def is_gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within so many seconds; one that nobody waited for counts as ended."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once `holds()` is true; fails if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
