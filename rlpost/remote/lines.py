"""A child process that reads requests from stdin and writes answers to stdout, each one line of JSON.

    child = Lines([python, "child.py"], name="the child")
    child.send({"do": "load"}, seconds=5.0)
    answer = child.receive(seconds=60.0)
    child.close()

The program may run in another interpreter, so its PYTHONPATH is the user's own. It writes answers to stdout alone; the
end of its stderr is kept for error messages. A child that dies, is late, or writes something other than an answer is
killed with all it has started, which raises `ChildError`; the next request starts another.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlpost.errors import ToolError
from rlpost.remote.child import ending, guard, put, read_available, readable_within, user_path
from rlpost.remote.process import OWN_MARK, WHY_KILLED, kill_worker
from rlpost.text import printable

LONGEST_LINE = 64 << 20  # bytes; a longer line is an error
LOOK_SECONDS = 0.5  # between two checks that the child lives: its own children may hold its pipe open
CHUNK = 1 << 16  # bytes read at a time
STDERR_KEPT = 4000  # bytes
STDERR_SHOWN = 600  # characters, in an error message
END_SECONDS = 1.0  # timeout of the end of a child that has closed its stdout
STDERR_SECONDS = 1.0  # timeout of the end of stderr, once the child has ended


class ChildError(ToolError):
    """The child has died, was late, or broke the protocol; it has been killed."""


class Lines:
    """One child process, started by `send` where there is none. One thread at a time.

    `command` is its program and arguments, `name` its name in messages.
    """

    def __init__(self, command: Sequence[str], *, name: str) -> None:
        self.command = list(command)
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()
        self._errors: _End

    @property
    def pid(self) -> int | None:
        """The process id of the child; None before it starts, and after it was killed."""
        return self._process and self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the child has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the child unless it runs. Raises ChildError where the program cannot be started."""
        if self.runs:
            return
        self.close()
        guard()
        mark, pipe = uuid.uuid4().hex, subprocess.PIPE
        try:
            process = subprocess.Popen(
                self.command,
                env={**os.environ, "PYTHONPATH": user_path(), OWN_MARK: mark},
                start_new_session=True,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
            )
        except OSError as error:
            raise ChildError(f"{self.name} cannot be started: {self.command[0]}: {error.strerror or error}") from error
        self._process, self._unread = process, bytearray()
        self._kill = weakref.finalize(self, kill_worker, process, mark, os.getpid())
        for stream in (process.stdin, process.stdout):
            os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
        self._errors = _End(process)

    def send(self, message: Any, seconds: float) -> None:
        """Write one line, which the child reads within `seconds`. Raises ChildError."""
        self.start()
        process, until = self._running(), time.monotonic() + seconds
        line = memoryview(json.dumps(message, default=str).encode() + b"\n")
        pipe = process.stdin.fileno()  # type: ignore[union-attr]
        room = select.poll()
        room.register(pipe, select.POLLOUT)
        while line:
            line = line[put(pipe, line) :]
            left = until - time.monotonic()
            if line and left <= 0:
                raise self.fail(f"read no request for {seconds:g} s and was killed")
            if line:
                room.poll(left * 1000)

    def receive(self, seconds: float) -> Any:
        """The next line, within `seconds`. Raises ChildError."""
        process, until = self._running(), time.monotonic() + seconds
        pipe = process.stdout.fileno()  # type: ignore[union-attr]
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if len(self._unread) > LONGEST_LINE:
                raise self.fail(f"wrote a line of more than {LONGEST_LINE:,} bytes and was killed")
            left = until - time.monotonic()
            ready = readable_within(pipe, max(0.0, min(left, LOOK_SECONDS)))
            came = read_available(pipe, CHUNK) if ready else b""
            if came is None or (not came and process.poll() is not None):
                raise self.fail(_how_ended(process))
            if left <= 0:
                raise self.fail(f"did not answer within {seconds:g} s and was killed")
            self._unread += came
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            return json.loads(line)
        except ValueError:
            shown = printable(line[:80].decode(errors="replace"))
            raise self.fail(f"wrote a line that is not JSON, and was killed: {shown!r}") from None

    def fail(self, how: str) -> ChildError:
        """Kill the child; returns the error that says `how` it ended, with the end of its stderr."""
        errors = self._errors
        self.close()
        last = errors.text()
        return ChildError(f"{self.name} {how}{f'; its stderr ends with: {last}' if last else ''}")

    def close(self) -> None:
        """Kill the child and all it has started; a second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            self._kill()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):  # what was written and not read is lost with the child
                    stream.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ChildError(f"{self.name} is not running")
        return self._process


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "has closed its stdout and was killed"
    return ending(code) + WHY_KILLED.get(-code, "")


class _End:
    """Reads the stderr of a process as it comes, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, args=(process.stderr,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The last lines on one line, once the process has ended."""
        self._thread.join(STDERR_SECONDS)
        return printable(" ".join(self._kept.decode(errors="replace").split())[-STDERR_SHOWN:])

    def _drain(self, stderr: Any) -> None:
        with stderr:
            while came := os.read(stderr.fileno(), CHUNK):
                self._kept = (self._kept + came)[-STDERR_KEPT:]
