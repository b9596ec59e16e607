"""Settings' comments, help and pages avoid the phrases that readers have to solve; CONTRIBUTING.md lists the habits."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from rlpost.catalog import CHOICES, COMMANDS
from rlpost.cli.main import app
from rlpost.config import schema
from rlpost.config.schema import docs_of

ROOT = Path(__file__).parents[1]
RIDDLES = re.compile(
    r"\b(is|are|was|were) (told|said)\b|\bwhat is asked\b|\bof which\b|\bin the place of\b|\bso many\b"
    r"|\bthere is one\b|\bunder way\b|\blets? go of\b|\bturned down\b|\bgiven? back\b"
    r"|(?<!there )\b(is|are) no (?!longer\b|more\b|less\b)",
    re.IGNORECASE,
)
VAGUE = re.compile(r"(What|Those|Of|That|Where|The same) ")  # first words of a docstring
NAMES = re.compile(  # words about the handling of a value, in names of values
    r"(?<![a-z])(told|said|heard|asked|owes|taken|bring_up|under_way|(choose|keep|kept|resolve)_numbers)(?![a-z])"
)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
WHOLE_NAMES = ("Numbers", "NUMBERS")  # of precisions, in whole names
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """(verb, text) of the help of `command` and of every verb below it."""
    yield path, command.get_help(click.Context(command, info_name=path))
    for name, inner in getattr(command, "below", {}).items():
        yield from helps(inner, f"{path} {name}")


def comments() -> Iterator[tuple[str, str]]:
    """(key, meaning) of every setting."""
    for command in COMMANDS:
        classes = [cls for group in CHOICES for cls in schema.classes_of(command, group).values()]
        for settings in (command.settings, *classes):
            yield from ((f"{settings.__name__}.{key}", text) for key, text in docs_of(settings).items())


def pages() -> Iterator[tuple[str, str]]:
    for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        yield file.name, CODE.sub("", file.read_text())


def sources() -> Iterator[tuple[str, str]]:
    for file in (ROOT / "rlpost").rglob("*.py"):
        yield str(file.relative_to(ROOT)), file.read_text()


def docstrings() -> Iterator[tuple[str, str]]:
    for file in (ROOT / "rlpost").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(ROOT)} {getattr(node, 'name', '')}", ast.get_docstring(node) or ""


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, identifier) of every definition and use in `tree`."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
                yield line, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield line, name
            case ast.alias(name=name, asname=own):
                yield line, own or name.rpartition(".")[2]


def says_what_was_done(name: str) -> bool:
    """Whether an identifier has one of the parts that name no value, in either spelling."""
    return name in WHOLE_NAMES or NAMES.search(HUMP.sub("_", name).lower()) is not None


@pytest.mark.parametrize(
    "name",
    ["told", "_told_of", "is_told", "TAKEN", "RequestsUnderWay", "bring_up", "heardNow", "Numbers", "keep_numbers"],
)
def test_a_part_that_names_no_value_is_found(name: str) -> None:
    assert says_what_was_done(name)


@pytest.mark.parametrize("name", ["untold", "mistaken", "numbers", "line_numbers", "overheard", "basked", "unsaid"])
def test_a_longer_word_or_true_numbers_are_no_such_part(name: str) -> None:
    assert not says_what_was_done(name)


def test_an_identifier_names_what_a_value_is() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sorted((ROOT / "rlpost").rglob("*.py"))
        for line, name in identifiers(ast.parse(file.read_text()))
        if says_what_was_done(name)
    ]
    assert not found, "name what the value is, or what the function does:\n" + "\n".join(found)


def test_a_docstring_begins_with_the_thing() -> None:
    found = [f"{where}: {text.splitlines()[0]}" for where, text in docstrings() if VAGUE.match(text)]
    assert not found, "name the thing, or say what it does:\n" + "\n".join(found)


@pytest.mark.parametrize("texts", [comments, pages, sources, lambda: helps(typer.main.get_command(app), "rlpost")])
def test_no_riddle_is_left(texts: Callable[[], Iterator[tuple[str, str]]]) -> None:
    found = [f"{where}: {match[0]}" for where, text in texts() for match in RIDDLES.finditer(text)]
    assert not found, "say it plainly:\n" + "\n".join(found)
