"""Kill all descendants when the run dies, even detached ones.

Every process that is started after `guard` inherits a mark in its environment, whatever session, group or parent it
takes. A small process outside the run waits for the run's end and kills all processes with the mark. It imports
nothing of rlpost: `python -I -S rlpost/remote/orphans.py MARK PID`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

MARK = "RLPOST_STARTED_BY"
LOOK_SECONDS = 0.5  # between two checks that the run is alive
ROUNDS = 20  # of killing, since a killed process may just have started another
GRACE_SECONDS = 1.0  # for processes that notice the end of the run themselves
_guards: list["subprocess.Popen[bytes]"] = []  # of this process, or of the one that it is a fork of


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
            with contextlib.suppress(OSError):  # another user's, or gone meanwhile
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
