"""Command lines of rlpost, run in this process, and what they print."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from rlpost.cli.main import run


class CommandLine:
    """Runs a command line: `rlpost("runs list")` is what it printed to stdout, and `rlpost.err` what to stderr."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.err = ""

    def __call__(self, line: str | Sequence[str], code: int = 0) -> str:
        """The stdout of a line, a text or its words, that ends with `code`."""
        words = shlex.split(line) if isinstance(line, str) else list(line)
        self._capture.readouterr()
        assert run(words) == code, self._capture.readouterr().err
        out, self.err = self._capture.readouterr()
        return out

    def lines(self, line: str | Sequence[str], code: int = 0) -> list[str]:
        """The lines of stdout."""
        return self(line, code).splitlines()

    def json(self, line: str | Sequence[str], code: int = 0) -> Any:
        """What the same line prints with --json."""
        words = shlex.split(line) if isinstance(line, str) else line
        return json.loads(self([*words, "--json"], code))

    def refused(self, line: str | Sequence[str], code: int = 2) -> str:
        """The one line that a command is refused with."""
        out = self(line, code)
        assert (out, self.err.count("\n"), self.err[:7]) == ("", 1, "error: "), self.err
        return self.err

    def refusals(self, lines: str, code: int = 2) -> str:
        """Each of `lines` with the one line that it is refused with, as a terminal shows them."""
        typed = filter(None, map(str.strip, lines.splitlines()))
        return "".join(f"$ rlpost {line}\n{self.refused(line, code)}" for line in typed)
