"""The help of every verb: short, narrow, with examples that work."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import rlpost
from rlpost.catalog import COMMANDS
from rlpost.cli.main import VERBS as VERBS_OF_RLPOST
from rlpost.cli.main import app, run
from rlpost.cli.usage import Verbs
from rlpost.config.other_words import answers
from rlpost.config.schema import all_keys

# a starter's, a beginning, files
NOT_KEYS = ("env.numbers", "env.highest", "eval.stop_at_", "tracking.json", "report.html", "report.json")


def verbs_of(command: Any, path: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The words of every verb, and the verb."""
    yield list(path), command
    for name, inner in getattr(command, "below", {}).items():
        yield from verbs_of(inner, [*path, name])


TREE: Any = typer.main.get_command(app)
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


def exists(line: str) -> bool:
    """Whether a command line names a verb that exists."""
    words, command = line.split()[1:], TREE
    while words and words[0] in getattr(command, "below", {}):
        command = command.below[words.pop(0)]
    return command is not TREE and not (words and words[0].islower() and isinstance(command, Verbs))


def test_an_old_verb_is_answered_with_one_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in answers("old_verbs").items():
        if not exists(f"rlpost {old.replace('.', ' ')}"):
            assert run(old.split(".")) == 2
            assert new in capsys.readouterr().err
            assert exists(new), new
            assert unknown_flags(new.partition(" (")[0]) == set()


def examples() -> list[str]:
    """Every command line that a help text shows."""
    epilogs = [verb.epilog or "" for _, verb in verbs_of(TREE)]
    lines = [line.strip().removeprefix("Example: ") for epilog in epilogs for line in epilog.splitlines()]
    return [line for line in lines if line.startswith("rlpost ")]


def unknown_flags(line: str) -> set[str]:
    """The flags of a command line that its verb does not have."""
    words = line.split()[1:]
    command: Any = TREE
    while words and words[0] in getattr(command, "below", {}):
        command = command.below[words.pop(0)]
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    return {word for word in words if re.match("--?[a-z]", word)} - known if command is not TREE else set()


@pytest.mark.parametrize("line", examples())
def test_every_example_names_verbs_and_flags_that_exist(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0].partition("  ")[0])
    assert words[1].startswith("-") or words[1] in VERBS_OF_RLPOST
    assert unknown_flags(shlex.join(words)) == set()


def messages() -> Iterator[tuple[str, str]]:
    """(place, text) of every string in the sources that is not a docstring."""
    for file in sorted(Path(rlpost.__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            if id(node) not in docs and not isinstance(getattr(node, "value", ""), bytes):
                yield f"{file.name}:{getattr(node, 'lineno', '')}", text


def test_every_message_names_flags_and_settings_that_exist() -> None:
    keys = {key for command in COMMANDS for key in all_keys(command)}
    groups = {key.partition(".")[0] for key in keys if "." in key} - {"model"}  # model.safetensors is a file
    for where, text in messages():
        for command in re.findall(r"\brlpost [a-z][^;,:)\n\"'`(]*", text):
            assert unknown_flags(command) == set(), f"{where}: {command}"
        for key, group in re.findall(r"(?<![\w./-])(([a-z_]+)\.[a-z_]+)(?![\w(]|:[A-Za-z])", text):
            assert group not in groups or key in keys or key in NOT_KEYS, f"{where}: {key}"


def test_verbs_stand_in_sections_and_training_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of([], capsys).splitlines()
    titles = [number for number, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")]
    assert len(titles) == 4  # the options come first
    assert [lines[number + 1].split()[0] for number in titles[1:]] == ["train", "runs", "config"]
    groups = {name: verb.help for name, verb in TREE.below.items() if isinstance(verb, Verbs)}
    assert groups == {name: VERBS_OF_RLPOST[name].help for name in groups}


@pytest.mark.parametrize("path", [[], ["train"], ["config"]], ids=" ".join)
def test_a_group_alone_shows_its_help(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.rstrip() == help_of(path, capsys).rstrip()
