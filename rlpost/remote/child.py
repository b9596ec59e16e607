"""Child processes: starting a Python module as one, reading and writing its pipes, and how it ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LENGTH_BYTES = 8  # of a frame, before its content


def python_module(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[Any]:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, with `environment` on top of this process's.

    It imports what this process would, whatever lies in the current folder. Ctrl-C does not reach it,
    and `kill_group` ends it with all it has started. `how` goes to Popen, which raises OSError.
    """
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
        **how,
    )


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


def taken(pipe: int, most: int) -> bytes | None:
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


def framed(content: bytes) -> bytes:
    """`content` as a frame: its length in 8 bytes, then itself."""
    return len(content).to_bytes(LENGTH_BYTES) + content


def unframed(received: bytearray, most: int) -> bytes | None:
    """Take the first frame out of `received`; None while it is not whole. Raises ValueError above `most` bytes."""
    if len(received) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES])
    if end > most:
        raise ValueError(f"a frame of {end} bytes")
    if len(received) < end:
        return None
    content = bytes(received[LENGTH_BYTES:end])
    del received[:end]
    return content
