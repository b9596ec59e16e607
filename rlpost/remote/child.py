"""Child processes: starting a Python module as one, reading and writing its pipes, how it ended, and its orphans.

Every process that is started after `guard` inherits a mark in its environment, whatever session, group or parent it
takes. A small process outside the run waits for the run's end and kills all processes with the mark. It imports
nothing of rlpost, nor may this module: `python -I -S rlpost/remote/child.py MARK PID`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MARK = "RLPOST_STARTED_BY"
USER_PATH = "RLPOST_PYTHONPATH"  # the user's PYTHONPATH, in processes where it is replaced
LOOK_SECONDS = 0.5  # between two checks that the run is alive
ROUNDS = 20  # of killing, since a killed process may just have started another
GRACE_SECONDS = 1.0  # for processes that notice the end of the run themselves
_guards: list[subprocess.Popen[bytes]] = []  # of this process, or of the one that it is a fork of


def python_module(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[Any]:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, with `environment` on top of this process's.

    It imports what this process would, whatever lies in the current folder; `user_path` keeps the user's PYTHONPATH for
    other programs. Ctrl-C does not reach it, and `kill_group` ends it with all it has started. `how` goes to Popen,
    which raises OSError.
    """
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, USER_PATH: user_path(), **(environment or {})},
        start_new_session=True,
        **how,
    )


def user_path() -> str:
    """The PYTHONPATH that rlpost was started with, for a program of another interpreter; empty if it was not set."""
    return os.environ.get(USER_PATH, os.environ.get("PYTHONPATH", ""))


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes of a group; does nothing if none is left or they are another user's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def ending(code: int) -> str:
    """How a process ended, from its return code as Popen tells it: -n where signal n ended it."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 127` for a number without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def shell_code(code: int) -> int:
    """A return code as a shell tells it: 128 + n where signal n ended the process, for which Popen says -n."""
    return code if code >= 0 else 128 - code


def readable_within(descriptor: int, seconds: float) -> bool:
    """Whether `descriptor` can be read, or its writer has ended, within `seconds`."""
    poll = select.poll()  # knows no highest number of a file descriptor, as select does
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def read_available(pipe: int, most: int) -> bytes | None:
    """Read at most `most` bytes from a pipe that does not block; None once nobody writes to it."""
    try:
        return os.read(pipe, most) or None
    except BlockingIOError:
        return b""


def put(pipe: int, content: bytes | bytearray | memoryview) -> int:
    """Write to a pipe that does not block; the number of bytes written, and all of them if nobody reads."""
    try:
        return os.write(pipe, content)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(content)


def guard() -> None:
    """Let all that this process starts from now on end within seconds of it; a second call does nothing."""
    if _guards:
        return
    mark = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    os.environ[MARK] = mark
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), mark, str(os.getpid())]
    nothing = subprocess.DEVNULL
    _guards.append(
        subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, env={})
    )


def unguarded() -> dict[str, str]:
    """The environment for a process that may outlive this one."""
    return {name: value for name, value in os.environ.items() if name != MARK}


def kill_marked(name: str, mark: str) -> int:
    """Kill the processes whose variable `name` is `mark`, except this one; returns how many."""
    wanted = f"{name}={mark}".encode()
    killed = 0
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdecimal() and int(entry) != os.getpid():
            with suppress(OSError):  # another user's, or gone meanwhile
                with open(f"/proc/{entry}/environ", "rb") as file:
                    found = wanted in file.read().split(b"\0")
                if found:
                    os.kill(int(entry), signal.SIGKILL)
                    killed += 1
    return killed


def wait_and_kill(mark: str, run: int) -> None:
    """Wait until the process `run`, this one's parent, has ended; then kill what it has left running."""
    while os.getppid() == run:
        time.sleep(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    for _ in range(ROUNDS):
        if not kill_marked(MARK, mark):
            break
        time.sleep(0.05)


if __name__ == "__main__":
    wait_and_kill(sys.argv[1], int(sys.argv[2]))
