"""What an examination finds: a line each, with what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from rlpost.errors import RlpostError
from rlpost.text import first_line


class Level(Enum):
    """Whether to go on: all is well, look at this first, or the training cannot work or would learn nothing true."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """One of them: what it is `about`, what was found, and the `fix`, empty where nothing is to be done."""

    level: Level
    about: str
    text: str
    fix: str = ""


class Findings:
    """All of an examination, each told as soon as it is found."""

    def __init__(self, tell: Callable[[Finding], None] = lambda finding: None) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def ok(self, about: str, text: str) -> None:
        """Something is as it should be."""
        self._add(Finding(Level.ok, about, text))

    def warn(self, about: str, text: str, fix: str) -> None:
        """Something that may be meant, or may not matter."""
        self._add(Finding(Level.warning, about, text, fix))

    def fail(self, about: str, text: str, fix: str = "") -> None:
        """Something with which training cannot work."""
        self._add(Finding(Level.error, about, text, fix))

    @property
    def failed(self) -> bool:
        """Whether there is an error among them."""
        return any(finding.level is Level.error for finding in self.all)

    @contextlib.contextmanager
    def looking(self, about: str) -> Iterator[None]:
        """A block of checks; what it raises is the last it finds, and the next block begins."""
        try:
            yield
        except RlpostError as error:
            first, *more = str(error).splitlines()
            self.fail(about, first + (f"; such as {more[0].strip()}" if more else ""))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a model's or a reward's own code: told, as all that is found
            self.fail(about, f"{type(error).__name__}: {first_line(error)}")

    def _add(self, finding: Finding) -> None:
        self.all.append(finding)
        self._tell(finding)
