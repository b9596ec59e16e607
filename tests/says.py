"""Wording, kept in one file a verb: tests/snapshots/VERB.txt. `pytest --snapshots` writes it anew, for the review.

A section of a file has a test's name as its heading, and below it the text that the test has shown.
"""

from __future__ import annotations

import ast
import fcntl
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FOLDER = TESTS / "snapshots"
HEADING = "=== "


def read(file: Path) -> dict[str, str]:
    """Heading -> text, of one file."""
    text = file.read_text() if file.exists() else ""
    sections = re.split(f"^{HEADING}(.*)\n", text, flags=re.MULTILINE)[1:]
    return {name: text.removesuffix("\n") for name, text in zip(sections[::2], sections[1::2], strict=True)}


class Says:
    """Compares a test's texts with its sections of a verb's file, or writes them there."""

    def __init__(self, test: str, hidden: dict[str, str], *, write: bool) -> None:
        self._test = test  # file.py::name[case]
        self._hidden = hidden  # texts that differ between machines, and what stands for them
        self._write = write
        self._shown: dict[str, int] = {}  # sections of this test, by file

    def __call__(self, verb: str, text: object) -> None:
        """Compare `text` with the next section of this test in the file of `verb`."""
        number = self._shown[verb] = self._shown.get(verb, 0) + 1
        name = self._test if number == 1 else f"{self._test} {number}"
        shown = str(text).rstrip("\n")
        for found, instead in self._hidden.items():
            shown = shown.replace(found, instead)
        file = FOLDER / f"{verb}.txt"
        if self._write:
            with file.open("a") as lock:  # other workers write other tests' sections
                fcntl.flock(lock, fcntl.LOCK_EX)
                sections = read(file) | {name: shown}
                file.write_text("".join(f"{HEADING}{each}\n{sections[each]}\n" for each in sorted(sections)))
        assert read(file).get(name) == shown, f"see {file.name}; pytest --snapshots writes it anew"

    @contextmanager
    def refused(self, verb: str, error: type[BaseException], part: str = "") -> Iterator[None]:
        """Expect an `error` with `part`, a key or a number, in its message, and compare its whole wording."""
        with pytest.raises(error, match=re.escape(part) or None) as raised:
            yield
        self(verb, raised.value)

    def refusals(
        self, verb: str, error: type[BaseException], work: Callable[[Any], object], cases: Iterable[object]
    ) -> None:
        """Call `work` with each of `cases`, expect an `error` of one line from each, and compare all messages."""
        messages = []
        for case in cases:
            with pytest.raises(error) as raised:
                pytest.fail(f"{case!r} is not refused, but gives {work(case)!r}")
            assert "\n" not in str(raised.value), case
            messages.append(f"{case!r}\n  {raised.value}")
        self(verb, "\n".join(messages))


def tests_of(headings: Iterator[str]) -> set[tuple[str, str]]:
    """The file and function of each heading."""
    return {(name.partition("::")[0], re.split(r"[\[ ]", name.partition("::")[2])[0]) for name in headings}


def existing() -> set[tuple[str, str]]:
    """The file and function of each test that uses `says`."""
    found = set()
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(each.arg == "says" for each in node.args.args):
                found.add((str(file.relative_to(TESTS)), node.name))
    return found
