"""How a program ended, and what is kept of its output."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlpost.child import ending


class KilledBy(Enum):
    """The limit for which the sandbox ended a program."""

    time = "time"
    memory = "memory"
    output = "output"
    files = "files"


_REASONS = {
    KilledBy.time: "Code execution timed out",
    KilledBy.memory: "Code execution took more memory than it is allowed",
    KilledBy.output: "Code execution wrote more output than it is allowed",
    KilledBy.files: "Code execution made more files than it is allowed",
}


@dataclass(frozen=True)
class Execution:
    """One program, after its end.

    `exit_code` is Python's own, 128 + n where signal n ended the process, None where the sandbox
    did. `finished` says that the interpreter reported the program's end: one that leaves by `os._exit(0)`
    before its last line has exit code 0 and is not finished. `cut_bytes` of output were not kept.

    That report is the interpreter's, and the program is in it: one that wants to can send the same. So whether a
    program did what it should is told by what comes out of it and is compared outside: `Session.ask`.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    killed_by: KilledBy | None
    finished: bool
    cut_bytes: int
    seconds: float

    @property
    def claims_success(self) -> bool:
        """Whether the interpreter reported an end without an exception: no proof that there was one."""
        return self.finished and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        return self.killed_by is KilledBy.time

    @property
    def output_cut(self) -> bool:
        return self.cut_bytes > 0

    @property
    def reason(self) -> str:
        """In words, why a program did not reach its end; empty where it did."""
        if self.finished:
            return ""
        if self.killed_by is not None:
            return _REASONS[self.killed_by]
        if self.exit_code is not None and self.exit_code > 128:
            return f"Python {ending(128 - self.exit_code)}"
        if self.exit_code is None:
            return "Python closed the pipes that it is run by"
        return f"Python ended early with exit code {self.exit_code}"


@dataclass(frozen=True)
class Answer:
    """What a program in a session gives for an expression, where it `given` one that can be carried out of it.

    `value` is made of None, numbers, strings, bytes, tuples, lists, dicts and sets, of their own types: nothing of
    the program is in it, so comparing it with what is expected runs none of its code.
    """

    given: bool
    value: Any
    execution: Execution

    @classmethod
    def read(cls, execution: Execution, mark: str) -> Answer:
        """The answer that stands behind the last `mark` of the output."""
        _, found, text = execution.stdout.rpartition(mark)
        try:
            value = ast.literal_eval(text.removesuffix("\n")) if found and execution.claims_success else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not written by repr, or too deep
            found = ""
            value = None
        return cls(bool(found) and execution.claims_success, value, execution)


class Capture:
    """The beginning and the end of a stream of bytes, `limit` bytes in all; what is between is counted."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._room = (limit + 1) // 2
        self._tail_room = limit - self._room
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_room)]

    @property
    def cut_bytes(self) -> int:
        return self.total - len(self._head) - len(self._tail)

    def text(self) -> str:
        """As UTF-8; bytes that are none become �, and where some are missing their number is said."""
        if not self.cut_bytes:
            return (self._head + self._tail).decode(errors="replace")
        note = f"\n[{self.cut_bytes} bytes left out]\n"
        return self._head.decode(errors="replace") + note + self._tail.decode(errors="replace")
