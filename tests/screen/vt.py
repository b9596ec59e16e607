"""A terminal to test on: enough of one to see what a person would, and strict about everything else."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Terminal:
    """A grid of cells with an alternate screen. Any control character that is not expected is an error."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.alternate = False
        self.cursor_shown = True
        self.wraps = True
        self.coloured = False  # whether a colour was ever set
        self._normal, self._other = self._empty(), self._empty()
        self._row = self._column = 0
        self._saved = (0, 0)
        self._rest = ""
        self._resized = False  # a frame may still be one for another size

    def _empty(self) -> list[list[str]]:
        return [[" "] * self.columns for _ in range(self.lines)]

    @property
    def grid(self) -> list[list[str]]:
        return self._other if self.alternate else self._normal

    @property
    def shown(self) -> list[str]:
        """What stands on each line."""
        return ["".join(row).rstrip() for row in self.grid]

    def resize(self, columns: int, lines: int) -> None:
        """What does not fit any more is cut off; what is new is empty."""
        self.columns, self.lines, self._resized = columns, lines, True
        for name in ("_normal", "_other"):
            old = getattr(self, name)
            new = self._empty()
            for row, kept in zip(new, old, strict=False):
                row[: len(kept)] = kept[:columns]
            setattr(self, name, new)
        self._row, self._column = min(self._row, lines - 1), min(self._column, columns - 1)

    def feed(self, text: str) -> None:
        text = self._rest + text
        self._rest = ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = SEQUENCE.match(text, at)
                if found is None:
                    assert len(text) - at < 12, f"an escape that is not expected: {text[at : at + 12]!r}"
                    self._rest = text[at:]
                    return
                self._control(*found.groups())
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _control(self, private: str, numbers: str, letter: str) -> None:
        values = [int(n) for n in numbers.split(";") if n]
        match (private, letter):
            case ("", "m"):
                self.coloured |= any(30 <= v < 50 or 90 <= v < 108 for v in values)
            case ("", "H"):
                row, column = values or [1, 1]
                self._row, self._column = min(row, self.lines) - 1, min(column, self.columns) - 1
            case ("", "K"):
                assert not values
                row = self.grid[self._row]
                row[self._column :] = [" "] * (self.columns - self._column)
            case ("", "J"):
                assert not values
                for row in self.grid[self._row + 1 :]:
                    row[:] = [" "] * self.columns
            case ("?", "h" | "l"):
                self._mode(values[0], letter == "h")
            case _:
                raise AssertionError(f"a sequence that is not expected: {private}{numbers}{letter}")

    def _mode(self, mode: int, on: bool) -> None:
        match mode:
            case 7:
                self.wraps = on
            case 25:
                self.cursor_shown = on
            case 1049 if on:
                assert not self.alternate
                self._saved, self.alternate, self._other = (self._row, self._column), True, self._empty()
            case 1049:
                self.alternate = False
                self._row, self._column = self._saved
            case _:
                raise AssertionError(f"a mode that is not expected: {mode}")

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            assert not self.alternate, "a picture has no line breaks"
            self._row += 1
            if self._row == self.lines:
                self.grid.append([" "] * self.columns)
                del self.grid[0]
                self._row -= 1
        else:
            assert character.isprintable(), f"a control character: {character!r}"
            width = cell_len(character)
            if width == 0:
                before = max(0, self._column - 1)
                self.grid[self._row][before] += character
                return
            if self._column + width > self.columns:
                assert self.wraps or self._resized, f"{character!r} has no room on line {self._row}"
                if not self.wraps:
                    return
                self._put("\r")
                self._put("\n")
            self.grid[self._row][self._column : self._column + width] = [character, *[""] * (width - 1)]
            self._column += width


class Session:
    """A Python program on a terminal of its own."""

    def __init__(
        self, program: str, arguments: Sequence[str] = (), *, columns: int = 80, lines: int = 24, **env: str
    ) -> None:
        self.terminal = Terminal(columns, lines)
        self._ours, theirs = pty.openpty()
        self._resize(columns, lines)
        attributes = termios.tcgetattr(theirs)
        attributes[3] &= ~termios.ECHO  # what is typed is not shown
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        environment: Mapping[str, str] = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1", **env},
        )
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def until(self, seen: Callable[[Terminal], bool], seconds: float = 120) -> Terminal:
        """Read until `seen`; fails with what is shown after `seconds`."""
        deadline = time.monotonic() + seconds
        while not seen(self.terminal):
            assert time.monotonic() < deadline, "\n".join(self.terminal.shown)
            alive = self.process.poll() is None
            assert self._read() or alive, "\n".join([f"ended by {self.process.poll()}", *self.terminal.shown])
        return self.terminal

    def until_shown(self, text: str) -> Terminal:
        """Read until `text` stands somewhere."""
        return self.until(lambda terminal: any(text in line for line in terminal.shown))

    def hang_up(self) -> None:
        """Close the terminal, as somebody does who closes its window."""
        os.close(self._ours)

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + 120
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < deadline, "\n".join(self.terminal.shown)
        os.close(self._ours)
        return self.process.wait()

    def type(self, text: str) -> None:
        """Send what somebody types."""
        os.write(self._ours, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        self.terminal.resize(columns, lines)
        self._resize(columns, lines)

    def _resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 0.1)
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # the other end is closed
            return False
        self.terminal.feed(self._decoder.decode(data))
        return bool(data)
