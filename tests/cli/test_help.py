"""The help of every verb: short, narrow, with examples that work."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import typer

from rlpost.cli.main import app, run


def verbs_of(command: Any, path: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The words of every verb, and the verb."""
    yield list(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs_of(inner, [*path, name])


TREE = typer.main.get_command(app)
VERBS = [path for path, _ in verbs_of(TREE)]
LEAVES = [(path, verb) for path, verb in verbs_of(TREE) if not hasattr(verb, "commands")]


def help_of(path: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*path, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_is_short_and_fits(
    path: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = help_of(path, capsys)
    assert out.startswith(f"Usage: {' '.join(['rlpost', *path])}")
    assert "[str]" not in out
    assert len(out.splitlines()) <= 60
    assert max(map(len, out.splitlines())) <= min(columns, 100)


@pytest.mark.parametrize(("path", "verb"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_every_argument_and_option_says_what_it_is(path: list[str], verb: Any) -> None:
    assert verb.get_short_help_str()
    assert [p.name for p in verb.params if not p.help] == []


def examples() -> list[str]:
    """Every command line that a help text shows."""
    epilogs = [verb.epilog or "" for _, verb in verbs_of(TREE)]
    lines = [line.strip().removeprefix("Example: ") for epilog in epilogs for line in epilog.splitlines()]
    return [line for line in lines if line.startswith("rlpost ")]


@pytest.mark.parametrize("line", examples())
def test_every_example_names_verbs_and_flags_that_exist(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0].partition("  ")[0])[1:]
    command: Any = TREE
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands
        command = command.commands[words.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("-") and len(word) > 1} <= known


def test_verbs_stand_in_sections_and_training_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of([], capsys).splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Train and try:", "Look at runs:", "Choose and prepare:"]
    assert lines[lines.index("Train and try:") + 1].split()[0] == "train"
    assert "  Begin with:" in lines


@pytest.mark.parametrize("path", [[], ["train"], ["config"]], ids=" ".join)
def test_a_group_alone_shows_its_help(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.rstrip() == help_of(path, capsys).rstrip()
