"""The incident of a run: what it did when an error ended it, with all stacks and processes."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from rlpost.files import replaced
from rlpost.model.memory import process_tree
from rlpost.record import INCIDENT
from rlpost.text import without_passwords

log = logging.getLogger("rlpost")


def write_incident(folder: Path, error: BaseException, doing: str, step: int) -> None:
    """Write incident.json into `folder`: the error and its traceback, each thread's stack, the processes below.

    If the disk refuses it, only the log says so: the error itself matters more.
    """
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "doing": doing,
        "error": f"{type(error).__name__}: {error}",
        "exit_code": getattr(error, "exit_code", 1),
        "traceback": [line.rstrip() for line in traceback.format_exception(error)],
        "threads": _threads(),
        "processes": [_process(pid) for pid in process_tree(os.getpid())],
    }
    try:
        with replaced(folder / INCIDENT) as making:
            making.write_text(without_passwords(json.dumps(record, indent=1)) + "\n", encoding="utf-8")
    except OSError as refused:
        log.warning("%s was not written: %s", folder / INCIDENT, refused)
    else:
        log.info("the state at that moment is in %s", folder / INCIDENT)


def _threads() -> dict[str, list[str]]:
    """The stack of each Python thread of this process, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.rstrip() for line in traceback.format_stack(frame)]
        for ident, frame in sys._current_frames().items()
    }


def _process(pid: int) -> dict[str, Any]:
    """A process's command, and the kernel function that it waits in."""

    def read(name: str) -> str:
        try:
            return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has ended, or there is no /proc
            return ""

    return {"pid": pid, "command": read("cmdline")[:300], "waits_in": read("wchan")}
