"""What the tests of the sandbox share: a sandbox that can be searched for survivors, and ways to say an attempt."""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from rlpost.sandbox import Execution, Sandbox, Session
from rlpost.tools.sandbox.sandbox import ENVIRONMENT

# Inside: `attempt` prints what a forbidden thing raises, or that it went well
PRELUDE = """
import os, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, action):
    try:
        result = action()
    except BaseException as error:
        print(name, type(error).__name__)
    else:
        print(name, "WENT WELL", result)

def syscall(*arguments):
    if libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

def libcall(name, *arguments):
    if getattr(libc, name)(*arguments) in (-1, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
"""


# number on x86_64 and on aarch64
CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "name_to_handle_at": (303, 264),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "personality": (135, 92),
    "vmsplice": (316, 75),
    "modify_ldt": (154, 244),  # 244: of no aarch64 kernel
    "tee": (276, 77),
    "inotify_init1": (294, 26),
    "timer_create": (222, 107),
    "setxattr": (188, 5),
    "sendmsg": (46, 211),
    "setsockopt": (54, 208),
    "sethostname": (170, 161),
    "syslog": (103, 116),
    "seccomp": (317, 277),
    "quotactl": (179, 60),
}


def number_of(name: str) -> int:
    """Of a system call, on this machine."""
    return CALLS[name][0 if platform.machine() == "x86_64" else 1]


def run(where: Sandbox | Session, code: str, seconds: float = 60.0, **more: Any) -> Execution:
    """Run `code`, by default for longer than any program of a test takes."""
    return where.run(code, timeout_seconds=seconds, **more)


def open_to_all(folder: Path) -> None:
    """Let other users into `folder`: those above it that are pytest's are open to their owner alone."""
    above = itertools.takewhile(lambda parent: "pytest" in str(parent), folder.parents)
    for each in (folder, *above):
        each.chmod(0o755)


class Attacked:
    """A sandbox whose processes carry a mark of their own, by which survivors are found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.mark = f"mark-{secrets.token_hex(8)}"
        self.user = 1_900_000_000 + secrets.randbelow(1_000_000)
        monkeypatch.setitem(ENVIRONMENT, "MARK", self.mark)
        if os.getuid() == 0:
            monkeypatch.setattr("rlpost.tools.sandbox.sandbox.user_for_one", lambda: self.user)

    def run(self, code: str, seconds: float = 30.0) -> Execution:
        """Run `code`, see that it ended in time and that nothing of it is left."""
        self.sandbox.prove()
        started = time.monotonic()
        execution = run(self.sandbox, PRELUDE + code, seconds)
        assert time.monotonic() - started < seconds + 60.0
        survivors = self.survivors()
        assert survivors == [], survivors
        return execution

    def survivors(self) -> list[str]:
        """Processes of the sandbox's user or with its mark in their environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (process / "environ").read_bytes()
                if marked or process.stat().st_uid == self.user:
                    found.append((process / "status").read_text().splitlines()[0] + process.name)
            except OSError:  # ended meanwhile
                pass
        return found


def outcomes(execution: Execution) -> dict[str, str]:
    """What each attempt of a program came to."""
    assert execution.finished, execution
    return dict(line.split(" ", 1) for line in execution.stdout.splitlines())
