"""The processes that a test has under it."""

from __future__ import annotations

import time

import psutil


def children(of: int | None = None) -> dict[psutil.Process, str]:
    """Those of this process, or of another, that have not ended, with their commands.

    What an engine or a browser started may be a zombie for long.
    """
    found = {}
    for process in psutil.Process(of).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "rlpost/orphans.py" not in command:  # it ends with this one
                found[process] = command
        except psutil.NoSuchProcess:  # it ended meanwhile; a zombie is one too
            continue
    return found


def is_gone(pid: int) -> bool:
    """Whether a process ends within a second; one that nobody waited for counts as ended."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
