"""One-letter typing mistakes of every word that a command line takes, and the suggestions they get."""

from __future__ import annotations

import random
import string
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from rlpost.catalog import CHOICES, COMMANDS, Command
from rlpost.cli.main import run
from rlpost.config.compose import merge_all
from rlpost.config.keys import groups_of
from rlpost.config.overrides import Override
from rlpost.config.recipes import find_recipe
from rlpost.config.registry import all_keys, classes_of, options, recipes
from rlpost.config.unknown import unknown_key, unknown_option
from rlpost.errors import ConfigError

LETTERS = string.ascii_lowercase + string.digits + "_"


def typos(word: str, sampled: random.Random) -> list[str]:
    """Every deletion and swap of neighbours; at every position one replacement and one insertion, at random."""
    places = range(len(word))
    made = {word[:i] + word[i + 1 :] for i in places}
    made |= {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}
    made |= {word[:i] + sampled.choice(LETTERS) + word[i + 1 :] for i in places}
    made |= {word[:i] + sampled.choice(LETTERS) + word[i:] for i in range(len(word) + 1)}
    return sorted(made - {word, ""})


def test_typos_are_one_edit_of_each_kind() -> None:
    made = typos("lr", random.Random(0))
    assert {"l", "r", "rl"} <= set(made)
    assert sorted(map(len, made)) == [1, 1, 2, 2, 2, 3, 3, 3]


def key_typos(command: Command[Any], sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    """Typo, the message it gets, the word meant: for every key and group under every choice of options."""
    groups = groups_of(command.settings)
    valid = {name for c in COMMANDS for name in (*all_keys(c), *groups_of(c.settings), "recipe")}
    asked: set[str] = set()
    for group, rows in [("", {"": None}), *((group, classes_of(command, group)) for group in groups)]:
        for option in rows:
            words = [f"{group}={option}"] if group and option in options(group) else []
            merged = merge_all(command, words)
            names = [key.name for key in merged.keys]
            for word in {*names, *groups, "recipe"} - asked:
                asked.add(word)
                for typo in typos(word, sampled):
                    if typo not in valid and not any(name.startswith(f"{typo}.") for name in names):
                        yield typo, unknown_key(Override(typo, "1"), command, names, merged.choices), word
    assert asked >= {*all_keys(command), *groups}


def option_typos(sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    for group in CHOICES:
        known = options(group)
        for option in known:
            for typo in typos(option, sampled):
                if typo not in known:
                    yield f"{group}={typo}", unknown_option(Override(group, typo), known), option


def recipe_typos(sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    for recipe in recipes():
        for typo in typos(recipe, sampled):
            if typo not in recipes():
                with pytest.raises(ConfigError) as caught:
                    find_recipe(typo)
                yield f"recipe={typo}", str(caught.value), recipe


def rate(told: Iterable[tuple[str, str, str]], name: str, capsys: pytest.CaptureFixture[str]) -> float:
    """The share whose message suggests the word meant, printed with those that do not."""
    counted = [(typo, message, f"did you mean {word}?" in message) for typo, message, word in told]
    right = sum(ok for _, _, ok in counted)
    with capsys.disabled():
        print(f"\n{name}: {right} of {len(counted)} typos lead back, {right / len(counted):.2%}", end=" ")
    print("\n".join(f"{typo}: {message}" for typo, message, ok in counted if not ok))
    return right / len(counted)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_typo_in_any_key_or_group_leads_back_to_it(command: Command[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(key_typos(command, random.Random(0)), f"keys of {command.verb}", capsys) >= 0.95


def test_a_typo_in_any_option_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(option_typos(random.Random(0)), "options", capsys) >= 0.95


def test_a_typo_in_any_recipe_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(recipe_typos(random.Random(0)), "recipes", capsys) >= 0.95


def verbs_of(command: Any, path: Collection[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The words of every verb, and the verb."""
    yield list(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs_of(inner, [*path, name])


def test_a_typo_in_any_verb_or_flag_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from rlpost.cli.main import app

    sampled = random.Random(0)
    told: list[tuple[str, str, str]] = []
    for path, verb in verbs_of(typer.main.get_command(app)):
        beside = getattr(verb, "commands", {})
        for name in beside:
            told += [
                (typo, said([*path, typo], capsys), " ".join(["rlpost", *path, name]))
                for typo in typos(name, sampled)[::4]
                if typo not in beside and not typo.startswith("-")
            ]
        flags = [flag for parameter in verb.params for flag in parameter.opts if flag.startswith("--")]
        for flag in flags:
            told += [
                (typo, said([*path, typo], capsys), flag)
                for typo in (f"--{word}" for word in typos(flag[2:], sampled)[::4])
                if typo not in flags and not typo.startswith("---")
            ]
    assert rate(told, "verbs and flags", capsys) >= 0.95


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 2
    captured = capsys.readouterr()
    return captured.err
